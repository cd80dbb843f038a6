//! Tests every layer of the suites, split in every way.
//!
//! Gradients and 20 Adam steps must equal those of the whole batch. A Learner that added up
//! gradients without weights would fail.

use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::module::{ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::train::{ByFunctions, ByMicroBatch, Splitter};
use firebox::{Bytes, Coupling, Lazy, Learner, LossReduction, MicroBatch, MicroBatchError};
use firebox_testing::layers::Layer;
use firebox_testing::task::{Given, random_state, weights};

use crate::closeness::{Values, compare, difference, norm};

type B = Autodiff<Lazy<Flex>>;

const ITEMS: usize = 12;
/// Micro-batches of 12 items: (n-1)+1, all ones, uneven, even.
const SPLITS: [(usize, &[usize]); 4] =
    [(11, &[11, 1]), (1, &[1; 12]), (5, &[5, 5, 2]), (4, &[4, 4, 4])];

/// How the losses of the items become the loss of the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Loss {
    #[default]
    Mean,
    Sum,
    /// A mean in which every item has its own weight.
    Weighted,
}

#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = sum_of_weights)]
struct Rows<B: Backend> {
    rows: Tensor<B, 2>,
    weights: Tensor<B, 1>,
}

fn sum_of_weights<B: Backend>(batch: &Rows<B>) -> f64 {
    batch.weights.clone().sum().into_scalar().elem()
}

impl<B: Backend> Rows<B> {
    /// `items` rows of `features` numbers, different for every `seed`.
    fn new(seed: usize, items: usize, features: usize) -> Self {
        let wave = |i: usize| ((i * 7919 + seed * 613) % 1013) as f32 / 1013.0 - 0.5;
        let rows: Vec<f32> = (0..items * features).map(|i| 3.0 * wave(i + 1)).collect();
        let weights: Vec<f32> = (0..items).map(|i| 1.0 + wave(31 * i)).collect();
        let device = Default::default();
        Self {
            rows: Tensor::from_data(TensorData::new(rows, [items, features]), &device),
            weights: Tensor::from_data(TensorData::new(weights, [items]), &device),
        }
    }
}

/// A layer between a loss and parameters that receive its input's gradient.
///
/// Words have no gradient: before an embedding, the parameters are a branch without a backward
/// pass.
#[derive(Module, Debug)]
struct Study<B: Backend> {
    scale: Param<Tensor<B, 1>>,
    layer: Layer<B>,
    #[module(skip)]
    loss: Loss,
}

impl Study<B> {
    /// One study per layer, with the same weights each time.
    fn all(loss: Loss) -> Vec<Self> {
        let _lock = random_state();
        let device = Default::default();
        Flex::seed(&device, 61);
        let study = |layer: Layer<B>| {
            let scale = Param::from_tensor(Tensor::ones([layer.features()], &device));
            let study = Self { scale, layer, loss };
            firebox::initialize(&study);
            study
        };
        Layer::all(&device).into_iter().map(study).collect()
    }
}

impl<B: Backend> Study<B> {
    fn loss(&self, batch: Rows<B>) -> Tensor<B, 1> {
        let Rows { rows, weights } = batch;
        let output = self.layer.forward(rows * self.scale.val().unsqueeze());
        let target = Tensor::arange(0..output.dims()[1] as i64, &output.device()).float().sin();
        let items = (output - target.unsqueeze()).square().mean_dim(1).squeeze_dim::<1>(1);
        match self.loss {
            Loss::Mean => items.mean(),
            Loss::Sum => items.sum(),
            Loss::Weighted => (items * weights.clone()).sum() / weights.sum(),
        }
    }
}

impl<B: AutodiffBackend> TrainStep for Study<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

impl<B: Backend> InferenceStep for Study<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) {
        self.loss(batch);
    }
}

/// Gradients of one step of the model itself; zeros for parameters without one.
fn gradients(study: &Study<B>, batch: Rows<B>) -> Values {
    struct Collect(GradientsParams, Values);

    impl ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let values = match self.0.get::<Lazy<Flex>, D>(param.id) {
                Some(gradient) => gradient.into_data().to_vec().expect("f32"),
                None => vec![0.0; param.shape().num_elements()],
            };
            self.1.push(values);
        }
    }

    let mut collect = Collect(TrainStep::step(study, batch).grads, Vec::new());
    study.visit(&mut collect);
    collect.1
}

/// Trains on `batches` in micro-batches of these sizes, and returns the weights.
fn train<O, S>(
    study: &Study<B>,
    (optimizer, rate): (O, f64),
    (splitter, reduction, although): (S, LossReduction, &[Coupling]),
    (batches, epochs): (Vec<Rows<B>>, usize),
    (items, sizes): (usize, &[usize]),
) -> Values
where
    O: Optimizer<Study<B>, B> + 'static,
    S: Splitter<Rows<B>>,
{
    let folder = tempfile::tempdir().expect("a folder");
    let valid = Given::loader(vec![Rows::<Lazy<Flex>>::new(9, 2, study.layer.features())]);
    let training = SupervisedTraining::new(folder.path(), Given::loader(batches), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(epochs);
    let builder = Learner::builder()
        .auto_batch_with(splitter, ByMicroBatch)
        .memory(Bytes::gib(1))
        .micro_batch(items)
        .reduction(reduction)
        .quiet();
    let builder = although.iter().fold(builder, |builder, why| builder.split_although(*why));
    let fitted = builder
        .build(study.clone(), optimizer, rate)
        .fit(training)
        .unwrap_or_else(|error| panic!("{} trains: {error}", study.layer.name()));
    let plan = fitted.report.expect("batches were planned").plan;
    assert_eq!(plan.sizes().map(|size| size.get()).collect::<Vec<_>>(), sizes);
    weights(&fitted.model)
}

/// Gradients that the Learner hands to the optimizer.
fn learned_gradients<S: Splitter<Rows<B>>>(
    study: &Study<B>,
    how: (S, LossReduction, &[Coupling]),
    split: (usize, &[usize]),
) -> Values {
    // At this high rate the weights after the step are the gradient, to all but the last bits.
    let rate = f64::from(1 << 20);
    let batch = Rows::new(0, ITEMS, study.layer.features());
    let after = train(study, (SgdConfig::new().init(), rate), how, (vec![batch], 1), split);
    let scaled = difference(&weights(study), &after);
    scaled.iter().map(|tensor| tensor.iter().map(|v| v / rate as f32).collect()).collect()
}

fn by_items() -> impl Splitter<Rows<B>> {
    ByFunctions::new(|batch: &Rows<B>| batch.rows.dims()[0], MicroBatch::range)
}

/// Checks every layer in every split.
#[track_caller]
fn check<S: Splitter<Rows<B>>>(loss: Loss, splitter: fn() -> S, reduction: LossReduction) {
    let mut failures = Vec::new();
    for study in Study::all(loss) {
        let whole = gradients(&study, Rows::new(0, ITEMS, study.layer.features()));
        for split in SPLITS.into_iter().chain([(ITEMS, &[ITEMS][..])]) {
            let found = learned_gradients(&study, (splitter(), reduction, &[]), split);
            if let Err(error) = compare(&whole, &found) {
                failures.push(format!("{} in {:?}: {error}", study.layer.name(), split.1));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_layer_under_a_mean() {
    check(Loss::Mean, by_items, LossReduction::Mean);
}

#[test]
fn every_layer_under_a_sum() {
    check(Loss::Sum, by_items, LossReduction::Sum);
}

#[test]
fn every_layer_under_weights_of_the_items() {
    check(Loss::Weighted, || ByMicroBatch, LossReduction::Mean);
}

/// A splitter that makes the Learner ignore weights: every micro-batch counts the same.
struct Unweighted {
    pieces: usize,
}

impl Splitter<Rows<B>> for Unweighted {
    fn items(&self, batch: &Rows<B>) -> Result<usize, MicroBatchError> {
        batch.items()
    }

    fn range(&self, batch: &Rows<B>, range: Range<usize>) -> Rows<B> {
        batch.range(range)
    }

    fn weight(&self, batch: &Rows<B>) -> f64 {
        if batch.rows.dims()[0] == ITEMS { self.pieces as f64 } else { 1.0 }
    }
}

/// Couplings that training would report for this splitter before it starts. The test accepts them.
const WRONG: [Coupling; 3] = [Coupling::Mean, Coupling::Weights, Coupling::Items];

#[test]
fn a_learner_without_weights_would_be_noticed() {
    for study in Study::all(Loss::Mean) {
        let name = study.layer.name();
        let whole = gradients(&study, Rows::new(0, ITEMS, study.layer.features()));
        let [mostly_one_part, .., even] = SPLITS;
        for split in [mostly_one_part, even] {
            let sum = learned_gradients(&study, (by_items(), LossReduction::Sum, &WRONG), split);
            assert!(compare(&whole, &sum).is_err(), "{name} in {:?}, summed", split.1);
        }
        // Even parts do count the same.
        let splitter = Unweighted { pieces: mostly_one_part.1.len() };
        let how = (splitter, LossReduction::Mean, &WRONG[..]);
        let mean = learned_gradients(&study, how, mostly_one_part);
        assert!(compare(&whole, &mean).is_err(), "{name} in {:?}, averaged", mostly_one_part.1);
    }
}

/// Runs 20 steps of Adam on four batches in turn, and returns the weights.
fn twenty_steps(study: &Study<B>, split: (usize, &[usize])) -> Values {
    let batches = (0..4).map(|seed| Rows::new(seed, ITEMS, study.layer.features())).collect();
    let how = (ByMicroBatch, LossReduction::Mean, &[][..]);
    train(study, (AdamConfig::new().init(), 1e-3), how, (batches, 5), split)
}

#[test]
fn twenty_adam_steps_of_every_layer_stay_together() {
    stay_together(&SPLITS[2..3]);
}

#[test]
#[ignore = "a minute"]
fn twenty_adam_steps_of_every_layer_stay_together_however_split() {
    stay_together(&SPLITS);
}

fn stay_together(splits: &[(usize, &[usize])]) {
    let mut failures = Vec::new();
    for study in Study::all(Loss::Weighted) {
        let whole = twenty_steps(&study, (ITEMS, &[ITEMS]));
        let moved = norm(&difference(&whole, &weights(&study)));
        for split in splits.iter().copied() {
            let apart = norm(&difference(&twenty_steps(&study, split), &whole));
            if apart > 1e-3 * moved {
                let name = study.layer.name();
                failures.push(format!("{name} in {:?}: {apart:e} of {moved:e}", split.1));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
