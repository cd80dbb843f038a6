//! Tests random models with random losses, split at random: the gradient equals the whole batch's,
//! or training refuses.
//!
//! Values have 64 bits, and equal gradients agree to seven digits, because burn's autodiff divides
//! by a number with a 32-bit reciprocal.
//!
//! Runs 200 fixed cases. Other cases run with
//! `FIREBOX_CASES=10000 FIREBOX_SEED=7 cargo test --workspace --release --test splits`.

mod model;
mod task;

use std::collections::BTreeMap;
use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, set_default_dtypes};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{SupervisedTraining, TrainStep};
use firebox::{Bytes, Coupling, Lazy, Learner, LossReduction, MicroBatch, SplitCheck, TrainError};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use crate::model::{Kind, Model, Place};
use crate::task::{Batch, By, Judge, Loss, Size, Weight};

type B = Autodiff<Lazy<Flex>>;
type Inner = <B as AutodiffBackend>::InnerBackend;

/// Allowed difference, relative to the largest gradient of a parameter among the whole batch and
/// its items.
const TOLERANCE: f64 = 1e-7;
/// Differences above this mean that items are coupled. Between the two limits a case is unclear:
/// rounding that a model magnifies, or neither.
const COUPLED: f64 = 1e-3;

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    tokens: bool,
    places: Vec<Place>,
    judge: Judge,
    weight: Weight,
    reduction: LossReduction,
    /// Loader batches of one optimizer step.
    batches: Vec<Size>,
    micro_batch: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let kinds = vec![
        Kind::Linear,
        Kind::Conv1d,
        Kind::Conv2d,
        Kind::Attention,
        Kind::Lstm,
        Kind::Gru,
        Kind::LayerNorm,
        Kind::RmsNorm,
        Kind::GroupNorm,
        Kind::InstanceNorm,
        Kind::Gelu,
        Kind::Tanh,
    ];
    let place = (prop::sample::select(kinds), any::<bool>(), 0..4, 0..5).prop_map(
        |(kind, residual, again, frozen)| Place {
            kind,
            residual,
            again: again == 0,
            trained: frozen > 0,
        },
    );
    let by = || prop::sample::select(vec![By::Mean, By::Mean, By::Sum, By::BatchMean]);
    let of_burn = prop_oneof![
        any::<[bool; 3]>().prop_map(|[padding, weights, smoothing]| Loss::CrossEntropy {
            padding,
            weights,
            smoothing
        }),
        by().prop_map(Loss::Mse),
        by().prop_map(Loss::Huber),
        by().prop_map(Loss::SmoothL1),
        by().prop_map(Loss::Lp),
        by().prop_map(Loss::Poisson),
        by().prop_map(Loss::KlDiv),
        any::<[bool; 2]>().prop_map(|[weights, smoothing]| Loss::Bce { weights, smoothing }),
        by().prop_map(Loss::Cosine),
    ];
    let of_users = prop::sample::select(vec![
        Loss::RealTokens,
        Loss::ItemByItem,
        Loss::Root,
        Loss::Largest,
        Loss::Hardest,
        Loss::Contrast,
        Loss::Spread,
        Loss::Penalized,
        Loss::Dice,
        Loss::Squared,
        Loss::Centered,
    ]);
    let judge = (prop_oneof![3 => of_burn, 2 => of_users], any::<bool>())
        .prop_map(|(loss, each_token)| Judge { loss, each_token });
    let weights =
        prop::sample::select(vec![Weight::Items, Weight::Items, Weight::Tokens, Weight::Classes]);
    let reductions = prop::sample::select(vec![
        LossReduction::Mean,
        LossReduction::Mean,
        LossReduction::Mean,
        LossReduction::Sum,
    ]);
    let sizes = (prop::collection::vec(2usize..12, 1..=3), 1usize..5, any::<bool>()).prop_map(
        |(items, length, padded)| -> Vec<Size> {
            items.into_iter().map(|items| Size { items, length, padded }).collect()
        },
    );
    let places = prop::collection::vec(place, 0..4);
    (any::<u64>(), any::<bool>(), places, judge, weights, reductions, sizes, 1usize..12).prop_map(
        |(seed, tokens, places, judge, weight, reduction, batches, micro_batch)| Case {
            seed,
            tokens,
            places,
            judge,
            weight,
            reduction,
            batches,
            micro_batch,
        },
    )
}

/// A vector per parameter, in the order of the model.
type Gradient = Vec<Vec<f64>>;

/// Values of the parameters.
fn values<B: Backend, M: Module<B>>(model: &M) -> Gradient {
    struct Collect(Gradient);

    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data().iter().collect());
        }
    }

    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

/// Gradient of some items of a batch as burn computes it, and the weight that they report.
fn gradient(model: &Model<B>, batch: &Batch<B>, range: Range<usize>) -> (Gradient, f64) {
    struct Collect(GradientsParams, Gradient);

    impl ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let zeros = || vec![0.0; param.val().shape().num_elements()];
            let gradient = self.0.remove::<Inner, D>(param.id);
            self.1.push(gradient.map_or_else(zeros, |grad| grad.into_data().iter().collect()));
        }
    }

    let part = batch.range(range);
    let weight = part.weight();
    let mut collect = Collect(model.step(part).grads, Vec::new());
    model.visit(&mut collect);
    (collect.1, weight)
}

/// Gradient of the parts together. `None` if nothing in them counts.
fn joined(parts: &[(Gradient, f64)], reduction: LossReduction) -> Option<Gradient> {
    let counting =
        parts.iter().filter(|(_, weight)| reduction == LossReduction::Sum || *weight != 0.0);
    let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let mut sum: Option<Gradient> = None;
    for (gradient, weight) in counting {
        let share = if reduction == LossReduction::Sum { 1.0 } else { weight / total };
        let sum = sum.get_or_insert_with(|| zeros_like(gradient));
        for (sum, values) in sum.iter_mut().zip(gradient) {
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += share * value);
        }
    }
    sum
}

fn zeros_like(gradient: &Gradient) -> Gradient {
    gradient.iter().map(|values| vec![0.0; values.len()]).collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

fn is_finite(gradient: &Gradient) -> bool {
    gradient.iter().flatten().all(|value| value.is_finite())
}

/// The largest difference between gradients of a parameter, relative to `scales`. A value that is
/// not a number counts as infinitely different.
fn apart(a: &Gradient, b: &Gradient, scales: &[f64]) -> f64 {
    let most = scales.iter().copied().fold(1.0, f64::max);
    let of = |at: usize| {
        let difference = norm(a[at].iter().zip(&b[at]).map(|(a, b)| a - b));
        // A gradient of pure rounding, such as that of a bias before a normalization, tells
        // nothing.
        let relative = difference / scales[at].max(1e-6 * most);
        if relative.is_nan() { f64::INFINITY } else { relative }
    };
    (0..scales.len()).map(of).fold(0.0, f64::max)
}

/// What burn's gradients say about a case.
struct Truth {
    /// The gradient that training must use: that of the loader batches, each taken whole.
    expected: Option<Gradient>,
    /// The same by the weights that batches state, which count where nothing is proved.
    stated: Option<Gradient>,
    /// The gradient of the first batch, which is trained on if nothing weighs anything.
    first: Gradient,
    /// The difference between the gradient of a batch and that of its items taken one by one.
    coupled: f64,
    scales: Vec<f64>,
}

impl Truth {
    fn of(case: &Case, model: &Model<B>, batches: &[Batch<B>]) -> Self {
        let whole =
            |batch: &Batch<B>| gradient(model, batch, 0..batch.items().expect("they agree"));
        let wholes: Vec<(Gradient, f64)> = batches.iter().map(whole).collect();
        let mut scales = vec![0.0f64; wholes[0].0.len()];
        let mut coupled = Vec::new();
        for (batch, whole) in batches.iter().zip(&wholes) {
            let items = batch.items().expect("they agree");
            let single = |item| gradient(model, batch, item..item + 1);
            let singles: Vec<(Gradient, f64)> = (0..items).map(single).collect();
            for (gradient, _) in singles.iter().chain([whole]).filter(|(one, _)| is_finite(one)) {
                for (scale, values) in scales.iter_mut().zip(gradient) {
                    *scale = scale.max(norm(values.iter().copied()));
                }
            }
            // A batch of zero weight is left out, whatever its gradient is.
            if whole.1 != 0.0 || case.reduction == LossReduction::Sum {
                coupled.push((whole.0.clone(), joined(&singles, case.reduction)));
            }
        }
        let coupled = coupled.into_iter().map(|(whole, singles)| {
            apart(&whole, &singles.unwrap_or_else(|| zeros_like(&whole)), &scales)
        });
        let coupled = coupled.fold(0.0, f64::max);
        let stated = joined(&wholes, case.reduction);
        // Batches that are put together weigh what their loss divides by, unless the first one for
        // which that is not its items says something else.
        let says = |batch: &Batch<B>, weight: f64| weight != batch.items().expect("agree") as f64;
        let divides_by = case.judge.loss.divides_by().filter(|by| {
            let decides = batches.iter().find_map(|batch| {
                let is_stated = says(batch, batch.weight());
                (is_stated || says(batch, batch.saying(*by).weight())).then_some(!is_stated)
            });
            batches.len() > 1 && case.reduction == LossReduction::Mean && decides == Some(true)
        });
        let expected = match divides_by {
            Some(by) => {
                let weighed = batches.iter().zip(wholes.iter().cloned());
                let weighed = weighed.map(|(batch, (of, _))| (of, batch.saying(by).weight()));
                joined(&weighed.collect::<Vec<_>>(), case.reduction)
            }
            None => stated.clone(),
        };
        Self { expected, stated, first: wholes[0].0.clone(), coupled, scales }
    }
}

struct Given(Vec<Batch<B>>);

struct GivenIterator(std::vec::IntoIter<Batch<B>>);

impl Iterator for GivenIterator {
    type Item = Batch<B>;

    fn next(&mut self) -> Option<Batch<B>> {
        self.0.next()
    }
}

impl DataLoaderIterator<Batch<B>> for GivenIterator {
    fn progress(&self) -> Progress {
        Progress::new(0, 1)
    }
}

impl DataLoader<B, Batch<B>> for Given {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch<B>> + 'a> {
        Box::new(GivenIterator(self.0.clone().into_iter()))
    }

    fn num_items(&self) -> usize {
        self.0.len()
    }

    fn to_device(&self, _device: &FlexDevice) -> std::sync::Arc<dyn DataLoader<B, Batch<B>>> {
        std::sync::Arc::new(Self(self.0.clone()))
    }

    fn slice(&self, start: usize, end: usize) -> std::sync::Arc<dyn DataLoader<B, Batch<B>>> {
        std::sync::Arc::new(Self(self.0[start..end].to_vec()))
    }
}

type FlexDevice = <B as burn::tensor::backend::BackendTypes>::Device;

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// Nothing can be said: burn's own gradient is not a number, or it is unclear whether the items
    /// are coupled.
    Unclear,
    /// Nothing in the batches counts.
    Weightless,
    Equal,
    /// The gradient is equal, and the Learner says that it does not know.
    EqualAndUnknown,
    /// A part outside the compared ones has a gradient that is not a number, for example a mean
    /// over padding alone.
    NoNumber,
    /// The check missed the coupling: a loss that picks items picks among the compared ones as if
    /// it did not, or they are padded alike.
    Missed,
    /// The gradient differs, and the Learner says that it does not know.
    Said,
    /// Training refused the case.
    Refused(u8),
}

fn run(case: &Case) -> Result<End, TestCaseError> {
    let device = FlexDevice::default();
    B::seed(&device, case.seed);
    let model = Model::<B>::new(case.tokens, &case.places, case.judge, &device);
    let said = (case.weight, case.judge.each_token);
    let batches = case.batches.iter().enumerate();
    let batch = |(at, size): (usize, &Size)| {
        Batch::new(*size, case.seed.wrapping_add(at as u64), said, &device)
    };
    let batches: Vec<Batch<B>> = batches.map(batch).collect();
    let truth = Truth::of(case, &model, &batches);
    let is_clear = truth.coupled < TOLERANCE || truth.coupled > COUPLED;
    if truth.expected.as_ref().is_some_and(|expected| !is_finite(expected)) || !is_clear {
        return Ok(End::Unclear);
    }

    let before = values::<B, _>(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let none = burn::data::dataloader::DataLoaderBuilder::new(NoBatches);
    let training = SupervisedTraining::new(
        folder.path(),
        std::sync::Arc::new(Given(batches.clone())),
        none.batch_size(1).build(burn::data::dataset::InMemDataset::new(Vec::new())),
    );
    let mut training =
        training.with_application_logger(None).renderer(CliMetricsRenderer::new()).num_epochs(1);
    if batches.len() > 1 {
        training = training.grads_accumulation(batches.len());
    }
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .micro_batch(case.micro_batch)
        .reduction(case.reduction)
        .quiet()
        .build(model, SgdConfig::new().init(), 1.0)
        .fit(training);
    let picks = matches!(case.judge.loss, Loss::Hardest | Loss::Largest);
    let fitted = match fitted.map_err(|error| error.into_parts().0) {
        Ok(fitted) => fitted,
        Err(TrainError::Coupled { coupling, by, parameter, .. }) => {
            // A loss that picks items may pick in a batch as if it did not, and is refused for its
            // effect on others. What is proved shows where gradients are zero, too, and where items
            // are alike.
            let nothing = truth.expected.iter().flatten().flatten().all(|value| *value == 0.0);
            let couples = matches!(
                case.judge.loss,
                Loss::Root
                    | Loss::Contrast
                    | Loss::Spread
                    | Loss::Dice
                    | Loss::Squared
                    | Loss::Centered
            );
            prop_assert!(
                truth.coupled > COUPLED || picks || by.is_none() && (nothing || couples),
                "a false alarm: {coupling:?} by {by:?} in {parameter}, and items differ by {}",
                truth.coupled
            );
            return Ok(End::Refused(number(coupling)));
        }
        // A weight that the loss does not have.
        Err(TrainError::OtherWeights { .. }) => {
            let is_items = case.weight == Weight::Items;
            prop_assert!(!is_items, "a false alarm: items differ by {}", truth.coupled);
            return Ok(End::Refused(number(Coupling::Weights)));
        }
        Err(TrainError::Weight { .. }) if truth.expected.is_none() => return Ok(End::Weightless),
        Err(cause) => return Err(TestCaseError::fail(cause.to_string())),
    };
    let after = values::<Inner, _>(&fitted.model);
    let steps = before.iter().zip(&after);
    let steps = steps.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect());
    let steps: Gradient = steps.collect();
    let Some(expected) = truth.expected else {
        // The batch takes part with the gradient of its own loss.
        let by = apart(&steps, &truth.first, &truth.scales);
        prop_assert!(batches.len() > 1 || by < TOLERANCE, "a batch without weight differs by {by}");
        return Ok(End::Weightless);
    };
    if truth.coupled.is_infinite() && !is_finite(&steps) {
        return Ok(End::NoNumber);
    }
    let mut by = apart(&steps, &expected, &truth.scales);
    if !matches!(fitted.split_check, SplitCheck::Proved | SplitCheck::NotNeeded) {
        by = truth.stated.map_or(by, |stated| by.min(apart(&steps, &stated, &truth.scales)));
    }
    if by > TOLERANCE && matches!(fitted.split_check, SplitCheck::Unknown(_)) {
        return Ok(End::Said);
    }
    if by > TOLERANCE && picks {
        return Ok(End::Missed);
    }
    let is_known = !matches!(fitted.split_check, SplitCheck::Unknown(_));
    prop_assert!(by < TOLERANCE, "silently different: by {by}; items differ by {}", truth.coupled);
    Ok(if is_known { End::Equal } else { End::EqualAndUnknown })
}

fn number(coupling: Coupling) -> u8 {
    match coupling {
        Coupling::Sum => 0,
        Coupling::Mean => 1,
        Coupling::Weights => 2,
        Coupling::Penalty => 3,
        _ => 4,
    }
}

#[derive(Clone)]
struct NoBatches;

impl burn::data::dataloader::batcher::Batcher<Inner, u8, Batch<Inner>> for NoBatches {
    fn batch(&self, _items: Vec<u8>, _device: &FlexDevice) -> Batch<Inner> {
        unreachable!("there are no items")
    }
}

fn setting(name: &str, default: u64) -> u64 {
    let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{name} is a number"));
    std::env::var(name).map_or(default, number)
}

#[test]
fn a_split_gives_the_gradient_of_the_batch_or_is_refused() {
    set_default_dtypes::<Lazy<Flex>>(&FlexDevice::default(), DType::F64, DType::I32)
        .expect("no tensor was made before");
    let wanted = setting("FIREBOX_CASES", 200);
    let config = Config { cases: wanted as u32, failure_persistence: None, ..Config::default() };
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&setting("FIREBOX_SEED", 1).to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let ends = std::cell::RefCell::new(BTreeMap::<End, usize>::new());
    let result = TestRunner::new_with_rng(config, rng).run(&cases(), |case| {
        *ends.borrow_mut().entry(run(&case)?).or_default() += 1;
        Ok(())
    });
    let ends = ends.into_inner();
    println!("{wanted} cases ended as {ends:?}");
    if let Err(TestError::Fail(why, case)) = &result {
        panic!("{why}\n{case:#?}");
    }
    result.expect("all cases were run");
    let share = |end| *ends.get(&end).unwrap_or(&0) as f64 / wanted as f64;
    assert!(share(End::Equal) > 0.3, "most cases can be split: {ends:?}");
    assert!(share(End::EqualAndUnknown) < 0.05, "few sound losses are not known: {ends:?}");
    assert!(share(End::Unclear) < 0.1, "few cases are unclear: {ends:?}");
    assert!(share(End::NoNumber) < 0.02, "few are no number: {ends:?}");
    assert!(share(End::Said) <= 0.005, "few are trained on without an answer: {ends:?}");
    assert!(share(End::Missed) <= 0.005, "few are missed: {ends:?}");
    for coupling in [0, 1, 2, 4] {
        assert!(share(End::Refused(coupling)) > 0.0, "{coupling} is refused: {ends:?}");
    }
}
