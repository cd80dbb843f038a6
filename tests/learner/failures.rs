//! What bad input gets: typed errors, and the state after the last whole step.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoader;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::DefaultRecorder;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::{Budget, ByFunctions, Bytes, Lazy, Learner, TrainError};

use crate::task::{Given, Net, Points, batch, loader, points, random_state, weights};

type B = Autodiff<Lazy<Flex>>;

fn given(sizes: &[usize]) -> Arc<dyn DataLoader<B, Points<B>>> {
    Given::loader(sizes.iter().map(|items| batch(*items)).collect())
}

/// Trains on batches of these sizes within a budget, and gives the error's text.
fn failure(sizes: &[usize], budget: impl Into<Budget>) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(6), 6, None);
    let training = SupervisedTraining::new(folder.path(), given(sizes), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let result = Learner::builder()
        .auto_batch()
        .memory(budget)
        .quiet()
        .build(Net::<B>::new(&Default::default()), AdamConfig::new().init(), 1e-2)
        .fit(training);
    result.err().expect("it fails").to_string()
}

#[test]
fn a_loader_that_yields_nothing() {
    let _lock = random_state();
    assert!(failure(&[], Bytes::gib(1)).starts_with("the training loader yields no batch"));
}

#[test]
fn a_batch_of_no_items() {
    let _lock = random_state();
    assert!(failure(&[4, 0], Bytes::gib(1)).starts_with("a training batch has no items"));
}

#[test]
fn a_budget_of_zero_and_one_below_the_parameters() {
    let _lock = random_state();
    assert!(failure(&[4], Bytes::ZERO).starts_with("the budget is zero bytes"));
    let error = failure(&[4], Bytes::new(100));
    assert!(error.starts_with("training does not fit: one item needs"), "{error}");
}

#[test]
fn a_splitter_that_loses_items() {
    let _lock = random_state();
    let range = |batch: &Points<B>, range: Range<usize>| {
        let end = range.end.min(range.start + 2);
        firebox::MicroBatch::range(batch, range.start..end)
    };
    let items = |batch: &Points<B>| batch.targets.dims()[0];
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        given(&[8]),
        loader::<Lazy<Flex>>(points(6), 6, None),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new());
    let result = Learner::builder()
        .auto_batch_with(ByFunctions::new(items, range), firebox::ByMicroBatch)
        .memory(Bytes::gib(1))
        .quiet()
        .build(Net::<B>::new(&Default::default()), AdamConfig::new().init(), 1e-2)
        .fit(training);
    let (cause, state) = result.err().expect("items are lost").into_parts();
    assert!(matches!(cause, TrainError::LostItems { asked: 8, got: 2 }), "{cause}");
    assert_eq!(state.map(|state| (state.epoch, state.iteration)), Some((1, 0)));
}

/// A model whose step fails on batches of five items: in the user's code, or in an operation.
#[derive(Module, Debug)]
struct Fragile<B: Backend> {
    net: Net<B>,
    in_operation: bool,
}

impl<B: AutodiffBackend> TrainStep for Fragile<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let items = batch.targets.dims()[0];
        let item = InferenceStep::step(&self.net, batch);
        assert!(items != 5 || self.in_operation, "five items are too many");
        let loss = if items == 5 {
            // Only when it runs is the index found to be out of range.
            let far = Tensor::<B, 1, Int>::from_ints([9], &item.loss.device());
            item.loss.clone().select(0, far)
        } else {
            item.loss.clone()
        };
        TrainOutput::new(self, loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Fragile<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        InferenceStep::step(&self.net, batch)
    }
}

#[track_caller]
fn check_fragile(in_operation: bool) {
    let _lock = random_state();
    let device = Default::default();
    let train = |sizes: &[usize]| {
        Flex::seed(&device, 51);
        let model = Fragile { net: Net::<B>::coupled(&device, false), in_operation };
        let folder = tempfile::tempdir().expect("a folder");
        let valid = loader::<Lazy<Flex>>(points(6), 6, None);
        let training = SupervisedTraining::new(folder.path(), given(sizes), valid)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        Learner::builder()
            .auto_batch()
            .memory(Bytes::gib(1))
            .quiet()
            .build(model, AdamConfig::new().init(), 1e-2)
            .fit(training)
    };
    let good = train(&[4, 6]).expect("no batch of five");
    let (cause, state) = train(&[4, 6, 5, 6]).err().expect("the third batch fails").into_parts();
    assert!(matches!(cause, TrainError::StepPanicked { .. }), "{cause}");
    let state = state.expect("training had begun");
    assert_eq!((state.epoch, state.iteration), (1, 2));
    assert!(state.optimizer.is_some());
    assert_eq!(weights(&state.model), weights(&good.model), "the state after two whole steps");
}

#[test]
fn a_step_that_panics_leaves_the_last_whole_state() {
    check_fragile(false);
}

#[test]
fn an_operation_that_panics_leaves_the_last_whole_state() {
    check_fragile(true);
}

#[test]
fn training_goes_on_from_the_returned_parts() {
    let _lock = random_state();
    let device = Default::default();
    let model = Fragile { net: Net::<B>::new(&device), in_operation: false };
    let folder = tempfile::tempdir().expect("a folder");
    let training = |sizes: &[usize]| {
        SupervisedTraining::new(
            folder.path(),
            given(sizes),
            loader::<Lazy<Flex>>(points(6), 6, None),
        )
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
    };
    let learner = |model, optimizer| {
        Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet().build(model, optimizer, 1e-2)
    };
    let failed = learner(model, AdamConfig::new().init()).fit(training(&[4, 5]));
    let (_, state) = failed.err().expect("the second batch fails").into_parts();
    let state = state.expect("training had begun");
    let record = state.optimizer.expect("the optimizer is whole");
    let adam: burn::optim::adaptor::OptimizerAdaptor<burn::optim::Adam, Fragile<B>, B> =
        AdamConfig::new().init();
    let optimizer = burn::optim::Optimizer::load_record(adam, record);
    learner(state.model, optimizer).fit(training(&[4, 6])).expect("training goes on");
}

/// A model that keeps its last output where no one can restore it.
#[derive(Module, Debug)]
struct Hoarding<B: Backend> {
    net: Net<B>,
    #[module(skip)]
    last: Hoard,
}

#[derive(Clone, Debug, Default)]
struct Hoard(Arc<Mutex<Option<Box<dyn std::any::Any + Send>>>>);

impl<B: AutodiffBackend> TrainStep for Hoarding<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = InferenceStep::step(&self.net, batch);
        *self.last.0.lock().expect("not poisoned") = Some(Box::new(item.output.clone().detach()));
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Hoarding<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        InferenceStep::step(&self.net, batch)
    }
}

#[test]
fn a_model_that_hides_tensors_is_refused() {
    let _lock = random_state();
    let device = Default::default();
    let model = Hoarding { net: Net::<B>::new(&device), last: Hoard::default() };
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        given(&[4]),
        loader::<Lazy<Flex>>(points(6), 6, None),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new());
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training);
    let error = result.err().expect("refused").to_string();
    assert!(error.contains("[4, 3] F32"), "{error}");
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_no_interrupt() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        given(&[4]),
        loader::<Lazy<Flex>>(points(6), 6, None),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .with_file_checkpointer(DefaultRecorder::new())
    .num_epochs(2);
    // The checkpointer has made its folder; a file takes its place.
    let checkpoints = folder.path().join("checkpoint");
    std::fs::remove_dir_all(&checkpoints).expect("the folder is there");
    std::fs::write(&checkpoints, "in the way").expect("writable");
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(Net::<B>::new(&Default::default()), AdamConfig::new().init(), 1e-2)
        .fit(training);
    let (cause, state) = result.err().expect("nothing was saved").into_parts();
    assert!(matches!(cause, TrainError::Checkpoint { .. }), "{cause}");
    assert!(state.is_some());
}

#[test]
fn an_interrupt_is_no_error() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        given(&[4, 4]),
        loader::<Lazy<Flex>>(points(6), 6, None),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new());
    training.interrupter().stop(Some("enough"));
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(Net::<B>::new(&Default::default()), AdamConfig::new().init(), 1e-2)
        .fit(training);
    assert!(result.is_ok());
}
