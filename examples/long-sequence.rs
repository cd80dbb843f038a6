//! Trains a small GPT on texts of which a single one does not fit into the memory budget: the
//! backward pass computes activations again instead of keeping them.
//!
//! ```text
//! cargo run --release --example long-sequence
//! cargo run --release --example long-sequence -- --memory 130MiB --length 1536
//! ```
//!
//! Then trains the same model once more without a limit. Both end with the same loss, to the bit.
//!
//! The last line is for scripts: the budget, the predicted and the measured peak, the measured peak
//! without a limit (all in bytes), the loss with and without a limit, and the additional time as a
//! share of the time without a limit. A measured peak is the peak of the heap above its level
//! before the model was built.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::LossMetric;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use clap::Parser;
use firebox::{Budget, Bytes, Lazy, Learner, MemoryUse, MicroBatch, PlanReport};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// The number of different tokens.
const VOCABULARY: usize = 64;
/// The features of a token.
const WIDTH: usize = 64;

/// Train a small GPT on texts that are too long for the memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (64MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "64MiB")]
    memory: Budget,
    /// Tokens of a text.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    length: u32,
    /// Texts, each of which is a batch.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    texts: u32,
    /// Folder for logs.
    #[arg(long, default_value = ".artifacts/long-sequence")]
    artifacts: std::path::PathBuf,
}

/// A text, as numbers of tokens.
type Text = Vec<i32>;

/// `count` texts in a language of which every second token follows from the one before it.
fn texts(count: usize, length: usize) -> Vec<Text> {
    let text = |number: usize| {
        let mut state = number as u64 + 1;
        let mut draw = || {
            // The constants of Knuth's MMIX.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % VOCABULARY
        };
        let mut text = Vec::with_capacity(length + 1);
        while text.len() <= length {
            let token = draw();
            text.extend([token as i32, ((token * 5 + 3) % VOCABULARY) as i32]);
        }
        text.truncate(length + 1);
        text
    };
    (0..count).map(text).collect()
}

#[derive(Clone, Debug, MicroBatch)]
struct Texts<B: Backend> {
    /// `[items, length]`
    tokens: Tensor<B, 2, Int>,
    /// The tokens that come next: `[items, length]`.
    next: Tensor<B, 2, Int>,
}

#[derive(Clone)]
struct TextBatcher;

impl<B: Backend> Batcher<B, Text, Texts<B>> for TextBatcher {
    fn batch(&self, texts: Vec<Text>, device: &B::Device) -> Texts<B> {
        let shape = [texts.len(), texts[0].len() - 1];
        let from = |begin: usize| {
            let tokens: Vec<i32> =
                texts.iter().flat_map(|text| text[begin..begin + shape[1]].to_vec()).collect();
            Tensor::from_data(TensorData::new(tokens, shape), device)
        };
        Texts { tokens: from(0), next: from(1) }
    }
}

#[derive(Module, Debug)]
struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: TransformerEncoder<B>,
    head: Linear<B>,
}

impl<B: Backend> Gpt<B> {
    fn new(length: usize, device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(length, WIDTH).init(device),
            blocks: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 2, 4).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn classify(&self, texts: Texts<B>) -> ClassificationOutput<B> {
        let [items, length] = texts.tokens.dims();
        let device = texts.tokens.device();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(texts.tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(items, length, &device);
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(x).reshape([items * length, VOCABULARY]);
        let next = texts.next.reshape([items * length]);
        let loss = CrossEntropyLossConfig::new().init(&device);
        ClassificationOutput::new(loss.forward(logits.clone(), next.clone()), logits, next)
    }
}

impl<B: AutodiffBackend> TrainStep for Gpt<B> {
    type Input = Texts<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, texts: Texts<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(texts);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Gpt<B> {
    type Input = Texts<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, texts: Texts<B>) -> ClassificationOutput<B> {
        self.classify(texts)
    }
}

/// What a training run ended with.
struct Run {
    report: PlanReport,
    memory: MemoryUse,
    measured: Bytes,
    /// Without planning.
    time: Duration,
    /// On a text that it was not trained on.
    loss: f32,
}

fn train(options: &Options, memory: Budget) -> anyhow::Result<Run> {
    let device = Default::default();
    B::seed(&device, 42);
    let length = options.length as usize;
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let learner = Learner::builder().auto_batch().memory(memory).progress().build(
        Gpt::<B>::new(length, &device),
        AdamConfig::new().init(),
        3e-3,
    );
    let mut known = texts(options.texts as usize + 1, length);
    let unknown = known.pop().context("there is one more")?;
    let loader = DataLoaderBuilder::new(TextBatcher).batch_size(1);
    let train_loader = loader.build(InMemDataset::new(known));
    let loader = DataLoaderBuilder::new(TextBatcher).batch_size(1);
    let valid_loader = loader.build(InMemDataset::new(vec![unknown.clone()]));
    let training = SupervisedTraining::new(&options.artifacts, train_loader, valid_loader)
        .metrics((LossMetric::new(),))
        .num_epochs(1);
    let began = Instant::now();
    let fitted = learner.fit(training)?;
    let time = began.elapsed();
    let measured = Bytes::new(HEAP.peak_usage().saturating_sub(before) as u64);
    let report = fitted.report.context("no batch was trained on")?;
    let time = time.saturating_sub(fitted.plans.iter().map(|plan| plan.cost.time).sum());
    let batch = TextBatcher.batch(vec![unknown], &device);
    let loss = fitted.model.classify(batch).loss.into_scalar();
    let memory = fitted.memory.context("no batch was trained on")?;
    Ok(Run { report, memory, measured, time, loss })
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let limited = train(&options, options.memory)?;
    let free = train(&options, Budget::Bytes(Bytes::MAX))?;
    let overhead = limited.time.as_secs_f64() / free.time.as_secs_f64() - 1.0;
    match limited.report.recomputed {
        Some(recomputed) => println!(
            "Without a limit a text needs {}. Within {}, {recomputed}:\n\
             training used {} and took {:.0} % more time. The loss is {} in both.",
            free.measured,
            limited.report.budget,
            limited.measured,
            100.0 * overhead,
            limited.loss,
        ),
        None => println!("A text fits into {} without recomputation.", limited.report.budget),
    }
    ensure!(limited.loss == free.loss, "losses are {} and {}", limited.loss, free.loss);
    println!(
        "result: budget={} predicted={} measured={} unlimited={} loss={} loss_unlimited={} overhead={overhead:.3}",
        limited.report.budget.get(),
        limited.memory.predicted.get(),
        limited.measured.get(),
        free.measured.get(),
        limited.loss,
        free.loss,
    );
    Ok(())
}
