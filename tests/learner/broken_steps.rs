//! Tests steps that panic in different places: a typed error, and the state after the last whole
//! optimizer step.

use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::optim::{AdamConfig, GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::train::Phase;
use firebox::{Bytes, Learner, TrainError};
use firebox_testing::task::{Net, Points, random_state, weights};

use crate::attempts::{
    Adam, AdamRecord, B, Outcome, fit, training, validated, validates_as_its_net,
};

/// Where a model fails on batches of five items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    Step,
    /// When the operation runs, not when it is recorded.
    Operation,
    Validation,
}

#[derive(Module, Debug)]
struct Fragile<B: Backend> {
    net: Net<B>,
    #[module(skip)]
    fault: Fault,
}

impl<B: AutodiffBackend> TrainStep for Fragile<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let items = batch.targets.dims()[0];
        let item = InferenceStep::step(&self.net, batch);
        assert!(items != 5 || self.fault != Fault::Step, "five items are too many");
        let loss = if items == 5 && self.fault == Fault::Operation {
            out_of_range(item.loss.clone())
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
        let items = batch.targets.dims()[0];
        assert!(items != 5 || self.fault != Fault::Validation, "five items are too many");
        InferenceStep::step(&self.net, batch)
    }
}

/// An index that is out of range. The error appears only when the operation runs.
fn out_of_range<B: Backend>(values: Tensor<B, 1>) -> Tensor<B, 1> {
    let far = Tensor::<B, 1, Int>::from_ints([9], &values.device());
    values.select(0, far)
}

/// Trains the same model on batches of these sizes and validates it on `items` items.
fn train(fault: Fault, sizes: &[usize], items: usize) -> Outcome<Fragile<B>> {
    Flex::seed(&Default::default(), 51);
    let model = Fragile { net: Net::<B>::coupled(&Default::default(), false), fault };
    let folder = tempfile::tempdir().expect("a folder");
    fit(model, validated(folder.path(), sizes, items))
}

/// Checks that a failure leaves the last whole state: that of a run on batches with the sizes in
/// `whole`.
#[track_caller]
fn check(phase: Phase, fault: Fault, sizes: &[usize], items: usize, whole: &[usize]) {
    let _lock = random_state();
    let good = train(fault, whole, 6).expect("no batch of five");
    let (cause, state) = train(fault, sizes, items).expect_err("five items fail").into_parts();
    assert!(matches!(cause, TrainError::StepPanicked { phase: p, .. } if p == phase), "{cause}");
    let state = state.expect("training had begun");
    assert_eq!((state.epoch, state.iteration), (1, whole.len()));
    assert_eq!(weights(&state.model), weights(&good.model), "the state after whole steps");
    let moments = state.optimizer.expect("the optimizer did not fail").len();
    assert_eq!(moments, 6, "a record for each of the parameters");
}

#[test]
fn a_step_that_panics_leaves_the_last_whole_state() {
    check(Phase::Training, Fault::Step, &[4, 6, 5, 6], 6, &[4, 6]);
}

#[test]
fn an_operation_that_panics_leaves_the_last_whole_state() {
    check(Phase::Training, Fault::Operation, &[4, 6, 5, 6], 6, &[4, 6]);
}

/// The running statistics of a failed group of batches are discarded, including those of batches
/// that had already run.
#[test]
fn a_group_of_batches_that_fails_half_way_leaves_the_last_whole_state() {
    let _lock = random_state();
    let run = |sizes: &[usize]| {
        Flex::seed(&Default::default(), 51);
        let fault = Fault::Step;
        let model = Fragile { net: Net::<B>::coupled(&Default::default(), false), fault };
        let folder = tempfile::tempdir().expect("a folder");
        fit(model, validated(folder.path(), sizes, 6).grads_accumulation(2))
    };
    let good = run(&[4, 6]).expect("no batch of five");
    let (_, state) = run(&[4, 6, 7, 5]).expect_err("five items fail").into_parts();
    let state = state.expect("training had begun");
    assert_eq!((state.epoch, state.iteration), (1, 2));
    assert_eq!(weights(&state.model), weights(&good.model), "the state after the first group");
}

#[test]
fn a_validation_that_panics_leaves_the_state_of_the_epoch() {
    check(Phase::Validation, Fault::Validation, &[4, 6], 5, &[4, 6]);
}

#[test]
fn training_goes_on_from_the_returned_parts() {
    let _lock = random_state();
    let failed = train(Fault::Step, &[4, 5], 6);
    let (_, state) = failed.expect_err("the second batch fails").into_parts();
    let state = state.expect("training had begun");
    let adam: Adam<Fragile<B>> = AdamConfig::new().init();
    let optimizer = adam.load_record(state.optimizer.expect("the optimizer is whole"));
    let folder = tempfile::tempdir().expect("a folder");
    let resumed = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(state.model, optimizer, 1e-2)
        .fit(training(folder.path(), &[6]))
        .expect("training goes on");
    let straight = train(Fault::Step, &[4, 6], 6).expect("no batch of five");
    assert_eq!(weights(&resumed.model), weights(&straight.model), "as if nothing had failed");
}

/// An optimizer that fails when it runs, not when it is rehearsed.
#[derive(Clone)]
struct Faulty(Adam<Net<B>>);

impl Optimizer<Net<B>, B> for Faulty {
    type Record = AdamRecord<Net<B>>;

    fn step(&mut self, rate: LearningRate, module: Net<B>, grads: GradientsParams) -> Net<B> {
        let module = self.0.step(rate, module, grads);
        drop(out_of_range(Tensor::<B, 1>::ones([3], &Default::default())));
        module
    }

    fn step_multi(
        &mut self,
        rate: LearningRate,
        module: Net<B>,
        grads: MultiGradientsParams,
    ) -> Net<B> {
        self.0.step_multi(rate, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.0.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }
}

#[test]
fn an_optimizer_that_panics_leaves_the_model() {
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    let start = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, Faulty(AdamConfig::new().init()), 1e-2)
        .fit(training(folder.path(), &[4]));
    let (cause, state) = result.expect_err("the optimizer fails").into_parts();
    assert!(matches!(cause, TrainError::OptimizerPanicked { .. }), "{cause}");
    let state = state.expect("training had begun");
    assert_eq!((state.epoch, state.iteration), (1, 0));
    assert!(state.optimizer.is_none(), "its state is lost, as the error says");
    assert_eq!(weights(&state.model), start);
}

/// A model that keeps its last output where nothing can restore it.
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

validates_as_its_net!(Hoarding);

#[test]
fn a_model_that_hides_tensors_is_refused() {
    let _lock = random_state();
    let model = Hoarding { net: Net::<B>::new(&Default::default()), last: Hoard::default() };
    let folder = tempfile::tempdir().expect("a folder");
    let cause = fit(model, training(folder.path(), &[4])).expect_err("refused").into_parts().0;
    assert!(matches!(cause, TrainError::HiddenState { .. }), "{cause}");
    assert!(cause.to_string().contains("[4, 3] F32"), "{cause}");
}
