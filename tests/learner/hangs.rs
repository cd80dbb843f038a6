//! Tests that must not wait forever, under a time limit.

use std::fmt::Display;
use std::sync::mpsc;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{LearningRate, SgdConfig, SimpleOptimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{LossMetric, Metric, MetricMetadata, MetricName, SerializedEntry};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::dry::{Card, Cuda, DryCuda, Lease};
use firebox::{Bytes, Lazy, Learner, is_rehearsal};
use firebox_testing::task::{Given, Net, PointBatcher, Points, batch, points, random_state};

use crate::attempts::{B, validates_as_its_net};

/// Time limit of a run that takes about a second.
const LIMIT: Duration = Duration::from_secs(120);

/// A model whose step also learns from points of its own loader, which has threads.
#[derive(Module, Debug)]
struct Pulling<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Pulling<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let loader = DataLoaderBuilder::<B, _, Points<B>>::new(PointBatcher)
            .batch_size(4)
            .num_workers(2)
            .build(InMemDataset::new(points(40)));
        let more = loader.iter().map(|more| InferenceStep::step(&self.net, more).loss);
        let more = more.reduce(|sum, loss| sum + loss).expect("there are points");
        let item = InferenceStep::step(&self.net, batch);
        TrainOutput::new(self, (item.loss.clone() + more).backward(), item)
    }
}

validates_as_its_net!(Pulling);

/// Trains, and fails at the time limit.
fn trains_in_time(train: impl FnOnce() -> Result<(), String> + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || done.send(train()).expect("it is waited for"));
    is_done.recv_timeout(LIMIT).expect("it does not hang").expect("it trains");
}

/// Trains for one epoch on batches from loader threads, which compute them or do not.
fn train<M>(model: M, metric: Option<Counting>, computes: bool) -> Result<(), String>
where
    M: TrainStep<Input = Points<B>, Output = ClassificationOutput<B>>
        + AutodiffModule<B>
        + Display
        + 'static,
    M::InnerModule:
        InferenceStep<Input = Points<Lazy<Flex>>, Output = ClassificationOutput<Lazy<Flex>>>,
{
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let train = DataLoaderBuilder::<B, _, _>::new(PointBatcher)
        .batch_size(20)
        .num_workers(2)
        .build(InMemDataset::new(points(100)));
    let valid = Given::loader::<Lazy<Flex>>(vec![batch(6)]);
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let training = match metric {
        Some(metric) => training.metric_train(metric),
        None => training,
    };
    let learner = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let learner = if computes { learner.loaders_compute() } else { learner };
    let fitted = learner.build(model, SgdConfig::new().init(), 1e-2).fit(training);
    let fitted = fitted.map_err(|error| error.to_string())?;
    let report = fitted.report.expect("batches were planned");
    assert!(report.overhead.queued > Bytes::ZERO, "batches of loader threads count");
    Ok(())
}

#[test]
fn a_step_that_waits_for_a_loader_of_its_own() {
    for computes in [false, true] {
        let model = Pulling { net: Net::new(&Default::default()) };
        trains_in_time(move || train(model, None, computes));
    }
}

/// A metric that iterates over its own loader, whose threads have the same names as training's.
#[derive(Clone)]
struct Counting;

impl Metric for Counting {
    type Input = ();

    fn name(&self) -> MetricName {
        MetricName::new("Counting".to_owned())
    }

    fn update(&mut self, (): &(), _metadata: &MetricMetadata) -> SerializedEntry {
        let loader = DataLoaderBuilder::<Lazy<Flex>, _, Points<Lazy<Flex>>>::new(PointBatcher)
            .batch_size(4)
            .num_workers(2)
            .build(InMemDataset::new(points(40)));
        let count = loader.iter().count().to_string();
        SerializedEntry::new(count.clone(), count)
    }

    fn clear(&mut self) {}
}

#[test]
fn a_metric_that_waits_for_a_loader_of_its_own() {
    for computes in [false, true] {
        let model = Net::<B>::new(&Default::default());
        trains_in_time(move || train(model, Some(Counting), computes));
    }
}

/// Gradient descent on rayon threads, which it waits for. Work on such threads is not recorded.
#[derive(Clone)]
struct Parallel;

impl<I: Backend> SimpleOptimizer<I> for Parallel {
    type State<const D: usize> = usize;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<I, D>,
        grad: Tensor<I, D>,
        _state: Option<usize>,
    ) -> (Tensor<I, D>, Option<usize>) {
        if is_rehearsal() {
            return (tensor * 0.99 - grad * lr, None);
        }
        let (tensor, step) = rayon::join(|| tensor * 0.99, || grad * lr);
        (tensor - step, None)
    }

    fn to_device<const D: usize>(state: usize, _device: &I::Device) -> usize {
        state
    }
}

/// Two Learners run at the same time, on two dry cards whose queues fuse operations.
#[test]
fn two_learners_whose_optimizers_wait_for_other_threads() {
    type D = Autodiff<Lazy<DryCuda>>;
    let train = || {
        let card = Card::named("T4").expect("in the table");
        let lease = Lease::<Cuda>::take(&card.properties()).expect("few cards were asked for");
        let device = lease.device();
        let folder = tempfile::tempdir().expect("a folder");
        let batches = [8, 8, 6].map(|items| PointBatcher.batch(points(items), device));
        let valid = PointBatcher.batch(points(4), device);
        let train = Given::loader(batches.into());
        let training = SupervisedTraining::new(folder.path(), train, Given::loader(vec![valid]))
            .metric_train_numeric(LossMetric::new())
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(2);
        let optimizer = OptimizerAdaptor::<Parallel, Net<D>, D>::from(Parallel);
        let learner = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
        let fitted = learner.build(Net::<D>::new(device), optimizer, 1e-2).fit(training);
        fitted.map(|_| ()).map_err(|error| error.to_string())
    };
    trains_in_time(move || {
        let other = std::thread::spawn(train);
        train()?;
        other.join().expect("no panic")
    });
}
