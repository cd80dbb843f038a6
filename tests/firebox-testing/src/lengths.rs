//! A model of sequences whose lengths differ between batches.

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::MetricsRenderer;
use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use firebox::{Bytes, Learner, MicroBatch, TrainingBackend};

const ITEMS: usize = 32;
const LAYERS: usize = 8;

/// `[items, length, width]`
#[derive(Clone, Debug, MicroBatch)]
pub struct Sequences<B: Backend> {
    pub tokens: Tensor<B, 3>,
}

/// Makes batches of sequences that are as long as their items say.
#[derive(Clone, Debug)]
pub struct Lengths {
    pub width: usize,
}

impl<B: Backend> Batcher<B, usize, Sequences<B>> for Lengths {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Sequences<B> {
        Sequences { tokens: Tensor::zeros([items.len(), items[0], self.width], device) }
    }
}

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Net<B> {
    pub fn new(width: usize, device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(width, width).init(device);
        Self { layers: (0..LAYERS).map(layer).collect() }
    }

    fn output(&self, batch: Sequences<B>) -> RegressionOutput<B> {
        let forward = |hidden, layer: &Linear<B>| gelu(layer.forward(hidden));
        let hidden = self.layers.iter().fold(batch.tokens, forward);
        let output: Tensor<B, 2> = hidden.mean_dim(1).squeeze_dim(1);
        let loss = output.clone().powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output.clone(), output)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Sequences<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Sequences<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Sequences<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Sequences<B>) -> RegressionOutput<B> {
        self.output(batch)
    }
}

/// Predicted and measured reserved bytes, and the number of micro-batches of each planned batch.
pub struct Trained {
    pub predicted: Bytes,
    pub measured: Bytes,
    pub steps: Vec<usize>,
}

/// Trains on sequences of these lengths. Each batch has one length.
pub fn trained<B>(
    width: usize,
    lengths: &[usize],
    budget: Bytes,
    renderer: impl MetricsRenderer + 'static,
    device: &B::Device,
) -> Trained
where
    B: TrainingBackend,
{
    let folder = tempfile::tempdir().expect("a folder");
    let items = lengths.iter().flat_map(|length| [*length; ITEMS]).collect();
    let loader = |items: Vec<usize>| InMemDataset::new(items);
    let train = DataLoaderBuilder::<B, _, _>::new(Lengths { width }).batch_size(ITEMS);
    let train = train.set_device(device.clone()).build(loader(items));
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Lengths { width }).batch_size(1);
    let training = SupervisedTraining::new(folder.path(), train, valid.build(loader(Vec::new())))
        .with_application_logger(None)
        .renderer(renderer)
        .num_epochs(1);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(budget)
        .quiet()
        .build(Net::<B>::new(width, device), AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("the budget is enough");
    let memory = fitted.memory.expect("it was trained");
    let measured = memory.measured.expect("the device has an allocator");
    let steps = fitted.plans.iter().map(|plan| plan.plan.len()).collect();
    Trained { predicted: memory.predicted, measured, steps }
}
