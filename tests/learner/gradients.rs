//! The gradient of a split batch equals that of the whole batch.
//!
//! Covers batches of a derived type, class weights, and accumulated loader batches.

use burn::backend::{Autodiff, Flex};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::train::{ByFunctions, ByMicroBatch, Splitter};
use firebox::{Bytes, Lazy, Learner, LearnerBuilder, MicroBatch};
use firebox_testing::task::{Given, Net, Points, batch, loader, points, random_state, weights};

use crate::closeness::{Values, compare, difference};

type B = Autodiff<Lazy<Flex>>;

/// Trains one epoch with plain gradient descent at a rate of one. The gradient is the weights
/// before minus the weights after.
fn descend(items: usize, batch: usize, micro_batch: Option<usize>, accumulation: usize) -> Values {
    let device = Default::default();
    Flex::seed(&device, 21);
    let model = Net::<B>::new(&device);
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(4), 4, None);
    let mut training =
        SupervisedTraining::new(folder.path(), loader::<B>(points(items), batch, None), valid)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
    if accumulation > 1 {
        training = training.grads_accumulation(accumulation);
    }
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    let fitted = builder.build(model, SgdConfig::new().init(), 1.0).fit(training).expect("it fits");
    difference(&before, &weights(&fitted.model))
}

#[test]
fn every_split_gives_the_gradient_of_the_whole_batch() {
    let _lock = random_state();
    let whole = descend(13, 13, None, 1);
    for micro_batch in [1, 4, 5, 7, 12] {
        assert_eq!(compare(&whole, &descend(13, 13, Some(micro_batch), 1)), Ok(()));
    }
}

#[test]
fn accumulated_loader_batches_are_one_batch_weighted_by_their_items() {
    let _lock = random_state();
    let whole = descend(13, 13, None, 1);
    // 5 + 5 + 3 items in one optimizer step: the tail counts, with less weight.
    assert_eq!(compare(&whole, &descend(13, 5, None, 3)), Ok(()));
    assert_eq!(compare(&whole, &descend(13, 5, Some(2), 4)), Ok(()));
    // 12 + 1.
    assert_eq!(compare(&whole, &descend(13, 12, None, 2)), Ok(()));
}

const CLASS_WEIGHTS: [f32; 3] = [0.2, 1.0, 3.5];

/// A batch whose loss is a mean over the class weights of its targets.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = class_weights)]
struct Weighted<B: Backend>(Points<B>);

fn class_weights<B: Backend>(batch: &Weighted<B>) -> f64 {
    let table = Tensor::<B, 1>::from_floats(CLASS_WEIGHTS, &batch.0.targets.device());
    table.select(0, batch.0.targets.clone()).sum().into_scalar().elem()
}

#[derive(Module, Debug)]
struct ByClass<B: Backend> {
    net: Net<B>,
}

impl<B: Backend> ByClass<B> {
    fn loss(&self, Weighted(batch): Weighted<B>) -> Tensor<B, 1> {
        let config = CrossEntropyLossConfig::new().with_weights(Some(CLASS_WEIGHTS.to_vec()));
        let output = self.net.forward(batch.inputs);
        config.init(&output.device()).forward(output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for ByClass<B> {
    type Input = Weighted<B>;
    type Output = ();

    fn step(&self, batch: Weighted<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

impl<B: Backend> InferenceStep for ByClass<B> {
    type Input = Weighted<B>;
    type Output = ();

    fn step(&self, batch: Weighted<B>) {
        self.loss(batch);
    }
}

fn descend_by_class<S: Splitter<Weighted<B>>>(
    builder: LearnerBuilder<S, ByMicroBatch>,
    items: usize,
) -> Values {
    let device = Default::default();
    Flex::seed(&device, 21);
    let model = ByClass::<B> { net: Net::new(&device) };
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        Given::loader(vec![Weighted(batch(13))]),
        Given::loader(vec![Weighted(batch(4))]),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(1);
    let builder = builder.memory(Bytes::gib(1)).micro_batch(items).quiet();
    let fitted = builder.build(model, SgdConfig::new().init(), 1.0).fit(training).expect("it fits");
    difference(&before, &weights(&fitted.model))
}

#[test]
fn class_weights_follow_from_the_step_whatever_the_batch_says() {
    let _lock = random_state();
    let whole = descend_by_class(Learner::builder().auto_batch(), 13);
    for items in [1, 4, 5, 12] {
        let split = descend_by_class(Learner::builder().auto_batch(), items);
        assert_eq!(compare(&whole, &split), Ok(()));
        let items_of = |batch: &Weighted<B>| batch.0.targets.dims()[0];
        let by_items = ByFunctions::new(items_of, MicroBatch::range);
        let builder = Learner::builder().auto_batch_with(by_items, ByMicroBatch);
        assert_eq!(compare(&whole, &descend_by_class(builder, items)), Ok(()));
    }
}

/// Rows with a label, or without: those count for nothing in the loss.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = labelled)]
struct Labelled<B: Backend> {
    rows: Tensor<B, 2>,
    is_labelled: Tensor<B, 1>,
}

fn labelled<B: Backend>(batch: &Labelled<B>) -> f64 {
    batch.is_labelled.clone().sum().into_scalar().elem()
}

fn labels<B: Backend>(are: &[f32]) -> Labelled<B> {
    let device = Default::default();
    let rows = (0..are.len() * 3).map(|n| (n % 9 * 7919 % 17) as f32 / 8.0).collect::<Vec<f32>>();
    let rows = Tensor::from_data(TensorData::new(rows, [are.len(), 3]), &device);
    Labelled { rows, is_labelled: Tensor::from_floats(are, &device) }
}

/// A mean over labelled rows, of at least `least` of them, and a penalty.
#[derive(Module, Debug)]
struct OfLabelled<B: Backend> {
    layer: burn::nn::Linear<B>,
    least: f64,
    penalty: f64,
}

impl<B: Backend> OfLabelled<B> {
    fn loss(&self, batch: Labelled<B>) -> Tensor<B, 1> {
        let each = self.layer.forward(batch.rows).powi_scalar(2).flatten::<1>(0, 1);
        let count = batch.is_labelled.clone().sum().clamp_min(self.least);
        (each * batch.is_labelled).sum() / count
            + self.layer.weight.val().powi_scalar(2).sum() * self.penalty
    }
}

impl<B: AutodiffBackend> TrainStep for OfLabelled<B> {
    type Input = Labelled<B>;
    type Output = ();

    fn step(&self, batch: Labelled<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

impl<B: Backend> InferenceStep for OfLabelled<B> {
    type Input = Labelled<B>;
    type Output = ();

    fn step(&self, _: Labelled<B>) {}
}

/// Trains one epoch on batches in which these rows are labelled.
fn of_labelled(
    batches: &[&[f32]],
    (least, penalty): (f64, f64),
    micro_batch: Option<usize>,
    accumulation: usize,
) -> Values {
    let device = Default::default();
    Flex::seed(&device, 5);
    let layer = burn::nn::LinearConfig::new(3, 1).init(&device);
    let model = OfLabelled::<B> { layer, least, penalty };
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let train = batches.iter().map(|are| labels::<B>(are)).collect();
    let valid = vec![labels::<Lazy<Flex>>(&[1.0; 4])];
    let training =
        SupervisedTraining::new(folder.path(), Given::loader(train), Given::loader(valid))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .grads_accumulation(accumulation)
            .num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    let builder = match micro_batch {
        Some(items) => builder.micro_batch(items),
        None => builder,
    };
    let fitted = builder.build(model, SgdConfig::new().init(), 0.1).fit(training).expect("it fits");
    difference(&before, &weights(&fitted.model))
}

#[test]
fn a_batch_without_labels_is_one_of_the_batches_that_are_accumulated() {
    let _lock = random_state();
    let (none, one, all) = (&[0.0; 3][..], &[0.0, 1.0, 0.0][..], &[1.0; 3][..]);
    for least in [1.0, 0.0] {
        // Of two batches each, as one.
        let expected = of_labelled(
            &[&[one, none].concat(), &[none, all].concat(), &[all, one].concat()],
            (least, 0.0),
            None,
            1,
        );
        let batches = [one, none, none, all, all, one];
        for micro_batch in [None, Some(1), Some(2)] {
            let accumulated = of_labelled(&batches, (least, 0.0), micro_batch, 2);
            assert_eq!(compare(&expected, &accumulated), Ok(()), "{least}, {micro_batch:?}");
        }
    }
    // A mean over nothing is not a number, and the optimizer does not step.
    let expected = of_labelled(&[all, one], (0.0, 0.0), None, 1);
    assert_eq!(of_labelled(&[all, none, one], (0.0, 0.0), None, 1), expected);
    // Without labels, only the penalty has a gradient.
    let penalty = of_labelled(&[none, all], (1.0, 0.01), None, 1);
    assert!(compare(&of_labelled(&[all], (1.0, 0.01), None, 1), &penalty).is_err());
}
