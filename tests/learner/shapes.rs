//! Batches of one size and several shapes, as sequences of several lengths, on a card that is not there: whose pages stay
//! open, and for which a buffer is too large or too small.

use std::sync::Mutex;

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use firebox::dry::{Capability, Card, Cuda, DryCuda, Lease};
use firebox::{Bytes, Lazy, Learner, MicroBatch};

use crate::task::Given;

type B = Autodiff<Lazy<DryCuda>>;

const ITEMS: usize = 32;
const WIDTH: usize = 512;
const LAYERS: usize = 8;

/// `[items, length, WIDTH]`
#[derive(Clone, Debug, MicroBatch)]
struct Sequences<B: Backend> {
    tokens: Tensor<B, 3>,
}

/// Makes batches of sequences that are as long as their items say.
#[derive(Clone, Debug)]
struct Lengths;

impl<B: Backend> Batcher<B, usize, Sequences<B>> for Lengths {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Sequences<B> {
        Sequences { tokens: Tensor::zeros([items.len(), items[0], WIDTH], device) }
    }
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
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

/// Trains on sequences of these lengths. Gives what was predicted, what was reserved at the end, and in how many micro-batches
/// a batch was planned.
fn trained(lengths: &[usize], budget: Bytes) -> (Bytes, Bytes, Vec<usize>) {
    // Of the pools of a device, other tests must have nothing, and this one nothing of an earlier run.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let card = Card::new("a T4 of its own", Bytes::mib(14_910), Capability::new(7, 5), 40);
    let lease = Lease::<Cuda>::take(&card.properties()).expect("few cards were asked for");
    let device = lease.device();
    let folder = tempfile::tempdir().expect("a folder");
    let items = lengths.iter().flat_map(|length| [*length; ITEMS]).collect();
    let loader = DataLoaderBuilder::<B, _, _>::new(Lengths).batch_size(ITEMS);
    let loader = loader.set_device(device.clone()).build(InMemDataset::<usize>::new(items));
    let training = SupervisedTraining::new(folder.path(), loader, Given::loader(vec![]))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(budget)
        .quiet()
        .build(Net::<B>::new(device), AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("a card of this size has room");
    let memory = fitted.memory.expect("it was trained");
    let measured = memory.measured.expect("the device has an allocator");
    let steps = fitted.plans.iter().map(|plan| plan.plan.len()).collect();
    // The next run shall find the device empty.
    drop(fitted);
    DryCuda::sync(device).expect("a dry device does not fail");
    DryCuda::memory_cleanup(device);
    (memory.predicted, measured, steps)
}

/// Two lengths whose buffers lie on pages of different sizes, in the order in which they come.
const ORDERS: [[usize; 5]; 2] = [[600, 600, 1000, 600, 1000], [1000, 1000, 600, 1000, 600]];

#[test]
fn pages_for_several_lengths_stay_open_where_there_is_room() {
    let (_, longest, _) = trained(&[1000; 3], Bytes::gib(8));
    let (predicted, measured, steps) = trained(&ORDERS[1], Bytes::gib(8));
    assert_eq!(steps, [1, 1], "each fits whole");
    assert_eq!(predicted, measured);
    assert!(measured > longest.scale(1.2), "{measured} and {longest}");
}

#[test]
fn where_there_is_no_room_they_are_given_back() {
    let budget = Bytes::mib(2200);
    for order in ORDERS {
        // The most that is reserved is looked at behind every batch.
        for end in 2..=order.len() {
            let (predicted, measured, steps) = trained(&order[..end], budget);
            assert!(steps.iter().all(|steps| *steps == 1), "each fits whole: {steps:?}");
            assert!(measured <= predicted, "{measured} of {predicted}");
            assert!(predicted <= budget, "{predicted} of {budget}");
        }
    }
}
