//! Tests plans through the Learner: splits follow the budget, and planning leaves nothing behind.

use std::sync::Mutex;

use burn::backend::{Autodiff, Flex};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::trace::{Category, RecordError};
use firebox::train::ByMicroBatch;
use firebox::{Bytes, Lazy, Learner, LearnerBuilder, TrainError, is_rehearsal};
use firebox_testing::task::{Net, Points, batch, loader, points, random_state, weights};

use crate::attempts::{fit, training, validates_as_its_net};

type B = Autodiff<Lazy<Flex>>;

fn plan(model: Net<B>, memory: Bytes, items: usize) -> Result<firebox::PlanReport, TrainError> {
    Learner::builder()
        .auto_batch()
        .memory(memory)
        .build(model, AdamConfig::new().init(), 1e-3)
        .plan(&batch(items))
}

#[test]
fn a_smaller_budget_means_smaller_micro_batches() {
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    let whole = plan(model.clone(), Bytes::gib(1), 128).expect("it fits");
    assert!(whole.plan.is_whole());
    // What one item needs is mostly the memory of the recording, which also depends on the
    // machine's caches.
    let one = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .micro_batch(1)
        .build(model.clone(), AdamConfig::new().init(), 1e-3)
        .plan(&batch(128))
        .expect("it fits");
    let budget = one.predicted() + (whole.predicted() - one.predicted()).scale(0.6);
    let split = plan(model, budget, 128).expect("a part fits");
    assert!(split.plan.len() > 1, "{}", split.plan);
    assert!(split.predicted() <= budget, "{split}");
    assert_eq!(split.plan.sizes().map(|size| size.get()).sum::<usize>(), 128);
    assert!(split.categories.get(Category::AccumulatedGradient) > Bytes::ZERO, "{split}");
}

#[test]
fn metrics_see_micro_batches_where_the_output_of_the_batch_does_not_fit() {
    const ITEMS: usize = 3000;
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    let builder = |memory| Learner::builder().auto_batch().memory(memory).micro_batch(500);
    let build = |builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        let learner = builder.build(model.clone(), AdamConfig::new().init(), 1e-3);
        learner.plan(&batch(ITEMS)).expect("it fits")
    };
    let whole = build(builder(Bytes::gib(1)));
    let parts = build(builder(Bytes::gib(1)).metrics_see_parts());
    assert!(parts.predicted() < whole.predicted(), "{parts}{whole}");
    assert!(!whole.metrics_see_parts && !parts.metrics_see_parts, "as asked");
    assert!(whole.overhead.outputs > parts.overhead.outputs, "{parts}{whole}");
    let fits = build(builder(whole.predicted()));
    assert!(!fits.metrics_see_parts && fits.predicted() == whole.predicted(), "{fits}");
    let tight = build(builder(whole.predicted() - Bytes::new(1)));
    assert!(tight.metrics_see_parts && tight.predicted() == parts.predicted(), "{tight}");
    assert!(tight.to_string().contains("see micro-batches"), "{tight}");
    assert!(tight.line().ends_with("; metrics see micro-batches"), "{}", tight.line());
    assert_eq!(tight.plan.split(), whole.plan.split(), "they cost no micro-batch");
}

#[test]
fn the_largest_batch_is_planned_whole_and_one_item_more_is_not() {
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    // A budget of an odd size, between those of two batches.
    let budget = plan(model.clone(), Bytes::gib(1), 117).expect("it fits").predicted();
    let budget = budget + Bytes::new(777);
    let learner = Learner::builder().auto_batch().memory(budget);
    let learner = learner.build(model.clone(), AdamConfig::new().init(), 1e-3);
    let largest = learner.largest_batch(&batch(24)).expect("one item fits");
    let planned = |items| plan(model.clone(), budget, items).expect("a part fits");
    assert!(planned(largest).plan.is_whole(), "{largest}");
    assert!(!planned(largest + 1).plan.is_whole(), "{largest}");
}

/// Checks the planned optimizer state against `per_weight` bytes per weight, and the categories of
/// the peak.
#[track_caller]
fn check_state(optimizer: impl Optimizer<Net<B>, B> + 'static, per_weight: u64) {
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    let weights = model.num_params() as u64;
    let split = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .micro_batch(1)
        .build(model, optimizer, 1e-3)
        .plan(&batch(4))
        .expect("it fits");
    assert_eq!(split.optimizer_state, Bytes::new(per_weight * weights));
    let bytes = |category| split.categories.get(category).get();
    // The peak is in the second optimizer step, where one item is negligible next to the weights:
    // old and new weights of the current layer, and all states.
    assert!((4 * weights..8 * weights).contains(&bytes(Category::Parameter)), "{split}");
    let state = bytes(Category::OptimizerState);
    assert!((per_weight * weights..=2 * per_weight * weights).contains(&state), "{split}");
    assert_eq!(split.categories.total(), split.predicted());
}

#[test]
fn adam_keeps_two_moments() {
    check_state(AdamConfig::new().init(), 8);
}

#[test]
fn adamw_keeps_two_moments() {
    check_state(AdamWConfig::new().init(), 8);
}

#[test]
fn momentum_is_one_velocity() {
    let momentum = MomentumConfig::new();
    check_state(SgdConfig::new().with_momentum(Some(momentum)).init(), 4);
}

#[test]
fn plain_descent_keeps_nothing() {
    check_state(SgdConfig::new().init(), 0);
}

#[test]
fn planning_leaves_the_model_as_it_is() {
    let _lock = random_state();
    let model = Net::<B>::coupled(&Default::default(), true);
    let before = weights(&model);
    let report = plan(model.clone(), Bytes::gib(1), 32).expect("it fits");
    assert_eq!(report.running_state, ["norm.running_mean", "norm.running_var"]);
    assert_eq!(weights(&model), before);
}

#[test]
fn a_split_of_a_model_with_batch_normalization_warns_by_name() {
    let _lock = random_state();
    let model = Net::<B>::coupled(&Default::default(), false);
    let whole = plan(model.clone(), Bytes::gib(1), 256).expect("it fits");
    assert_eq!(whole.warning(), None);
    let split = plan(model, whole.predicted().scale(0.7), 256).expect("a part fits");
    let warning = split.warning().expect("statistics change");
    assert!(warning.starts_with("norm normalizes over the batch"), "{warning}");
}

#[test]
fn one_item_that_does_not_fit_is_an_error_with_figures() {
    let _lock = random_state();
    let error = plan(Net::<B>::new(&Default::default()), Bytes::kib(1), 8).expect_err("too little");
    let TrainError::Plan { cause, .. } = &error else { panic!("{error}") };
    assert!(matches!(**cause, firebox::plan::PlanError::DoesNotFit(_)), "{error}");
    assert!(error.to_string().contains("1.00 KiB"), "{error}");
}

/// Values seen in steps that the model learns from.
static SEEN: Mutex<Vec<f32>> = Mutex::new(Vec::new());

/// A model that reads a value in its forward pass.
#[derive(Module, Debug)]
struct Looking<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Looking<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        // Reads while holding a lock, as programs that keep values do.
        let mut seen = SEEN.lock().expect("no step panics");
        let largest: f32 = batch.inputs.clone().abs().max().into_scalar().elem();
        if !is_rehearsal() {
            seen.push(largest);
        }
        drop(seen);
        let scale = if largest > 1e6 { 0.5 } else { 1.0 };
        let item = InferenceStep::step(&self.net, batch);
        let loss = item.loss.clone() * scale;
        TrainOutput::new(self, loss.backward(), item)
    }
}

validates_as_its_net!(Looking);

/// A model that reads a value of its graph, on a branch without a backward pass.
#[derive(Module, Debug)]
struct Branching<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Branching<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = InferenceStep::step(&self.net, batch);
        let confidence: f32 = item.output.clone().exp().max().into_scalar().elem();
        let _forgotten = (item.output.clone() * 2.0).exp();
        let scale = if confidence > 1e6 { 0.5 } else { 1.0 };
        let loss = item.loss.clone() * scale;
        TrainOutput::new(self, loss.backward(), item)
    }
}

validates_as_its_net!(Branching);

#[test]
fn a_branch_without_a_backward_pass_is_no_hidden_state() {
    let _lock = random_state();
    let device = Default::default();
    let model = Branching { net: Net::<B>::new(&device) };
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(6), 6, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(40), 20, None), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(2);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .micro_batch(5)
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("it fits");
    assert_eq!(fitted.report.expect("planned").plan.len(), 4);
}

#[test]
fn a_model_that_reads_values_is_planned_and_trained() {
    let _lock = random_state();
    let device = Default::default();
    let model = Looking { net: Net::<B>::new(&device) };
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(6), 6, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(40), 20, None), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("it fits");
    let plan = fitted.report.expect("planned").plan;
    assert!(plan.is_whole(), "{plan}");
    assert_eq!(plan.asked()[0].split.largest().get(), 1, "from one item upwards");
    let seen = SEEN.lock().expect("no step panics");
    assert!(seen.len() == 2 && seen.iter().all(|largest| *largest > 0.0), "{seen:?}");
}

/// A model whose step takes little memory and `operations` operations per item.
#[derive(Module, Debug)]
struct Long<B: Backend> {
    net: Net<B>,
    operations: usize,
}

impl<B: AutodiffBackend> TrainStep for Long<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let operations = batch.targets.dims()[0] * self.operations;
        let item = InferenceStep::step(&self.net, batch);
        let loss = (0..operations).fold(item.loss.clone(), |loss, _| loss * 1.0);
        TrainOutput::new(self, loss.backward(), item)
    }
}

validates_as_its_net!(Long);

#[test]
fn a_step_whose_recording_does_not_fit_is_refused_in_words() {
    let _lock = random_state();
    let plan = |operations, items, mib| {
        let model = Long { net: Net::<B>::new(&Default::default()), operations };
        let learner = Learner::builder().auto_batch().memory(Bytes::mib(mib));
        learner.build(model, AdamConfig::new().init(), 1e-3).plan(&batch(items))
    };
    let error = plan(5_000, 1, 2).expect_err("two iterations of 10,000 operations take more");
    let is_told = |error: &TrainError| {
        matches!(error, TrainError::Record(RecordError::TooLong { needed, budget, .. })
            if needed > budget && *budget < Bytes::mib(2))
    };
    assert!(is_told(&error), "{error}");
    assert!(error.to_string().contains("larger budget"), "{error}");
    // 10,000 operations are recorded for the step that runs.
    assert!(plan(5_000, 1, 16).expect("it fits").predicted() > Bytes::new(3_750_000));
    let split = plan(250, 20, 2).expect("a part of it is shorter").plan;
    assert!(split.len() > 1, "{split}");
}

/// A model whose step runs backward twice, with a number that is part of both passes.
#[derive(Module, Debug)]
struct Twice<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Twice<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let first = InferenceStep::step(&self.net, batch.clone());
        let second = InferenceStep::step(&self.net, batch);
        let both = first.loss.clone() + second.loss.clone();
        drop(first.loss.backward());
        let grads = second.loss.backward();
        drop(both);
        TrainOutput::new(self, grads, second)
    }
}

validates_as_its_net!(Twice);

#[test]
fn a_step_that_runs_backward_twice() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let model = Twice { net: Net::<B>::new(&Default::default()) };
    fit(model, training(folder.path(), &[8, 8, 6])).expect("burn's own training does it");
}
