//! A small classifier, a training of it, and the parameters that it ends with.

#![allow(dead_code, reason = "a test program uses a part of it")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::{
    Bytes, Fitted, Learner, LearnerBuilder, MicroBatch, StepPlanner, TrainError, WeightedGradients,
};

const FEATURES: usize = 128;
const HIDDEN: usize = 1024;
const CLASSES: usize = 8;

#[derive(Clone, Debug, MicroBatch)]
pub struct Points {
    pub inputs: Tensor<2>,
    pub targets: Tensor<1, Int>,
}

#[derive(Clone)]
pub struct PointBatcher;

impl Batcher<usize, Points> for PointBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Points {
        IS_HUNGRY.store(BATCHES.fetch_add(1, Relaxed) + 1 >= HUNGRY_FROM, Relaxed);
        let feature = |item: usize, at: usize| ((item * 31 + at * 17) % 97) as f32 / 97.0 - 0.5;
        let inputs: Vec<f32> =
            items.iter().flat_map(|item| (0..FEATURES).map(|at| feature(*item, at))).collect();
        let targets: Vec<i32> = items.iter().map(|item| (item % CLASSES) as i32).collect();
        Points {
            inputs: Tensor::from_data(TensorData::new(inputs, [items.len(), FEATURES]), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}

/// What a model has besides two layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Plain,
    Dropout,
    Norm,
    /// Its loss is the square of a mean.
    Coupled,
    /// Its step does something else where a value that it reads is small.
    Reading,
    /// Its step needs more than any device has on more than [`FEW`] items, while [`IS_HUNGRY`].
    Hungry,
}

pub static IS_HUNGRY: AtomicBool = AtomicBool::new(false);
pub const FEW: usize = 300;
/// The number of batches that were made since the last training began.
pub static BATCHES: AtomicUsize = AtomicUsize::new(0);
/// From this batch on the step is hungry: after those by which both sizes are planned.
const HUNGRY_FROM: usize = 5;

#[derive(Module, Debug)]
pub struct Net {
    first: Linear,
    norm: Option<BatchNorm>,
    dropout: Option<Dropout>,
    second: Linear,
    #[module(skip)]
    is_coupled: bool,
    #[module(skip)]
    reads: bool,
    #[module(skip)]
    gets_hungry: bool,
}

impl Net {
    pub fn new(kind: Kind, device: &Device) -> Self {
        device.seed(7);
        Self {
            first: LinearConfig::new(FEATURES, HIDDEN).init(device),
            norm: (kind == Kind::Norm).then(|| BatchNormConfig::new(HIDDEN).init(device)),
            dropout: (kind == Kind::Dropout).then(|| DropoutConfig::new(0.3).init()),
            second: LinearConfig::new(HIDDEN, CLASSES).init(device),
            is_coupled: kind == Kind::Coupled,
            reads: kind == Kind::Reading,
            gets_hungry: kind == Kind::Hungry,
        }
    }

    fn classify(&self, points: Points) -> ClassificationOutput {
        let mut x = activation::relu(self.first.forward(points.inputs));
        if let Some(norm) = &self.norm {
            x = norm.forward(x);
        }
        if self.gets_hungry && IS_HUNGRY.load(Relaxed) && x.dims()[0] > FEW {
            let [tall, wide] = [[1 << 15, 1], [1, 1 << 16]].map(|shape| {
                let device = x.device();
                Tensor::<2>::ones(shape, &device)
            });
            x = x + tall.matmul(wide).slice([0..1, 0..1]) * 0.0;
        }
        if let Some(dropout) = &self.dropout {
            x = dropout.forward(x);
        }
        let output = self.second.forward(x);
        let loss = match self.is_coupled {
            true => output.clone().mean_dim(0).powi_scalar(2).sum(),
            false => CrossEntropyLossConfig::new()
                .init(&output.device())
                .forward(output.clone(), points.targets.clone()),
        };
        ClassificationOutput::new(loss, output, points.targets)
    }
}

impl TrainStep for Net {
    type Input = Points;
    type Output = ClassificationOutput;

    fn step(&self, points: Points) -> TrainOutput<ClassificationOutput> {
        let mut item = self.classify(points);
        // A loss is never zero, unless it was not computed.
        if self.reads && item.loss.clone().into_scalar::<f32>() > 0.0 {
            item.loss = item.loss * 2.0;
        }
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Points;
    type Output = ClassificationOutput;

    fn step(&self, points: Points) -> ClassificationOutput {
        self.classify(points)
    }
}

/// A training on 2,400 points in batches of 1,024, so that the last one of an epoch is smaller.
pub fn training(folder: &std::path::Path) -> SupervisedTraining<Net> {
    let loader = |count| {
        let items = InMemDataset::new((0..count).collect::<Vec<usize>>());
        DataLoaderBuilder::new(PointBatcher).batch_size(1024).build(items)
    };
    SupervisedTraining::new(folder, loader(2400), loader(100))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(2)
}

pub fn train_on(
    device: &Device,
    kind: Kind,
    builder: LearnerBuilder,
) -> Result<Fitted<Net>, TrainError> {
    let folder = tempfile::tempdir().expect("a folder");
    BATCHES.store(0, Relaxed);
    let model = Net::new(kind, device);
    let learner = builder.quiet().build(model, AdamConfig::new().init(), 1e-2);
    learner.fit(training(folder.path())).map_err(|error| error.cause)
}

/// What a loop of one's own ends with.
pub struct Ran {
    pub parameters: Vec<f32>,
    pub losses: Vec<f32>,
    pub steps: StepPlanner<Net>,
}

/// A loop of the user's own on batches of these sizes.
pub fn loop_of_ones_own(
    device: &Device,
    mut optim: ModuleOptimizer,
    memory: Bytes,
    sizes: &[usize],
) -> Ran {
    let mut model = Net::new(Kind::Plain, device);
    let builder = Learner::builder().auto_batch().memory(memory).strict().quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let mut losses = Vec::new();
    for size in sizes {
        let batch = PointBatcher.batch((0..*size).collect(), device);
        let step = steps.step(&mut model, &mut optim, &batch, |model, optim, parts| {
            let mut gradients = WeightedGradients::mean(parts.weight());
            let mut loss = 0.0;
            parts.each(|part, weight| {
                let output = TrainStep::step(model, part);
                loss += weight * output.item.loss.into_scalar::<f64>() / *size as f64;
                gradients.add(model, output.grads, weight);
            })?;
            let grads = gradients.finish(model);
            *model = optim.step(1e-2, model.clone(), grads);
            Ok(loss as f32)
        });
        losses.push(step.expect("it fits"));
    }
    Ran { parameters: numbers(&model), losses, steps }
}

pub fn numbers<M: Module>(model: &M) -> Vec<f32> {
    struct Numbers(Vec<f32>);

    impl ModuleVisitor for Numbers {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }

    let mut numbers = Numbers(Vec::new());
    model.visit(&mut numbers);
    numbers.0
}

#[track_caller]
pub fn close(one: &[f32], other: &[f32], tolerance: f32) {
    assert_eq!(one.len(), other.len());
    let largest = one.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let apart = one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart <= tolerance * largest, "{apart} apart of {largest}");
}
