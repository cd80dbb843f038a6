//! Trains a model that uses a custom operation, forward and backward, within a memory budget.
//!
//! ```text
//! cargo run --release --example custom_op
//! cargo run --release --example custom_op -- --memory 4MiB
//! ```
//!
//! The operation is in `op.rs`. The model learns a wave with it and is then asked to continue the
//! wave.
//!
//! The last line is for scripts. It gives the mean squared error on points beyond the training
//! range, the number of micro-batches per batch, the budget, and the predicted and measured peak in
//! bytes.

mod op;

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Initializer, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::LossMetric;
use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use clap::Parser;
use firebox::{Budget, Lazy, Learner, MicroBatch};
use peak_alloc::PeakAlloc;

use crate::op::{Snake, snake};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// Learn a wave with a custom activation function, within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (3MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "free")]
    memory: Budget,
    /// Passes over the points.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Folder for logs.
    #[arg(long, default_value = ".artifacts/custom_op")]
    artifacts: std::path::PathBuf,
}

#[derive(Clone, Debug, MicroBatch)]
struct Points<B: Backend> {
    /// `[items, 1]`
    at: Tensor<B, 2>,
    /// `[items, 1]`
    height: Tensor<B, 2>,
}

#[derive(Clone, Debug)]
struct PointBatcher;

impl<B: Backend> Batcher<B, f32, Points<B>> for PointBatcher {
    fn batch(&self, items: Vec<f32>, device: &B::Device) -> Points<B> {
        let column =
            |values: Vec<f32>| Tensor::from_data(TensorData::new(values, [items.len(), 1]), device);
        Points {
            at: column(items.clone()),
            height: column(items.iter().copied().map(wave).collect()),
        }
    }
}

fn wave(at: f32) -> f32 {
    at.sin() + 0.2 * at
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    alpha: Param<Tensor<B, 1>>,
    second: Linear<B>,
}

impl<B: Snake> Net<B> {
    const WIDTH: usize = 64;

    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(1, Self::WIDTH).init(device),
            alpha: Initializer::Constant { value: 1.0 }.init([Self::WIDTH], device),
            second: LinearConfig::new(Self::WIDTH, 1).init(device),
        }
    }

    fn forward(&self, at: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second.forward(snake(self.first.forward(at), self.alpha.val()))
    }

    fn regress(&self, points: Points<B>) -> RegressionOutput<B> {
        let output = self.forward(points.at);
        let loss = MseLoss::new().forward(output.clone(), points.height.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, points.height)
    }
}

impl<B: AutodiffBackend + Snake> TrainStep for Net<B> {
    type Input = Points<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, points: Points<B>) -> TrainOutput<RegressionOutput<B>> {
        let item = self.regress(points);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Snake> InferenceStep for Net<B> {
    type Input = Points<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, points: Points<B>) -> RegressionOutput<B> {
        self.regress(points)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let device = Default::default();
    B::seed(&device, 7);
    let points = |from: f32, to: f32, count: usize| -> Vec<f32> {
        (0..count).map(|at| from + (to - from) * at as f32 / count as f32).collect()
    };
    std::fs::create_dir_all(&options.artifacts)
        .with_context(|| format!("cannot write to {}", options.artifacts.display()))?;
    let train_loader = DataLoaderBuilder::new(PointBatcher)
        .batch_size(2048)
        .shuffle(7)
        .build(InMemDataset::new(points(-12.0, 12.0, 8192)));
    let valid_loader = DataLoaderBuilder::new(PointBatcher)
        .batch_size(2048)
        .build(InMemDataset::new(points(12.0, 15.0, 1024)));
    let training = SupervisedTraining::new(&options.artifacts, train_loader, valid_loader)
        .metrics((LossMetric::new(),))
        .num_epochs(options.epochs as usize);

    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let fitted = Learner::builder()
        .auto_batch()
        .memory(options.memory)
        .stop_on_ctrl_c()
        .build(Net::<B>::new(&device), AdamConfig::new().init(), 1e-2)
        .fit(training)?;
    let measured = HEAP.peak_usage().saturating_sub(before);

    let beyond: Points<Lazy<Flex>> = PointBatcher.batch(points(12.0, 15.0, 1024), &device);
    let error = fitted.model.step(beyond).loss.into_scalar();
    let report = fitted.report.context("no batch was trained on")?;
    let memory = fitted.memory.context("no batch was trained on")?;
    println!(
        "result: error={error:.4} micro_batches={} budget={} predicted={} measured={measured}",
        report.plan.len(),
        report.budget.get(),
        memory.predicted.get(),
    );
    Ok(())
}
