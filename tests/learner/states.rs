//! Tests state that steps keep outside of the model, and running statistics that appear during
//! training.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use burn::backend::Flex;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, TrainOutput, TrainStep};
use firebox::{Bytes, Lazy, Learner, TrainError, is_rehearsal};
use firebox_testing::task::{Net, Points, random_state, weights};

use crate::attempts::{B, training, validates_as_its_net};

/// A kept tensor, with the number of times it was kept.
type Kept = Arc<Mutex<(usize, Option<Tensor<Lazy<Flex>, 1>>)>>;

/// A moving average over the outputs.
static AVERAGE: LazyLock<Kept> = LazyLock::new(Kept::default);

/// A model whose step keeps an average in a place that firebox does not see.
#[derive(Module, Debug)]
struct Averaging<B: Backend> {
    net: Net<B>,
}

impl TrainStep for Averaging<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = TrainStep::step(&self.net, batch);
        let mean = output.item.output.clone().inner().mean_dim(0).flatten(0, 1);
        let mut average = AVERAGE.lock().expect("no step panics");
        average.0 += 1;
        average.1 = Some(match average.1.take() {
            Some(before) => before * 0.9 + mean * 0.1,
            None => mean,
        });
        output
    }
}

validates_as_its_net!(Averaging);

#[test]
fn what_a_step_keeps_is_given_back_behind_a_rehearsal() {
    let _lock = random_state();
    Flex::seed(&Default::default(), 5);
    let model = Averaging { net: Net::<B>::new(&Default::default()) };
    firebox::initialize(&model);
    let train = |tell: bool| {
        *AVERAGE.lock().expect("no step panics") = (0, None);
        let folder = tempfile::tempdir().expect("a folder");
        let training = training(folder.path(), &[10, 7]).num_epochs(2);
        let learner = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(4).quiet();
        let learner = if tell { learner.hidden_state(AVERAGE.clone()) } else { learner };
        let learner = learner.build(model.clone(), SgdConfig::new().init(), 1e-2);
        learner.fit(training).map_err(|error| error.into_parts().0)
    };
    let error = train(false).expect_err("nobody says how it is given back");
    assert!(matches!(error, TrainError::HiddenState { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("behind `net.second."), "the layer that it comes from is named: {text}");
    assert!(text.contains(".hidden_state(..)"), "{text}");

    train(true).expect("it is given back");
    let (count, average) = AVERAGE.lock().expect("no step panics").clone();
    assert_eq!(count, 2 * (3 + 2), "once for each micro-batch that something is learned from");
    let average = average.expect("there is one").into_data().to_vec::<f32>().expect("f32");
    assert!(average.iter().all(|value| value.is_finite() && *value != 0.0), "{average:?}");
}

/// Number of steps that the model learned from.
static LEARNED: AtomicUsize = AtomicUsize::new(0);

/// A model that normalizes, with wide intermediate results, from its third step on.
#[derive(Module, Debug)]
struct Late<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Late<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let steps = LEARNED.load(Ordering::Relaxed);
        if !is_rehearsal() {
            LEARNED.fetch_add(1, Ordering::Relaxed);
        }
        let inputs = self.first.forward(batch.inputs.clone());
        let inputs = if steps < 2 {
            inputs
        } else {
            let [items, features] = inputs.dims();
            let wide = self.norm.forward(inputs).reshape([items, 1, features]);
            wide.repeat_dim(1, 6000).exp().mean_dim(1).reshape([items, features])
        };
        TrainStep::step(&self.net, Points { inputs, ..batch })
    }
}

validates_as_its_net!(Late);

/// The recorded micro-batch is discarded with its statistics, then halved.
#[test]
fn statistics_that_a_branch_keeps_for_the_first_time_are_not_lost() {
    let _lock = random_state();
    Flex::seed(&Default::default(), 6);
    let device = Default::default();
    let model = Late::<B> {
        first: LinearConfig::new(6, 6).init(&device),
        norm: BatchNormConfig::new(6).init(&device),
        net: Net::new(&device),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let training = training(folder.path(), &[48, 48, 48, 48]);
    let learner = Learner::builder().auto_batch().memory(Bytes::mib(9)).quiet();
    let learner = learner.build(model, SgdConfig::new().init(), 1e-2);
    let fitted = learner.fit(training).expect("halves fit");
    let report = fitted.report.expect("it was planned");
    assert!(report.plan.is_whole(), "as it is at first: {}", report.plan);
    assert!(LEARNED.load(Ordering::Relaxed) > 6, "later batches are halved");
    let mean = fitted.model.norm.running_mean.value().into_data().to_vec::<f32>().expect("f32");
    assert!(mean.iter().any(|value| *value != 0.0), "{mean:?}");
    assert!(weights(&fitted.model).concat().iter().all(|value| value.is_finite()));
}

/// A model that normalizes its inputs over the batch.
#[derive(Module, Debug)]
struct Normed<B: Backend> {
    norm: BatchNorm<B>,
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Normed<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let inputs = self.norm.forward(batch.inputs.clone());
        TrainStep::step(&self.net, Points { inputs, ..batch })
    }
}

validates_as_its_net!(Normed);

#[test]
fn pooled_statistics_are_those_of_the_whole_batch() {
    let _lock = random_state();
    let device = Default::default();
    let momentum = 0.3;
    let norm = || BatchNormConfig::new(6).with_momentum(momentum).init(&device);
    let statistics = |items: usize, pools: bool| {
        let folder = tempfile::tempdir().expect("a folder");
        let training = training(folder.path(), &[11, 6, 9]).num_epochs(2);
        let learner = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(items);
        let learner = if pools { learner.pool_statistics(momentum) } else { learner }.quiet();
        let model = Normed { norm: norm(), net: Net::<B>::new(&device) };
        let learner = learner.build(model, SgdConfig::new().init(), 1e-2);
        let norm = learner.fit(training).expect("it fits").model.norm;
        let [mean, var] = [norm.running_mean, norm.running_var].map(|state| state.value());
        Tensor::cat(vec![mean, var], 0).into_data().to_vec::<f32>().expect("f32")
    };
    let whole = statistics(11, false);
    let furthest = |other: Vec<f32>| {
        let apart = whole.iter().zip(other).map(|(whole, other)| (whole - other).abs());
        apart.fold(0.0, f32::max)
    };
    assert_eq!(furthest(statistics(11, true)), 0.0, "one that runs whole is as it was");
    for items in [1, 3, 5] {
        let pooled = furthest(statistics(items, true));
        assert!(pooled < 1e-6, "{items}: {pooled}");
        let followed = furthest(statistics(items, false));
        assert!(followed > 1e-2, "{items}: {followed}");
    }
}
