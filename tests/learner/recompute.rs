//! Tensors are recomputed where a batch does not fit or must not be split, and the model that
//! comes of it is the same to the bit.

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Gelu, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::trace::RecordError;
use firebox::{
    Bytes, Coupling, Lazy, Learner, MicroBatch, PlanReport, RecomputePolicy, Sizing, TrainError,
    is_rehearsal,
};
use firebox_testing::task::{random_state, weights};

type B = Autodiff<Lazy<Flex>>;

const WIDTH: usize = 48;
/// Rows of a batch, in one item or in sixteen.
const ROWS: usize = 2048;

/// Sequences of rows of numbers.
#[derive(Clone, Debug, MicroBatch)]
struct Rows<B: Backend> {
    /// `[items, length, WIDTH]`
    rows: Tensor<B, 3>,
}

#[derive(Clone)]
struct RowBatcher {
    /// Rows of an item. Items with even numbers have a quarter of it, if `varies`.
    length: usize,
    varies: bool,
}

impl<B: Backend> Batcher<B, usize, Rows<B>> for RowBatcher {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Rows<B> {
        let is_short = self.varies && items[0].is_multiple_of(2);
        let length = if is_short { self.length / 4 } else { self.length };
        let number = |item: &usize, at: usize| {
            let number = ((item * 31 + at * 7) % 101) as f32 / 50.0 - 1.0;
            number * (1.0 + *item as f32)
        };
        let numbers = |item| (0..length * WIDTH).map(move |at| number(item, at));
        let numbers: Vec<f32> = items.iter().flat_map(numbers).collect();
        let data = TensorData::new(numbers, [items.len(), length, WIDTH]);
        Rows { rows: Tensor::from_data(data, device) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Each item has a loss of its own.
    Apart,
    /// The same, and items differ in length: short, long, short.
    Lengths,
    /// Items are compared with each other.
    Contrast,
    /// Normalizes over the batch.
    Statistics,
    /// Reads its activations in the middle, and its loss before the backward pass.
    Reads,
    /// Reads its loss where it learns, and not in rehearsals.
    Logs,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    wide: Linear<B>,
    narrow: Linear<B>,
    activation: Gelu,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Tower<B: Backend> {
    blocks: Vec<Block<B>>,
    over_batch: Option<BatchNorm<B>>,
    #[module(skip)]
    kind: Kind,
}

impl<B: Backend> Tower<B> {
    fn new(kind: Kind, device: &B::Device) -> Self {
        let block = |_| Block {
            norm: LayerNormConfig::new(WIDTH).init(device),
            wide: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            narrow: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
            activation: Gelu::new(),
            dropout: DropoutConfig::new(0.2).init(),
        };
        let over_batch =
            (kind == Kind::Statistics).then(|| BatchNormConfig::new(WIDTH).init(device));
        Self { blocks: (0..8).map(block).collect(), over_batch, kind }
    }

    fn loss(&self, batch: Rows<B>) -> Tensor<B, 1> {
        let mut x = batch.rows;
        for (at, block) in self.blocks.iter().enumerate() {
            if at == 4 && self.kind == Kind::Reads {
                let largest: f32 = x.clone().abs().max().into_scalar().elem();
                x = x / largest.max(1.0);
            }
            let wide = block.activation.forward(block.wide.forward(block.norm.forward(x.clone())));
            x = x + block.narrow.forward(block.dropout.forward(wide));
        }
        if let Some(norm) = &self.over_batch {
            x = norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        }
        let outputs: Tensor<B, 2> = x.mean_dim(1).squeeze_dim(1);
        match self.kind {
            Kind::Apart | Kind::Lengths | Kind::Statistics => outputs.powf_scalar(2.0).mean(),
            Kind::Reads => {
                let loss = outputs.powf_scalar(2.0).mean();
                let value: f32 = loss.clone().into_scalar().elem();
                assert!(value.is_finite(), "the loss is a number");
                loss
            }
            Kind::Logs => {
                let loss = outputs.powf_scalar(2.0).mean();
                if !is_rehearsal() {
                    let value: f32 = loss.clone().into_scalar().elem();
                    assert!(value > 0.0, "it is not a guess");
                }
                loss
            }
            Kind::Contrast => outputs.clone().matmul(outputs.transpose()).mean(),
        }
    }
}

impl<B: AutodiffBackend> TrainStep for Tower<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

impl<B: Backend> InferenceStep for Tower<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) {
        self.loss(batch);
    }
}

/// The weights after two epochs of a few batches, the plan of the first batch, and what was
/// predicted.
type Trained = Result<(Vec<Vec<f32>>, PlanReport, Bytes), TrainError>;

fn train(kind: Kind, batch_size: usize, memory: Bytes, policy: RecomputePolicy) -> Trained {
    train_in(kind, (batch_size, Sizing::Even), memory, policy)
}

fn train_in(
    kind: Kind,
    (batch_size, sizing): (usize, Sizing),
    memory: Bytes,
    policy: RecomputePolicy,
) -> Trained {
    let _lock = random_state();
    let device = Default::default();
    B::seed(&device, 11);
    let model = Tower::<B>::new(kind, &device);
    let folder = tempfile::tempdir().expect("a folder");
    let items = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let batcher = RowBatcher { length: ROWS / batch_size, varies: kind == Kind::Lengths };
    let loader = DataLoaderBuilder::new(batcher.clone())
        .batch_size(batch_size)
        .build(items(if batch_size == 1 { 3 } else { 17 }));
    let none = DataLoaderBuilder::new(batcher).batch_size(batch_size).build(items(0));
    let training = SupervisedTraining::new(folder.path(), loader, none)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(memory).recompute(policy).quiet();
    let builder = builder.sizing(sizing);
    match builder.build(model, AdamConfig::new().init(), 1e-2).fit(training) {
        Ok(fitted) => {
            let predicted = fitted.memory.expect("it was trained").predicted;
            let report = fitted.report.expect("it was trained");
            Ok((weights::<Lazy<Flex>, _>(&fitted.model), report, predicted))
        }
        Err(error) => Err(error.into_parts().0),
    }
}

fn unlimited(kind: Kind, batch_size: usize) -> (Vec<Vec<f32>>, Bytes) {
    let (weights, report, predicted) =
        train(kind, batch_size, Bytes::gib(8), RecomputePolicy::default()).expect("it fits");
    assert!(report.plan.is_whole() && report.recomputed.is_none(), "{report}");
    (weights, predicted)
}

#[track_caller]
fn is_recomputed(report: &PlanReport) {
    let again = report.recomputed.expect("it computes tensors again");
    assert!(again.repeats > 0 && again.operations > again.repeats, "{again}");
    assert_eq!(again.packed > 0, again.to_string().contains(" masks packed"), "{again}");
    assert!(again.overhead > 0.0 && again.overhead <= 0.3, "{again}");
    assert!(report.line().contains(" operations again"), "{}", report.line());
    assert!(report.to_string().contains("recomputed"), "{report}");
}

#[test]
fn one_item_that_does_not_fit_is_trained_all_the_same() {
    let (weights, needed) = unlimited(Kind::Apart, 1);
    let mut packed = 0;
    for share in [0.8, 0.65] {
        let budget = needed.scale(share);
        let (same, report, predicted) =
            train(Kind::Apart, 1, budget, RecomputePolicy::default()).expect("it fits");
        is_recomputed(&report);
        packed += report.recomputed.map_or(0, |again| again.packed);
        assert!(predicted <= budget, "{predicted} of {budget}");
        assert!(same == weights, "the same bits within {share}");
    }
    assert!(packed > 0, "masks are packed");
}

#[test]
fn a_step_that_reads_values_is_not_recomputed() {
    let (_, needed) = unlimited(Kind::Reads, 1);
    let refused = train(Kind::Reads, 1, needed.scale(0.7), RecomputePolicy::default());
    let refused = refused.expect_err("it does not fit as it is");
    assert!(matches!(refused, TrainError::Plan { .. }), "{refused}");
}

#[test]
fn a_step_that_only_reads_where_it_learns_stays_in_the_budget() {
    let (_, needed) = unlimited(Kind::Logs, 1);
    let refused = train(Kind::Logs, 1, needed.scale(0.7), RecomputePolicy::default());
    // What comes before the read must run as it was recorded.
    let refused = refused.expect_err("it does not fit as it is");
    assert!(matches!(refused, TrainError::Record(RecordError::ReadTooLarge { .. })), "{refused}");
}

#[test]
fn a_longer_item_is_trained_after_a_short_one_that_fits() {
    let (weights, _) = unlimited(Kind::Lengths, 1);
    // The prediction of a run with several lengths counts what recordings of others may keep.
    let (_, of_long) = unlimited(Kind::Apart, 1);
    let budget = of_long.scale(0.7);
    let refused = train(Kind::Lengths, 1, budget, RecomputePolicy::never());
    let refused = refused.expect_err("the long item does not fit as it is");
    assert!(matches!(refused, TrainError::GrewTooLarge { .. }), "{refused}");
    let (same, report, predicted) =
        train(Kind::Lengths, 1, budget, RecomputePolicy::default()).expect("it fits");
    assert!(report.recomputed.is_none(), "the first item is short: {report}");
    assert!(predicted <= budget, "{predicted} of {budget}");
    assert!(same == weights, "the same bits");
}

#[test]
fn batches_that_must_not_be_split_stay_whole() {
    // The second batch of an epoch has one item, which fits as it is.
    let (weights, needed) = unlimited(Kind::Contrast, 16);
    let budget = needed.scale(0.7);
    let (same, report, predicted) =
        train(Kind::Contrast, 16, budget, RecomputePolicy::default()).expect("it fits");
    assert!(predicted <= budget, "{predicted} of {budget}");
    assert!(same == weights, "the same bits");
    is_recomputed(&report);
    assert!(report.plan.is_whole(), "{report}");
    let met = report.items_meet.as_ref().expect("it is proved");
    assert!(met.contains("`float_matmul` behind `blocks.7.narrow`"), "{met}");
    assert!(
        report.line().contains(met) && report.to_string().contains("items meet in"),
        "{report}"
    );
    let refused = train(Kind::Contrast, 16, budget, RecomputePolicy::never());
    let refused = refused.expect_err("its items are coupled");
    assert!(matches!(refused, TrainError::Coupled { coupling: Coupling::Items, .. }), "{refused}");
    let refused = train(Kind::Contrast, 16, needed.scale(0.3), RecomputePolicy::default());
    let refused = refused.expect_err("the whole batch needs more");
    assert!(matches!(refused, TrainError::Coupled { .. }), "{refused}");
}

#[test]
fn batches_with_statistics_are_rather_kept_whole() {
    let (weights, needed) = unlimited(Kind::Statistics, 16);
    let budget = needed.scale(0.7);
    let (same, report, predicted) =
        train(Kind::Statistics, 16, budget, RecomputePolicy::default()).expect("it fits");
    is_recomputed(&report);
    assert!(report.plan.is_whole(), "{report}");
    assert!(predicted <= budget, "{predicted} of {budget}");
    assert!(same == weights, "the same bits");
    let (_, report, _) =
        train(Kind::Statistics, 16, budget, RecomputePolicy::never()).expect("it is split");
    assert!(!report.plan.is_whole() && report.recomputed.is_none(), "{report}");
}

#[test]
fn batches_that_may_be_split_are_split() {
    let (_, needed) = unlimited(Kind::Apart, 16);
    let budget = needed.scale(0.7);
    let (_, report, _) =
        train(Kind::Apart, 16, budget, RecomputePolicy::default()).expect("it is split");
    assert!(!report.plan.is_whole() && report.recomputed.is_none(), "{report}");
}

#[test]
fn batches_are_not_split_if_that_is_asked_for() {
    let (weights, needed) = unlimited(Kind::Apart, 16);
    let budget = needed.scale(0.7);
    let whole = |policy| train_in(Kind::Apart, (16, Sizing::Whole), budget, policy);
    let (same, report, predicted) = whole(RecomputePolicy::default()).expect("it fits");
    is_recomputed(&report);
    assert!(report.plan.is_whole(), "{report}");
    assert!(predicted <= budget, "{predicted} of {budget}");
    assert!(same == weights, "the same bits");
    let refused = whole(RecomputePolicy::never()).expect_err("it is not split").to_string();
    assert!(refused.contains("a batch of 16 items does not fit, and is not split"), "{refused}");
}

#[test]
fn what_does_not_fit_either_way_says_how_close_it_came() {
    let (_, needed) = unlimited(Kind::Apart, 1);
    let told = |share, policy| {
        train(Kind::Apart, 1, needed.scale(share), policy).expect_err("too little").to_string()
    };
    let never = told(0.6, RecomputePolicy::never());
    assert!(!never.contains("again was tried"), "{never}");
    let too_little = told(0.15, RecomputePolicy::default());
    assert!(too_little.contains("again was tried: the least that was found is"), "{too_little}");
    let too_slow = told(0.6, RecomputePolicy::if_needed().at_most(0.001));
    assert!(too_slow.contains("% more time"), "{too_slow}");
}
