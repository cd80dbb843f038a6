//! Trains a small CNN on handwritten digits with burn 0.22, in micro-batches that fit a memory
//! budget.
//!
//! ```text
//! cargo run --release --example digits
//! cargo run --release --example digits -- --memory free
//! ```
//!
//! The last line is for scripts. It gives the accuracy on the validation split, the batch size, the
//! number of micro-batches, the budget, and the predicted and measured peak in bytes.

use std::io::Read;
use std::path::PathBuf;

use anyhow::Context;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use clap::Parser;
use firebox::{Budget, Learner, MicroBatch, PeakAlloc};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Train a small CNN on handwritten digits within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (16MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "16MiB")]
    memory: Budget,
    /// Passes over the training images.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images per optimizer step.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Seed for the split, the weights and the shuffling.
    #[arg(long, default_value_t = 42)]
    seed: u64,
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
struct DigitBatch {
    /// `[items, 1, 8, 8]`
    images: Tensor<4>,
    /// `[items]`
    targets: Tensor<1, Int>,
}

#[derive(Clone, Debug)]
struct DigitBatcher;

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> DigitBatch {
        let pixels: Vec<f32> = items.iter().flat_map(|digit| digit.pixels).collect();
        let labels: Vec<i32> = items.iter().map(|digit| digit.label).collect();
        DigitBatch {
            images: Tensor::from_data(TensorData::new(pixels, [items.len(), 1, 8, 8]), device),
            targets: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Cnn {
    conv1: Conv2d,
    norm1: GroupNorm,
    conv2: Conv2d,
    norm2: GroupNorm,
    conv3: Conv2d,
    norm3: GroupNorm,
    pool: MaxPool2d,
    hidden: Linear,
    output: Linear,
    relu: Relu,
}

impl Cnn {
    fn new(device: &Device) -> Self {
        let conv = |channels: [usize; 2]| {
            let config = Conv2dConfig::new(channels, [3, 3]);
            config.with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            conv1: conv([1, 32]),
            norm1: GroupNormConfig::new(8, 32).init(device),
            conv2: conv([32, 64]),
            norm2: GroupNormConfig::new(8, 64).init(device),
            conv3: conv([64, 64]),
            norm3: GroupNormConfig::new(8, 64).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            hidden: LinearConfig::new(64 * 4 * 4, 64).init(device),
            output: LinearConfig::new(64, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// Maps images `[items, 1, 8, 8]` to logits `[items, 10]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.relu.forward(self.norm1.forward(self.conv1.forward(images)));
        let x = self.relu.forward(self.norm2.forward(self.conv2.forward(x)));
        let x = self.pool.forward(x);
        let x = self.relu.forward(self.norm3.forward(self.conv3.forward(x))).flatten(1, 3);
        self.output.forward(self.relu.forward(self.hidden.forward(x)))
    }

    fn classify(&self, batch: DigitBatch) -> ClassificationOutput {
        let output = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Cnn {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Cnn {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let device = Device::flex().autodiff();
    device.seed(options.seed);
    let (train, valid) = split(load_digits()?, options.seed);
    let valid_digits = valid.clone();

    std::fs::create_dir_all(&options.artifacts)
        .with_context(|| format!("cannot write to {}", options.artifacts.display()))?;
    let loader = |digits: Vec<Digit>| {
        DataLoaderBuilder::new(DigitBatcher)
            .batch_size(options.batch_size as usize)
            .shuffle(options.seed)
            .build(InMemDataset::new(digits))
    };
    let training = SupervisedTraining::new(&options.artifacts, loader(train), loader(valid))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(options.epochs as usize);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(options.memory)
        .build(Cnn::new(&device), AdamConfig::new().init(), 2e-3)
        .fit(training)?;

    let accuracy = accuracy(&fitted.model, &valid_digits);
    let report = fitted.plans.first().context("no batch was trained on")?;
    println!(
        "result: accuracy={accuracy:.3} batch={} micro_batches={} budget={} predicted={} measured={}",
        options.batch_size,
        report.plan.len(),
        report.budget.get(),
        fitted.predicted.get(),
        fitted.measured.get(),
    );
    Ok(())
}

/// Share of digits that the model recognizes.
fn accuracy(model: &Cnn, digits: &[Digit]) -> f64 {
    let device = Device::flex();
    let mut right = 0;
    for digits in digits.chunks(64) {
        let batch = DigitBatcher.batch(digits.to_vec(), &device);
        let guesses = model.forward(batch.images).argmax(1).flatten::<1>(0, 1);
        right += guesses.equal(batch.targets).int().sum().into_scalar::<i32>();
    }
    f64::from(right) / digits.len() as f64
}

/// Reads the images of `datasets/digits.csv.gz`.
fn load_digits() -> anyhow::Result<Vec<Digit>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../datasets/digits.csv.gz");
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
