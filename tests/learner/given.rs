//! Parts of a batch are given the numbers of the whole that a loss is divided by, or that its
//! targets are normalized with: nobody states a weight, and what is learned and shown is that of
//! the whole batch.

use burn::backend::{Autodiff, Flex};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::TensorData;
use burn::tensor::activation::{log_softmax, softmax, tanh};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::f16;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    InferenceStep, LearnerSummary, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::train::ByMicroBatch;
use firebox::{
    Bytes, Half, Lazy, Learner, LearnerBuilder, LossReduction, MicroBatch, Park, PlanReport,
    SplitCheck, TrainError, clock, is_rehearsal, scale_loss,
};
use firebox_testing::task::{Given, random_state, weights};

use crate::closeness::{Values, compare, difference, norm};

type B = Autodiff<Lazy<Flex>>;

const CLASSES: usize = 3;
const CLASS_WEIGHTS: [f32; CLASSES] = [0.2, 1.0, 3.5];

#[derive(Clone, Debug, MicroBatch)]
struct Rows<B: Backend> {
    /// `[items, 6]`
    rows: Tensor<B, 2>,
    /// `[items, CLASSES]`
    targets: Tensor<B, 2>,
    /// `[items, CLASSES]`, zeros and ones. None in some items.
    counts: Tensor<B, 2>,
    /// `[items]`
    classes: Tensor<B, 1, Int>,
}

impl<B: Backend> Rows<B> {
    fn new(seed: usize, items: usize) -> Self {
        let device = Default::default();
        let wave = |at: usize| ((at * 7919 + seed * 104_729) % 1013) as f32 / 506.5 - 1.0;
        let floats = |width: usize, of: &dyn Fn(usize) -> f32| {
            let numbers: Vec<f32> = (0..items * width).map(of).collect();
            Tensor::from_data(TensorData::new(numbers, [items, width]), &device)
        };
        let counts = |at: usize| {
            let is_empty = (at / CLASSES) % 5 < 2;
            if is_empty || wave(at + 3) < -0.2 { 0.0 } else { 1.0 }
        };
        let classes: Vec<i32> = (0..items).map(|at| ((at * 31 + seed) / 7 % 3) as i32).collect();
        Self {
            rows: floats(6, &wave),
            targets: floats(CLASSES, &|at| wave(at * 5 + 1)),
            counts: floats(CLASSES, &counts),
            classes: Tensor::from_data(TensorData::new(classes, [items]), &device),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// A mean by class weights.
    ByClass,
    /// A sum over what counts, divided by its number, which is at least one.
    Counted,
    /// Advantages that are normalized over the batch.
    Advantages,
    /// Two sums with denominators of their own, and a mean.
    Tasks,
    /// A mean of what is left of inputs that are normalized over the batch.
    Inputs,
    /// Two sums over what counts and what does not, divided by what counts, which is at least one.
    Focal,
    /// A sum over the items.
    Sum,
    /// A sum over the items, and a penalty on parameters.
    Penalty,
    /// A sum of items that are weighted by what their batch has.
    Shares,
    /// A second term with a denominator of its own comes later.
    Later,
    /// A mean with numbers of the host, which change.
    Uploads,
}

const LOSSES: [Loss; 10] = [
    Loss::ByClass,
    Loss::Counted,
    Loss::Advantages,
    Loss::Tasks,
    Loss::Inputs,
    Loss::Sum,
    Loss::Penalty,
    Loss::Shares,
    Loss::Later,
    Loss::Uploads,
];

#[derive(Module, Debug)]
struct Net<B: Backend> {
    norm: Option<BatchNorm<B>>,
    first: Linear<B>,
    inner: Vec<Linear<B>>,
    last: Linear<B>,
    #[module(skip)]
    loss: Loss,
    /// Whether it reads its loss where it learns.
    #[module(skip)]
    logs: bool,
    /// How often each row is taken, for more activations.
    #[module(skip)]
    times: usize,
}

impl<B: Backend> Net<B> {
    fn new(loss: Loss, width: usize) -> Self {
        let device = Default::default();
        B::seed(&device, 11);
        let layer = |from, to| LinearConfig::new(from, to).init(&device);
        Self {
            norm: (loss == Loss::Inputs).then(|| BatchNormConfig::new(6).init(&device)),
            first: layer(6, width),
            inner: (0..4).map(|_| layer(width, width)).collect(),
            last: layer(width, CLASSES),
            loss,
            logs: false,
            times: 1,
        }
    }

    fn output(&self, batch: Rows<B>) -> RegressionOutput<B> {
        let rows = match &self.norm {
            Some(norm) => norm.forward(batch.rows),
            None => batch.rows,
        };
        let rows = rows.unsqueeze_dim::<3>(1).repeat_dim(1, self.times);
        let hidden = tanh(self.first.forward(rows));
        let hidden = self.inner.iter().fold(hidden, |x, layer| tanh(layer.forward(x)));
        let output = self.last.forward(hidden).mean_dim(1).squeeze_dim::<2>(1) * 3.0;
        let squares = || (output.clone() - batch.targets.clone()).square();
        let counted =
            |counts: Tensor<B, 2>| (squares() * counts.clone()).sum() / counts.sum().clamp_min(1.0);
        let by_class = |weights: Option<Vec<f32>>| {
            let config = CrossEntropyLossConfig::new().with_weights(weights);
            config.init(&output.device()).forward(output.clone(), batch.classes.clone())
        };
        let loss = match self.loss {
            Loss::ByClass => by_class(Some(CLASS_WEIGHTS.to_vec())),
            Loss::Counted => counted(batch.counts.clone()),
            Loss::Focal => {
                let none = batch.counts.clone().neg() + 1.0;
                let sum = (squares() * batch.counts.clone()).sum() + (squares() * none * 0.1).sum();
                sum / batch.counts.sum().clamp_min(1.0)
            }
            Loss::Advantages => {
                let of_items = batch.targets.clone().mean_dim(1);
                let (variance, mean) = of_items.clone().var_mean(0);
                let advantages = (of_items - mean) / (variance.sqrt() + 1e-3);
                let chosen = batch.classes.clone().unsqueeze_dim::<2>(1);
                (log_softmax(output.clone(), 1).gather(1, chosen) * advantages).mean().neg()
            }
            Loss::Tasks => {
                let others = batch.counts.clone().neg() + 1.0;
                counted(batch.counts.clone()) + counted(others) * 0.5 + by_class(None)
            }
            Loss::Inputs => squares().mean(),
            Loss::Sum => squares().sum() * 0.1,
            Loss::Penalty => {
                let sum = |weight: Tensor<B, 2>| weight.clone().square().sum() + weight.sum();
                squares().sum() * 0.1 + sum(self.first.weight.val()) + sum(self.last.weight.val())
            }
            Loss::Shares => {
                let shares = softmax(batch.targets.clone().mean_dim(1) * 3.0, 0);
                (squares() * shares).sum()
            }
            Loss::Later if clock().epoch < 2 => by_class(Some(CLASS_WEIGHTS.to_vec())),
            Loss::Later => by_class(Some(CLASS_WEIGHTS.to_vec())) + counted(batch.counts.clone()),
            Loss::Uploads => {
                let scales = [0.5, 1.0, 1.0 + clock().step as f32];
                let scales = Tensor::<B, 1>::from_floats(scales, &output.device());
                (squares() * scales.unsqueeze()).mean()
            }
        };
        if self.logs && !is_rehearsal() {
            let value: f32 = loss.clone().into_scalar().elem();
            assert!(value.is_finite());
        }
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.output(batch);
        TrainOutput::new(self, scale_loss(output.loss.clone()).backward(), output)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> RegressionOutput<B> {
        self.output(batch)
    }
}

type Builder = LearnerBuilder<ByMicroBatch, ByMicroBatch>;

/// What is left of a training.
struct Trained {
    learned: Values,
    /// The mean loss of the epoch, as burn shows it.
    loss: f64,
    /// That of a validation.
    validation: f64,
    check: SplitCheck,
    report: PlanReport,
}

fn batches<B: Backend>() -> Vec<Rows<B>> {
    vec![Rows::new(1, 17), Rows::new(2, 11), Rows::new(3, 17)]
}

/// Trains two epochs of batches, the second of which is smaller.
macro_rules! train {
    ($backend:ty, $loss:expr, $accumulation:expr, $settings:expr) => {
        train!($backend, Net::<$backend>::new($loss, 16), $loss, $accumulation, $settings)
    };
    ($backend:ty, $model:expr, $loss:expr, $accumulation:expr, $settings:expr) => {
        train!($backend, $model, $loss, $accumulation, batches(), $settings)
    };
    ($backend:ty, $model:expr, $loss:expr, $accumulation:expr, $batches:expr, $settings:expr) => {{
        let settings: &dyn Fn(Builder) -> Builder = $settings;
        let model = $model;
        let before = weights(&model);
        let folder = tempfile::tempdir().expect("a folder");
        // Of another size than batches of training.
        let valid = vec![Rows::<<$backend as AutodiffBackend>::InnerBackend>::new(4, 23)];
        let valid = Given::loader(valid);
        let training = SupervisedTraining::new(folder.path(), Given::loader($batches), valid)
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .grads_accumulation($accumulation)
            .num_epochs(2);
        let builder = settings(Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet());
        // Running statistics are compared, too.
        let builder = match $loss {
            Loss::Inputs => builder.pool_statistics(0.1),
            _ => builder,
        };
        let learner = builder.build(model, AdamConfig::new().init(), 1e-2);
        let fitted = learner.fit(training).expect("it fits");
        let summary = LearnerSummary::new(folder.path(), &["Loss"]).expect("logs are there");
        let loss = &summary.metrics.train[0].entries[0];
        let validation = summary.metrics.valid[0].entries[0].value;
        Trained {
            validation,
            learned: difference(&before, &weights(&fitted.model)),
            loss: loss.value,
            check: fitted.split_check,
            report: fitted.report.expect("it was trained"),
        }
    }};
}

#[test]
fn every_split_learns_and_shows_what_the_whole_batch_does() {
    let _lock = random_state();
    for loss in LOSSES {
        let whole = train!(B, loss, 1, &|builder| builder);
        for items in [1, 4, 6, 16] {
            let split = train!(B, loss, 1, &|builder| builder.micro_batch(items));
            assert_eq!(split.check, SplitCheck::Proved, "{loss:?}");
            let same = compare(&whole.learned, &split.learned);
            assert_eq!(same, Ok(()), "{loss:?} in parts of {items}");
            let apart = (whole.loss - split.loss).abs() / whole.loss.abs();
            assert!(
                apart < 1e-4,
                "{loss:?} in parts of {items}: {} and {}",
                whole.loss,
                split.loss
            );
            let shown = [whole.validation, split.validation];
            let apart = (shown[0] - shown[1]).abs() / shown[0].abs();
            assert!(apart < 1e-4, "{loss:?} validated in parts of {items}: {shown:?}");
        }
    }
}

#[test]
fn batches_that_are_accumulated_have_their_own_numbers() {
    let _lock = random_state();
    for loss in LOSSES {
        let whole = train!(B, loss, 2, &|builder| match loss {
            Loss::Sum | Loss::Penalty => builder.reduction(LossReduction::Sum),
            _ => builder,
        });
        let found = train!(B, loss, 2, &|builder| builder);
        assert_eq!(found.learned, whole.learned, "{loss:?}: nobody has to say how it is reduced");
        let split = train!(B, loss, 2, &|builder| builder.micro_batch(5));
        assert_eq!(split.check, SplitCheck::Proved, "{loss:?}");
        assert_eq!(compare(&whole.learned, &split.learned), Ok(()), "{loss:?}");
    }
}

/// Two batches as one.
fn both<B: Backend>(one: Rows<B>, other: Rows<B>) -> Rows<B> {
    let cat = |one, other| Tensor::cat(vec![one, other], 0);
    Rows {
        rows: cat(one.rows, other.rows),
        targets: cat(one.targets, other.targets),
        counts: cat(one.counts, other.counts),
        classes: Tensor::cat(vec![one.classes, other.classes], 0),
    }
}

/// A group in which nothing counts.
fn none_of_all(empty: impl Fn(Rows<B>) -> Rows<B>) -> [Rows<B>; 2] {
    [empty(Rows::new(8, 6)), empty(Rows::new(9, 10))]
}

#[test]
fn a_group_of_batches_that_count_weighs_what_it_counts_together() {
    let _lock = random_state();
    // Nothing counts in some.
    let empty = |rows: Rows<B>| Rows { counts: rows.counts.zeros_like(), ..rows };
    for loss in [Loss::ByClass, Loss::Counted, Loss::Focal] {
        let net = || Net::<B>::new(loss, 16);
        // One item shows nothing of its batch, but it is another of these.
        let groups = || {
            let first = [Rows::new(1, 17), Rows::new(2, 11)];
            let none = [Rows::new(5, 12), empty(Rows::new(7, 9))];
            [first, [Rows::new(3, 17), Rows::new(6, 1)], none, none_of_all(empty)]
        };
        let as_one = groups().map(|[one, other]| both(one, other)).to_vec();
        let as_one = train!(B, net(), loss, 1, as_one, &|builder| builder);
        for items in [17, 5, 1] {
            let settings = |builder: Builder| builder.micro_batch(items);
            let group = train!(B, net(), loss, 2, groups().concat(), &settings);
            let same = compare(&as_one.learned, &group.learned);
            assert_eq!(same, Ok(()), "{loss:?} in parts of {items}");
        }
    }
}

#[test]
fn what_is_computed_again_and_parked_is_given_the_same() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    for loss in [Loss::ByClass, Loss::Tasks] {
        let model = || Net::<B> { times: 512, ..Net::new(loss, 64) };
        let plain = train!(B, model(), loss, 1, &|builder| builder.micro_batch(9));
        let memory = plain.report.predicted().scale(0.7);
        let again = train!(B, model(), loss, 1, &|builder| {
            let parks = Park::Disk(folder.path().to_owned());
            builder.micro_batch(9).memory(memory).park_optimizer(parks)
        });
        let report = &again.report;
        assert!(report.recomputed.is_some() && report.parked > Bytes::ZERO, "{report}");
        assert_eq!(again.check, SplitCheck::Proved);
        assert_eq!(again.learned, plain.learned, "{loss:?}: the same bits");
    }
}

#[test]
fn half_floats_are_given_the_same() {
    type Sixteen = Autodiff<Half<Lazy<Flex>, f16>>;

    let _lock = random_state();
    for loss in [Loss::ByClass, Loss::Counted, Loss::Tasks] {
        let whole = train!(Sixteen, loss, 1, &|builder| builder);
        let split = train!(Sixteen, loss, 1, &|builder| builder.micro_batch(4));
        assert_eq!(split.check, SplitCheck::Proved, "{loss:?}");
        // Adam divides gradients by their size, rounding too.
        let apart = norm(&difference(&whole.learned, &split.learned)) / norm(&whole.learned);
        assert!(apart < 0.05, "{loss:?}: {apart} apart");
        let apart = (whole.loss - split.loss).abs() / whole.loss.abs();
        assert!(apart < 5e-3, "{loss:?}: {} and {}", whole.loss, split.loss);
    }
}

#[test]
fn a_step_that_reads_its_loss_where_it_learns_is_compared_as_before() {
    let _lock = random_state();
    let train = |loss| {
        let model = Net::<B> { logs: true, ..Net::new(loss, 16) };
        let folder = tempfile::tempdir().expect("a folder");
        let none = Given::loader::<<B as AutodiffBackend>::InnerBackend>(Vec::new());
        let batches = Given::loader(vec![Rows::new(1, 17), Rows::new(2, 17)]);
        let training = SupervisedTraining::new(folder.path(), batches, none)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).micro_batch(5).quiet();
        let fitted = builder.build(model, AdamConfig::new().init(), 1e-2).fit(training);
        fitted.map(|fitted| fitted.split_check).map_err(|error| error.into_parts().0)
    };
    // Its parts have run before they could be given anything.
    let refused = train(Loss::ByClass).expect_err("no weight is stated");
    assert!(matches!(refused, TrainError::Coupled { .. }), "{refused}");
    // Nothing is given, but host data is not compared in a program that was not proved.
    let uploads = train(Loss::Uploads).map_err(|error| error.to_string());
    assert_eq!(uploads, Ok(SplitCheck::Agrees));
}
