//! A batch may be split only if its gradient is the sum over its parts.
//!
//! The Learner refuses other losses before training and says what they look like. It does not
//! refuse sound ones.

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::{
    Bytes, Coupling, Lazy, Learner, LossReduction, MicroBatch, SplitCheck, TrainError, batch_share,
    weight,
};
use firebox_testing::task::{Given, Net, Points, batch, random_state, weights};

type B = Autodiff<Lazy<Flex>>;

const CLASS_WEIGHTS: [f32; 3] = [0.2, 1.0, 3.5];

/// How the loss combines the losses of the items.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    Mean,
    Sum,
    /// A sum divided by a fixed number.
    SumOver(f32),
    ByClass,
    /// A sum plus the size of the weights.
    Penalized,
    /// Same as `Penalized`, with the size of the weights added once per batch.
    Shared,
    RootOfMean,
    Largest,
    /// The hardest half.
    Hardest,
    /// How similar the outputs of the batch are.
    Contrast,
    /// The variance of the outputs over the batch, which a single item does not have.
    Variance,
}

/// A batch with its own weight.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Weighted::class_weights)]
struct Weighted<B: Backend>(Points<B>);

impl<B: Backend> Weighted<B> {
    fn class_weights(&self) -> f64 {
        weight::of_classes(&self.0.targets, &CLASS_WEIGHTS)
    }
}

#[derive(Module, Debug)]
struct Judged<B: Backend> {
    net: Net<B>,
    dropout: Dropout,
    #[module(skip)]
    loss: Loss,
}

impl<B: Backend> Judged<B> {
    fn new(net: Net<B>, loss: Loss) -> Self {
        Self { net, dropout: DropoutConfig::new(0.3).init(), loss }
    }

    fn loss(&self, batch: Points<B>) -> Tensor<B, 1> {
        let device = batch.inputs.device();
        let [items, _] = batch.inputs.dims();
        // Outputs are scaled up so that losses differ.
        let output = self.dropout.forward(self.net.forward(batch.inputs)).mul_scalar(6.0);
        let mean = |weights| {
            let config = CrossEntropyLossConfig::new().with_weights(weights);
            config.init(&device).forward(output.clone(), batch.targets.clone())
        };
        let each = || {
            let chosen = batch.targets.clone().reshape([items, 1]);
            burn::tensor::activation::log_softmax(output.clone(), 1).gather(1, chosen).neg()
        };
        match self.loss {
            Loss::Mean => mean(None),
            Loss::Sum => each().sum(),
            Loss::SumOver(number) => each().sum() / number,
            Loss::ByClass => mean(Some(CLASS_WEIGHTS.to_vec())),
            Loss::Penalized | Loss::Shared => {
                let share = if self.loss == Loss::Shared { batch_share() } else { 1.0 };
                let size = self.net.first_weight().powf_scalar(2.0).sum();
                each().sum() + size.mul_scalar(0.1 * share)
            }
            Loss::RootOfMean => mean(None).sqrt(),
            Loss::Largest => each().max(),
            Loss::Hardest => {
                let sorted = each().reshape([items]).sort_descending(0);
                sorted.narrow(0, 0, items.div_ceil(2)).mean()
            }
            Loss::Contrast => output.clone().matmul(output.clone().transpose()).mean(),
            Loss::Variance => output.clone().var(0).mean() + mean(None),
        }
    }
}

/// A model that learns from batches of one type.
macro_rules! learns_from {
    ($model:ident, $batch:ident, $points:expr) => {
        #[derive(Module, Debug)]
        struct $model<B: Backend> {
            judged: Judged<B>,
        }

        impl<B: AutodiffBackend> TrainStep for $model<B> {
            type Input = $batch<B>;
            type Output = ();

            fn step(&self, batch: $batch<B>) -> TrainOutput<()> {
                TrainOutput::new(self, self.judged.loss($points(batch)).backward(), ())
            }
        }

        impl<B: Backend> InferenceStep for $model<B> {
            type Input = $batch<B>;
            type Output = ();

            fn step(&self, batch: $batch<B>) {
                self.judged.loss($points(batch));
            }
        }
    };
}

learns_from!(Plain, Points, |batch| batch);
learns_from!(ByClass, Weighted, |batch: Weighted<B>| batch.0);

/// Trains on a batch in micro-batches of four. Returns what is known of its gradient, or the error.
macro_rules! train {
    ($model:ident, $net:expr, $loss:expr, $batch:expr, $reduction:expr, $accepted:expr) => {{
        let _lock = random_state();
        let folder = tempfile::tempdir().expect("a folder");
        let batches = Given::loader::<B>(vec![$batch]);
        let none = Given::loader::<<B as AutodiffBackend>::InnerBackend>(Vec::new());
        let training = SupervisedTraining::new(folder.path(), batches, none)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let model = $model { judged: Judged::new($net, $loss) };
        let start = weights::<B, _>(&model);
        let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(4);
        let mut builder = builder.reduction($reduction).quiet();
        let accepted: &[Coupling] = $accepted;
        for coupling in accepted {
            builder = builder.split_although(*coupling);
        }
        let fitted = builder.build(model, SgdConfig::new().init(), 1e-2).fit(training);
        match fitted {
            Ok(fitted) => {
                assert_ne!(weights::<Lazy<Flex>, _>(&fitted.model), start, "it was trained");
                Ok(fitted.split_check)
            }
            Err(error) => {
                let (cause, state) = error.into_parts();
                let state = state.expect("a model");
                assert_eq!(weights::<B, _>(&state.model), start, "nothing was learned: {cause}");
                Err(cause)
            }
        }
    }};
}

fn net() -> Net<B> {
    B::seed(&Default::default(), 5);
    Net::new(&Default::default())
}

/// The result for a loss on a batch whose weight is its number of items.
fn said(loss: Loss, reduction: LossReduction) -> Result<SplitCheck, TrainError> {
    train!(Plain, net(), loss, batch::<B>(12), reduction, &[])
}

#[track_caller]
fn check(loss: Loss, reduction: LossReduction, expected: Option<Coupling>) {
    match (&said(loss, reduction), expected) {
        (Ok(SplitCheck::Proved | SplitCheck::Agrees), None) => {}
        (Err(TrainError::Coupled { coupling, by, parameter, .. }), Some(expected)) => {
            assert_eq!(*coupling, expected, "{loss:?}: {by:?} in {parameter}");
            assert!(by.is_none_or(|by| by > 1e-3), "{loss:?}: {by:?}");
        }
        (found, expected) => panic!("{loss:?}: {found:?} instead of {expected:?}"),
    }
}

#[test]
fn sound_losses_are_split() {
    check(Loss::Mean, LossReduction::Mean, None);
    check(Loss::Sum, LossReduction::Sum, None);
    check(Loss::Shared, LossReduction::Sum, None);
    // What occurs once counts once.
    check(Loss::Penalized, LossReduction::Sum, None);
    // With the weight of the batch or without.
    check(Loss::ByClass, LossReduction::Mean, None);
    let batch = Weighted(batch::<B>(12));
    let said = train!(ByClass, net(), Loss::ByClass, batch, LossReduction::Mean, &[]);
    assert_eq!(said.expect("it is sound"), SplitCheck::Proved);
}

#[test]
fn unsound_losses_are_refused_by_what_they_look_like() {
    check(Loss::Sum, LossReduction::Mean, Some(Coupling::Sum));
    check(Loss::SumOver(8.0), LossReduction::Mean, Some(Coupling::Sum));
    check(Loss::Mean, LossReduction::Sum, Some(Coupling::Mean));
    for loss in [Loss::RootOfMean, Loss::Largest, Loss::Hardest, Loss::Contrast, Loss::Variance] {
        check(loss, LossReduction::Mean, Some(Coupling::Items));
    }
}

#[test]
fn the_operation_in_which_items_meet_is_named() {
    let met = |loss| match said(loss, LossReduction::Mean) {
        Err(error @ TrainError::Coupled { .. }) => {
            let text = error.to_string();
            let TrainError::Coupled { at, .. } = error else { unreachable!("it is one") };
            let at = at.expect("it is proved");
            assert!(text.contains(&at), "{text}");
            at
        }
        other => panic!("{loss:?}: {other:?}"),
    };
    // Each output is multiplied by the others, or compared with the mean.
    let contrast = met(Loss::Contrast);
    assert!(contrast.contains("`float_matmul` behind `judged.net."), "{contrast}");
    let variance = met(Loss::Variance);
    assert!(variance.contains("`float_sub` behind `judged.net."), "{variance}");
    let root = met(Loss::RootOfMean);
    assert!(root.contains("not linear in a sum over items"), "{root}");
}

#[test]
fn a_wrong_weight_is_refused_behind_batch_normalization() {
    let coupled = || Net::<B>::coupled(&Default::default(), true);
    let of = |loss| train!(Plain, coupled(), loss, batch::<B>(12), LossReduction::Mean, &[]);
    let said = of(Loss::Mean).expect("what normalizes over the batch is warned of");
    assert!(!matches!(said, SplitCheck::NotNeeded | SplitCheck::Accepted(_)), "{said:?}");
    let refused = of(Loss::ByClass);
    assert!(matches!(refused, Err(TrainError::Coupled { .. })), "{refused:?}");
}

#[test]
fn what_is_accepted_is_split_all_the_same() {
    let train = |accepted: &[Coupling]| {
        train!(Plain, net(), Loss::RootOfMean, batch::<B>(12), LossReduction::Mean, accepted)
    };
    let said = train(&[Coupling::Items]).expect("that is accepted");
    assert_eq!(said, SplitCheck::Accepted(Coupling::Items));
    let refused = train(&[Coupling::Weights]).expect_err("that is not accepted");
    let text = refused.to_string();
    assert!(text.contains("split_although(Coupling::Items)"), "{text}");
}

#[test]
fn a_weight_that_the_step_does_not_have_is_refused_with_both_numbers() {
    let train = |accepted: &[Coupling]| {
        let batch = Weighted(batch::<B>(12));
        train!(ByClass, net(), Loss::Mean, batch, LossReduction::Mean, accepted)
    };
    let refused = train(&[]).expect_err("all items weigh the same");
    let text = refused.to_string();
    let TrainError::OtherWeights { items, stated, counted } = refused else { panic!("{text}") };
    assert!((items, counted) == (8..12, 1.0 / 3.0) && (stated - counted).abs() > 1e-3, "{text}");
    assert!(text.contains(&format!("weigh {stated:.4} of it by its weight, and 0.3333")), "{text}");
    let said = train(&[Coupling::Weights]).expect("that is accepted");
    assert_eq!(said, SplitCheck::Accepted(Coupling::Weights));
}

#[test]
fn items_that_do_not_differ_establish_nothing() {
    // Nothing is proved of a model that normalizes over the batch.
    let mut alike = batch::<B>(12);
    alike.targets = alike.targets.zeros_like();
    let coupled = Net::<B>::coupled(&Default::default(), true);
    let said = train!(Plain, coupled, Loss::ByClass, alike, LossReduction::Mean, &[]);
    let said = said.expect("with one class every weight is right");
    assert!(matches!(said, SplitCheck::Unknown(_)), "{said:?}");
}

#[test]
fn items_are_chosen_that_differ() {
    // Sorted by class, so that neighbours have the same class.
    let all = batch::<B>(36);
    let rows: Vec<i32> = (0..3).flat_map(|class| (0..12).map(move |at| class + 3 * at)).collect();
    let rows = Tensor::<B, 1, Int>::from_ints(&rows[..], &Default::default());
    let sorted =
        Points { inputs: all.inputs.select(0, rows.clone()), targets: all.targets.select(0, rows) };
    let coupled = Net::<B>::coupled(&Default::default(), true);
    let said = train!(Plain, coupled, Loss::ByClass, sorted, LossReduction::Mean, &[]);
    let coupling = said.expect_err("classes weigh otherwise than the batch says");
    assert!(matches!(coupling, TrainError::Coupled { .. }), "{coupling}");
}

#[test]
fn a_penalty_is_counted_once_for_each_batch() {
    let _lock = random_state();
    let train = |items: usize| {
        let folder = tempfile::tempdir().expect("a folder");
        let batches = Given::loader::<B>(vec![batch(11), batch(7)]);
        let none = Given::loader::<<B as AutodiffBackend>::InnerBackend>(Vec::new());
        let training = SupervisedTraining::new(folder.path(), batches, none)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let mut judged = Judged::new(net(), Loss::Shared);
        judged.dropout = DropoutConfig::new(0.0).init();
        let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(items);
        let builder = builder.reduction(LossReduction::Sum).quiet();
        let learner = builder.build(Plain { judged }, SgdConfig::new().init(), 1e-3);
        weights::<Lazy<Flex>, _>(&learner.fit(training).expect("it fits").model)
    };
    let whole = train(11);
    for items in [1, 4] {
        let split = train(items).concat();
        let apart = split.iter().zip(whole.concat()).map(|(split, whole)| (split - whole).abs());
        let worst = apart.fold(0.0, f32::max);
        assert!(worst < 1e-5, "{worst} in micro-batches of {items}");
    }
}
