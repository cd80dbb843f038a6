//! Tests bad input that is found before training, or at the bad batch.
//!
//! The Learner returns typed errors and leaves the model and the optimizer as they were.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::plan::{BudgetError, PlanError, Remedy};
use firebox::train::{ByFunctions, ByMicroBatch, Phase, Splitter};
use firebox::{Budget, Bytes, Lazy, Learner, MicroBatch, MicroBatchError, TrainError};
use firebox_testing::task::{
    Given, Net, PointBatcher, Points, batch, files, points, random_state, weights,
};

use crate::attempts::{B, State, Training, training};
use crate::closeness::Values;

/// Trains a new model that must fail. Returns the cause, and the state if it differs from the
/// start.
#[track_caller]
fn failure<S: Splitter<Points<B>>>(
    splitter: S,
    budget: impl Into<Budget>,
    training: impl FnOnce(&std::path::Path) -> Training<Net<B>>,
) -> (TrainError, Option<State<Net<B>>>) {
    let folder = tempfile::tempdir().expect("a folder");
    let training = training(folder.path());
    let model = Net::<B>::new(&Default::default());
    let start = weights(&model);
    let result = Learner::builder()
        .auto_batch_with(splitter, ByMicroBatch)
        .memory(budget)
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training);
    let (cause, state) = result.expect_err("it fails").into_parts();
    let untouched = |state: &State<Net<B>>| {
        (state.epoch, state.iteration) == (1, 0)
            && weights(&state.model) == start
            && state.optimizer.as_ref().is_some_and(|record| record.is_empty())
    };
    assert_eq!(files(folder.path()), BTreeMap::new(), "nothing was written");
    (cause, state.filter(|state| !untouched(state)))
}

/// Checks that training on batches of these sizes within a budget leaves everything unchanged, and
/// returns the cause.
#[track_caller]
fn untouched(sizes: &[usize], budget: impl Into<Budget>) -> TrainError {
    let (cause, changed) = failure(ByMicroBatch, budget, |folder| training(folder, sizes));
    assert!(changed.is_none(), "after `{cause}` something changed");
    cause
}

#[test]
fn a_loader_that_yields_nothing() {
    let _lock = random_state();
    let cause = untouched(&[], Bytes::gib(1));
    assert!(matches!(cause, TrainError::EmptyLoader), "{cause}");
}

#[test]
fn a_first_batch_of_no_items() {
    let _lock = random_state();
    let cause = untouched(&[0, 4], Bytes::gib(1));
    assert!(matches!(cause, TrainError::EmptyBatch { phase: Phase::Training }), "{cause}");
}

#[test]
fn a_later_batch_of_no_items_leaves_the_step_before_it() {
    let _lock = random_state();
    let (cause, changed) = failure(ByMicroBatch, Bytes::gib(1), |folder| training(folder, &[4, 0]));
    assert!(matches!(cause, TrainError::EmptyBatch { phase: Phase::Training }), "{cause}");
    let state = changed.expect("a step was made");
    assert_eq!((state.epoch, state.iteration), (1, 1));
    assert!(state.optimizer.is_some_and(|record| !record.is_empty()));
}

/// A model without parameters.
#[derive(Module, Debug)]
struct Empty<B: Backend> {
    backend: core::marker::PhantomData<B>,
}

impl<B: AutodiffBackend> TrainStep for Empty<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = InferenceStep::step(self, batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Empty<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        let output = batch.inputs;
        ClassificationOutput::new(output.clone().mean(), output, batch.targets)
    }
}

#[test]
fn a_model_without_parameters() {
    let batch = Batcher::<B, _, _>::batch(&PointBatcher, points(4), &Default::default());
    let model = Empty::<B> { backend: core::marker::PhantomData };
    let learner = Learner::builder().auto_batch().memory(Bytes::gib(1));
    let cause = learner.build(model, AdamConfig::new().init(), 1e-2).plan(&batch);
    assert!(matches!(cause, Err(TrainError::NoParameters)));
}

#[test]
fn a_budget_of_zero() {
    let _lock = random_state();
    let cause = untouched(&[4], Bytes::ZERO);
    assert!(matches!(cause, TrainError::Budget(BudgetError::Zero)), "{cause}");
}

#[test]
fn a_budget_below_the_parameters() {
    let _lock = random_state();
    let cause = untouched(&[4], Bytes::new(100));
    let TrainError::Plan { phase: Phase::Training, cause } = cause else { panic!("{cause}") };
    let PlanError::DoesNotFit(error) = *cause else { panic!("{cause}") };
    assert_eq!(error.budget, Bytes::new(100));
    assert!(error.need.peak > Bytes::new(100));
}

/// The batches that four threads have prepared do not fit. The error says so, and its advice helps.
#[test]
fn loader_threads_that_prepare_too_much() {
    let _lock = random_state();
    let train = |workers: usize| {
        let loader = DataLoaderBuilder::new(PointBatcher).batch_size(100_000);
        let loader = if workers == 0 { loader } else { loader.num_workers(workers) };
        let loader = loader.build(InMemDataset::new(points(400_000)));
        let folder = tempfile::tempdir().expect("a folder");
        let valid = Given::loader(vec![batch::<Lazy<Flex>>(6)]);
        let training = SupervisedTraining::new(folder.path(), loader, valid)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let learner = Learner::builder().auto_batch().memory(Bytes::mib(16)).quiet();
        let model = Net::<B>::new(&Default::default());
        let learner = learner.build(model, AdamConfig::new().init(), 1e-2);
        learner.fit(training).map_err(|error| error.into_parts().0)
    };
    let Err(TrainError::Plan { cause, .. }) = train(4) else { panic!("it does not fit") };
    let PlanError::DoesNotFit(error) = *cause else { panic!("{cause}") };
    assert_eq!(error.remedy(), Remedy::FewerWorkers, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("batches of loader threads") && text.contains("num_workers(0)"),
        "{text}"
    );
    train(0).expect("it fits without them");
}

#[test]
fn a_splitter_that_loses_items() {
    let _lock = random_state();
    let range = |batch: &Points<B>, range: Range<usize>| {
        MicroBatch::range(batch, range.start..range.end.min(range.start + 2))
    };
    let splitter = ByFunctions::new(|batch: &Points<B>| batch.targets.dims()[0], range);
    let (cause, changed) = failure(splitter, Bytes::gib(1), |folder| training(folder, &[8]));
    assert!(matches!(cause, TrainError::LostItems { asked: 8, got: 2 }), "{cause}");
    assert!(changed.is_none(), "something changed");
}

#[test]
fn a_splitter_that_panics_in_the_second_batch() {
    let _lock = random_state();
    // The first calls check the batch, look at all of it, rehearse two iterations and run one step.
    let calls = AtomicUsize::new(0);
    let range = move |batch: &Points<B>, range: Range<usize>| {
        assert!(calls.fetch_add(1, Ordering::Relaxed) < 5, "no such items");
        MicroBatch::range(batch, range)
    };
    let splitter = ByFunctions::new(|batch: &Points<B>| batch.targets.dims()[0], range);
    let (cause, changed) = failure(splitter, Bytes::gib(1), |folder| training(folder, &[8, 8]));
    let TrainError::StepPanicked { message, .. } = cause else { panic!("{cause}") };
    assert!(message.contains("no such items"), "{message}");
    let state = changed.expect("a step was made");
    assert_eq!((state.epoch, state.iteration), (1, 1));
}

/// A splitter with a weight that allows no mean.
struct Weighing(f64);

impl Splitter<Points<B>> for Weighing {
    fn items(&self, batch: &Points<B>) -> Result<usize, MicroBatchError> {
        batch.items()
    }

    fn range(&self, batch: &Points<B>, range: Range<usize>) -> Points<B> {
        batch.range(range)
    }

    fn weight(&self, _batch: &Points<B>) -> f64 {
        self.0
    }
}

#[test]
fn a_batch_that_weighs_less_than_nothing_or_no_number() {
    let _lock = random_state();
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let (cause, changed) =
            failure(Weighing(bad), Bytes::gib(1), |folder| training(folder, &[8]));
        assert!(matches!(cause, TrainError::Weight { .. }), "{cause}");
        assert!(cause.to_string().contains(&bad.to_string()), "{cause}");
        assert!(changed.is_none(), "something changed");
    }
}

/// Trains on batches of these sizes, of which only those with more than four items count. Returns
/// the model's weights.
fn trained_on_large_ones(sizes: &[usize]) -> Values {
    let _lock = random_state();
    struct Large;

    impl Splitter<Points<B>> for Large {
        fn items(&self, batch: &Points<B>) -> Result<usize, MicroBatchError> {
            batch.items()
        }

        fn range(&self, batch: &Points<B>, range: Range<usize>) -> Points<B> {
            batch.range(range)
        }

        fn weight(&self, batch: &Points<B>) -> f64 {
            let items = batch.weight();
            if items > 4.0 { items } else { 0.0 }
        }
    }

    let folder = tempfile::tempdir().expect("a folder");
    B::seed(&Default::default(), 17);
    let model = Net::<B>::new(&Default::default());
    let fitted = Learner::builder()
        .auto_batch_with(Large, ByMicroBatch)
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training(folder.path(), sizes));
    weights(&fitted.expect("a batch may weigh nothing").model)
}

#[test]
fn a_batch_alone_has_its_own_gradient_whatever_it_weighs() {
    assert_ne!(trained_on_large_ones(&[8, 3]), trained_on_large_ones(&[8]));
    assert_ne!(trained_on_large_ones(&[8, 3]), trained_on_large_ones(&[8, 4]));
}
