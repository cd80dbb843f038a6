//! The gradient of a split batch is the gradient of the whole batch.

use burn::backend::{Autodiff, Flex};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::SupervisedTraining;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use firebox::{Bytes, Lazy, Learner, Reduction};

use crate::task::{Net, loader, points, random_state, weights};

type B = Autodiff<Lazy<Flex>>;

fn norm(values: &[Vec<f32>]) -> f64 {
    values.iter().flatten().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> Vec<Vec<f32>> {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect()).collect()
}

/// Trains one epoch with plain gradient descent at a rate of one: weights before less weights after are gradients.
fn descend(
    items: usize,
    batch: usize,
    micro_batch: Option<usize>,
    accumulation: usize,
) -> Vec<Vec<f32>> {
    let device = Default::default();
    Flex::seed(&device, 21);
    let model = Net::<B>::new(&device);
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(4), 4, None);
    let mut training =
        SupervisedTraining::new(folder.path(), loader::<B>(points(items), batch, None), valid)
            .metrics((AccuracyMetric::new(), LossMetric::new()))
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

#[track_caller]
fn check_equal(whole: &[Vec<f32>], split: &[Vec<f32>]) {
    let total = norm(whole);
    assert!(total > 1e-3, "there is a gradient");
    let apart = difference(split, whole);
    assert!(norm(&apart) <= 1e-5 * total, "{} of {total}", norm(&apart));
    for (tensor, apart) in whole.iter().zip(&apart) {
        let size = norm(std::slice::from_ref(tensor)).max(1e-3 * total);
        assert!(norm(std::slice::from_ref(apart)) <= 1e-5 * size);
    }
}

#[test]
fn every_split_gives_the_gradient_of_the_whole_batch() {
    let _lock = random_state();
    let whole = descend(13, 13, None, 1);
    for micro_batch in [1, 4, 5, 7, 12] {
        check_equal(&whole, &descend(13, 13, Some(micro_batch), 1));
    }
}

#[test]
fn accumulated_loader_batches_are_one_batch_weighted_by_their_items() {
    let _lock = random_state();
    // 5 + 5 + 3 items in one optimizer step: the tail counts, and counts less.
    check_equal(&descend(13, 13, None, 1), &descend(13, 5, None, 3));
    check_equal(&descend(13, 13, None, 1), &descend(13, 5, Some(2), 4));
}

#[test]
fn an_unweighted_sum_would_be_noticed() {
    let _lock = random_state();
    let (model, batch) = model_and_batch();
    let whole = gradients(&model, TrainStep::step(&model, batch.clone()));
    let mut wrong: Option<Vec<Vec<f32>>> = None;
    for range in [0..1, 1..13] {
        let part =
            gradients(&model, TrainStep::step(&model, firebox::MicroBatch::range(&batch, range)));
        wrong = Some(match wrong {
            None => part,
            Some(sum) => sum
                .iter()
                .zip(part)
                .map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a + b) / 2.0).collect())
                .collect(),
        });
    }
    let apart = difference(&wrong.expect("two parts"), &whole);
    assert!(norm(&apart) > 1e-2 * norm(&whole), "the bound of the tests above tells them apart");
}

fn model_and_batch() -> (Net<B>, crate::task::Points<B>) {
    let device = Default::default();
    Flex::seed(&device, 21);
    let model = Net::<B>::new(&device);
    let batcher = crate::task::PointBatcher;
    let batch = burn::data::dataloader::batcher::Batcher::batch(&batcher, points(13), &device);
    (model, batch)
}

fn gradients<T>(model: &Net<B>, output: TrainOutput<T>) -> Vec<Vec<f32>> {
    struct Collect<'a>(&'a GradientsParams, Vec<Vec<f32>>);

    impl burn::module::ModuleVisitor<B> for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<B, D>>) {
            let gradient = self.0.get::<Lazy<Flex>, D>(param.id).expect("every weight is used");
            self.1.push(gradient.into_data().to_vec().expect("f32"));
        }
    }

    let mut collect = Collect(&output.grads, Vec::new());
    model.visit(&mut collect);
    collect.1
}

/// Runs 20 Adam steps, and gives the weights after them.
fn twenty_steps(micro_batch: Option<usize>) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let device = Default::default();
    Flex::seed(&device, 31);
    let model = Net::<B>::new(&device);
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(4), 4, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(48), 12, None), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(5);
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    let fitted =
        builder.build(model, AdamConfig::new().init(), 1e-3).fit(training).expect("it fits");
    (before, weights(&fitted.model))
}

#[test]
fn twenty_adam_steps_stay_together() {
    let _lock = random_state();
    let (start, whole) = twenty_steps(None);
    let (_, split) = twenty_steps(Some(5));
    let moved = norm(&difference(&whole, &start));
    let apart = norm(&difference(&whole, &split));
    assert!(apart <= 1e-3 * moved, "{apart} of {moved}");
}

/// A model whose loss is a sum over the items.
#[derive(Module, Debug)]
struct Summed<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Summed<B> {
    type Input = crate::task::Points<B>;
    type Output = burn::train::ClassificationOutput<B>;

    fn step(&self, batch: Self::Input) -> TrainOutput<Self::Output> {
        let items = batch.targets.dims()[0] as f32;
        let item = InferenceStep::step(&self.net, batch);
        let loss = item.loss.clone() * items;
        TrainOutput::new(self, loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Summed<B> {
    type Input = crate::task::Points<B>;
    type Output = burn::train::ClassificationOutput<B>;

    fn step(&self, batch: Self::Input) -> Self::Output {
        InferenceStep::step(&self.net, batch)
    }
}

fn descend_sum(micro_batch: Option<usize>) -> Vec<Vec<f32>> {
    let device = Default::default();
    Flex::seed(&device, 21);
    let model = Summed::<B> { net: Net::new(&device) };
    let before = weights(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(4), 4, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(13), 13, None), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let mut builder =
        Learner::builder().auto_batch().memory(Bytes::gib(1)).reduction(Reduction::Sum).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    let fitted = builder.build(model, SgdConfig::new().init(), 1.0).fit(training).expect("it fits");
    difference(&before, &weights(&fitted.model))
}

#[test]
fn a_loss_that_is_a_sum_adds_up() {
    let _lock = random_state();
    let whole = descend_sum(None);
    for micro_batch in [1, 5, 12] {
        check_equal(&whole, &descend_sum(Some(micro_batch)));
    }
}

/// Batches that weigh their first item three times as much as any other: `weight` says so.
#[derive(Clone, Debug, firebox::MicroBatch)]
#[micro_batch(weight = first_counts_thrice)]
struct Weighted<B: Backend> {
    inputs: Tensor<B, 2>,
    weights: Tensor<B, 1>,
}

fn first_counts_thrice<B: Backend>(batch: &Weighted<B>) -> f64 {
    batch.weights.clone().sum().into_scalar().elem()
}

#[test]
fn a_weight_of_the_batch_s_own_is_asked_for() {
    let device = Default::default();
    let batch = Weighted::<Lazy<Flex>> {
        inputs: Tensor::ones([4, 2], &device),
        weights: Tensor::from_floats([3.0, 1.0, 1.0, 1.0], &device),
    };
    let splitter = firebox::ByMicroBatch;
    let parts = [0..1, 1..4].map(|range| firebox::Splitter::range(&splitter, &batch, range));
    let weights = parts.map(|part| firebox::Splitter::weight(&splitter, &part));
    assert_eq!(weights, [3.0, 3.0]);
    assert_eq!(firebox::Splitter::weight(&splitter, &batch), 6.0);
    assert_eq!(batch.inputs.dims(), [4, 2]);
}
