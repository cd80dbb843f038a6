//! Trains a small CNN on handwritten digits, in micro-batches that fit a memory budget.
//!
//! ```text
//! cargo run --release --example digits
//! cargo run --release --example digits -- --memory free
//! mpirun -n 2 target/release/examples/digits            # built with `--features mpi`
//! ```
//!
//! At the end it says what the whole batch would have needed.
//!
//! The last line is for scripts. It gives the accuracy on the validation split, the batch size, the
//! number of micro-batches, the budget, and the predicted and measured peak in bytes. The measured
//! peak is the peak of the heap above its level before the model was built.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    Dropout, DropoutConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use clap::Parser;
use firebox::plan::{SavedPlanner, SavedTrace};
use firebox::trace::Heap;
use firebox::{Budget, Bytes, Lazy, Learner, MicroBatch, Ranks, shard};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// Train a small CNN on handwritten digits within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (16MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "16MiB")]
    memory: Budget,
    /// Passes over the training images.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images per optimizer step, of all ranks together.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Seed for the split, the weights, the shuffling and the dropout.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Print the plan, then exit without training.
    #[arg(long)]
    plan_only: bool,
    /// Save a trace of the step for the command-line tool `firebox`, then exit without training.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Folder for logs.
    #[arg(long, default_value = ".artifacts/digits")]
    artifacts: PathBuf,
}

/// An image of 8 × 8 pixels, each from 0 to 1, and the digit it shows.
#[derive(Clone, Debug)]
struct Digit {
    pixels: [f32; 64],
    label: i32,
}

#[derive(Clone, Debug, MicroBatch)]
struct DigitBatch<B: Backend> {
    /// `[items, 1, 8, 8]`
    images: Tensor<B, 4>,
    /// `[items]`
    targets: Tensor<B, 1, Int>,
}

#[derive(Clone, Debug)]
struct DigitBatcher;

impl<B: Backend> Batcher<B, Digit, DigitBatch<B>> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &B::Device) -> DigitBatch<B> {
        let pixels: Vec<f32> = items.iter().flat_map(|digit| digit.pixels).collect();
        let labels: Vec<i32> = items.iter().map(|digit| digit.label).collect();
        DigitBatch {
            images: Tensor::from_data(TensorData::new(pixels, [items.len(), 1, 8, 8]), device),
            targets: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: GroupNorm<B>,
    conv2: Conv2d<B>,
    norm2: GroupNorm<B>,
    conv3: Conv2d<B>,
    norm3: GroupNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Cnn<B> {
    fn new(device: &B::Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            conv1: conv([1, 32]),
            norm1: GroupNormConfig::new(8, 32).init(device),
            conv2: conv([32, 64]),
            norm2: GroupNormConfig::new(8, 64).init(device),
            conv3: conv([64, 64]),
            norm3: GroupNormConfig::new(8, 64).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            hidden: LinearConfig::new(64 * 4 * 4, 64).init(device),
            output: LinearConfig::new(64, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// Maps images `[items, 1, 8, 8]` to logits `[items, 10]`.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.relu.forward(self.norm1.forward(self.conv1.forward(images)));
        let x = self.relu.forward(self.norm2.forward(self.conv2.forward(x)));
        let x = self.pool.forward(x);
        let x = self.relu.forward(self.norm3.forward(self.conv3.forward(x))).flatten(1, 3);
        let x = self.relu.forward(self.hidden.forward(self.dropout.forward(x)));
        self.output.forward(x)
    }

    fn classify(&self, batch: DigitBatch<B>) -> ClassificationOutput<B> {
        let output = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Cnn<B> {
    type Input = DigitBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: DigitBatch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Cnn<B> {
    type Input = DigitBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: DigitBatch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let ranks = ranks()?;
    let device = ranks.device::<B>();
    B::seed(&device, options.seed);
    let (train, valid) = split(load_digits()?, options.seed);
    let valid_digits = valid.clone();
    let batch_size = (options.batch_size as usize).div_ceil(ranks.world());

    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let model = Cnn::<B>::new(&device);
    let builder = Learner::builder()
        .auto_batch()
        .memory(options.memory)
        .ranks(ranks.clone())
        .metrics_of_all_ranks(&options.artifacts)
        .progress()
        .stop_on_ctrl_c();
    let learner = builder.clone().build(model, AdamConfig::new().init(), 2e-3);
    let digits: Vec<Digit> = train.iter().take(batch_size).cloned().collect();

    if options.plan_only || options.trace.is_some() {
        let batch: DigitBatch<B> = DigitBatcher.batch(digits, &device);
        if let Some(path) = &options.trace {
            let trace = learner.trace(&batch)?;
            trace.save(path).with_context(|| format!("cannot write {}", path.display()))?;
            let path = path.display();
            println!("saved {path}: `firebox plan {path} --batch 4096 --card t4` plans it");
        }
        if options.plan_only {
            println!("{}", learner.plan(&batch)?);
        }
        return Ok(());
    }

    std::fs::create_dir_all(&options.artifacts)
        .with_context(|| format!("cannot write to {}", options.artifacts.display()))?;
    // Each rank has its part of the digits, in another order in each epoch.
    let part = |digits| shard(InMemDataset::new(digits), ranks.rank(), ranks.world());
    let train_loader = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(batch_size)
        .build(part(train).seed(options.seed));
    let valid_loader =
        DataLoaderBuilder::new(DigitBatcher).batch_size(batch_size).build(part(valid).in_order());
    let training = SupervisedTraining::new(&options.artifacts, train_loader, valid_loader)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(options.epochs as usize);
    let fitted = learner.fit(training)?;
    let measured = HEAP.peak_usage().saturating_sub(before);
    // burn's dashboard, if it was built in, leaves the terminal with it.
    drop(fitted.renderer);
    if !ranks.is_root() {
        return Ok(());
    }

    let accuracy = accuracy(&fitted.model, &valid_digits);
    let report = fitted.report.context("no batch was trained on")?;
    let memory = fitted.memory.context("no batch was trained on")?;
    let learner = builder.build(Cnn::<B>::new(&device), AdamConfig::new().init(), 2e-3);
    let trace = learner.trace(&DigitBatcher.batch(digits, &device))?;
    let on = if ranks.world() > 1 { " on each rank" } else { "" };
    println!(
        "A batch of {batch_size}{on} at once would have needed {}.\n\
         In {} micro-batches training was predicted to need {}, and used {}; its accuracy is {accuracy:.3}.",
        whole(&trace, batch_size)?,
        report.plan.len(),
        memory.predicted,
        Bytes::new(measured as u64),
    );
    println!(
        "result: accuracy={accuracy:.3} batch={batch_size} micro_batches={} budget={} predicted={} \
         measured={measured}",
        report.plan.len(),
        report.budget.get(),
        memory.predicted.get(),
    );
    Ok(())
}

/// The processes that `mpirun` has started.
#[cfg(feature = "mpi")]
fn ranks() -> anyhow::Result<Ranks> {
    Ok(Ranks::mpi()?)
}

/// This process.
#[cfg(not(feature = "mpi"))]
fn ranks() -> anyhow::Result<Ranks> {
    Ok(Ranks::alone())
}

/// What a batch needs that is not split.
fn whole(trace: &SavedTrace, items: usize) -> anyhow::Result<Bytes> {
    let planner = SavedPlanner::new("flex, Cpu", Arc::new(Heap::flex()), Bytes::MAX);
    Ok(planner.plan(trace, items)?.predicted())
}

/// Share of digits that the model recognizes.
fn accuracy(model: &Cnn<Lazy<Flex>>, digits: &[Digit]) -> f64 {
    let mut right = 0;
    for digits in digits.chunks(64) {
        let batch: DigitBatch<Lazy<Flex>> =
            DigitBatcher.batch(digits.to_vec(), &Default::default());
        let guesses = model.forward(batch.images).argmax(1).flatten::<1>(0, 1);
        right += guesses.equal(batch.targets).int().sum().into_scalar();
    }
    f64::from(right) / digits.len() as f64
}

/// Reads the images of `datasets/digits.csv.gz`.
fn load_digits() -> anyhow::Result<Vec<Digit>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/digits.csv.gz");
    let file = std::fs::File::open(path).with_context(|| format!("cannot open {path}"))?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .with_context(|| format!("cannot read {path}"))?;
    text.lines()
        .enumerate()
        .map(|(line, text)| {
            parse_digit(text).with_context(|| format!("line {} of {path} is no digit", line + 1))
        })
        .collect()
}

fn parse_digit(text: &str) -> Option<Digit> {
    let numbers: Vec<i32> = text.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let (label, pixels) = numbers.split_last()?;
    let pixels: Vec<f32> = pixels.iter().map(|&pixel| pixel as f32 / 16.0).collect();
    Some(Digit { pixels: pixels.try_into().ok()?, label: *label })
}

/// Splits the digits into four fifths for training and one fifth for validation.
///
/// A linear congruential generator with the constants of Knuth's MMIX shuffles them, so the split
/// is the same on every machine.
fn split(mut digits: Vec<Digit>, seed: u64) -> (Vec<Digit>, Vec<Digit>) {
    let mut state = seed;
    for last in (1..digits.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        digits.swap(last, (state >> 33) as usize % (last + 1));
    }
    let valid = digits.split_off(digits.len() * 4 / 5);
    (digits, valid)
}
