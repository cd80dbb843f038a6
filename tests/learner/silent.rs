//! Couplings that neither the loss nor the first batch shows: what a step does to its gradients, a
//! part that weighs nothing, and a loss that changes while it is trained.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::{Autodiff, Flex};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::train::{ClipGlobalNorm, GradientHook};
use firebox::{
    Bytes, Coupling, Lazy, Learner, MicroBatch, SplitCheck, TrainError, clip_global_norm,
    on_gradients,
};
use firebox_testing::task::{Given, random_state, weights};

use crate::closeness::{Values, compare, difference};

type B = Autodiff<Lazy<Flex>>;

/// What a step does to its gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Nothing,
    /// Scales each by a fixed number.
    Scales,
    /// Clips them by their global norm, on the device.
    Clips,
    /// The same, with the norm read by the host.
    Reads,
    /// Keeps their signs.
    Signs,
}

/// How a loss combines the losses of its rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    Mean,
    /// A sum over the rows that are labelled, and from the second batch on over all rows, divided
    /// by the number of those that are labelled, at least one.
    Detection,
    /// Over rows whose target is above the threshold, which later batches have fewer of.
    Above,
    /// The root of a mean, from the third batch on.
    RootLater,
}

#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Rows::weight_of)]
struct Rows<B: Backend> {
    rows: Tensor<B, 2>,
    targets: Tensor<B, 2>,
    labelled: Tensor<B, 2>,
    #[micro_batch(shared)]
    number: usize,
    #[micro_batch(shared)]
    by_label: bool,
}

impl<B: Backend> Rows<B> {
    fn weight_of(&self) -> f64 {
        match self.by_label {
            true => self.labelled.clone().sum().into_scalar().elem(),
            false => self.rows.dims()[0] as f64,
        }
    }

    fn new(number: usize, items: usize, labelled: impl Fn(usize) -> bool) -> Self {
        let device = Default::default();
        let wave = |n: usize| (n * 7919 % 1013) as f32 / 500.0 - 1.0;
        let tensor = |values: Vec<f32>| {
            let width = values.len() / items;
            Tensor::from_data(TensorData::new(values, [items, width]), &device)
        };
        let at = number * items;
        Self {
            rows: tensor((0..items * 3).map(|n| wave(at * 3 + n)).collect()),
            targets: tensor((0..items).map(|n| 3.0 * wave(at + 7 * n)).collect()),
            labelled: tensor((0..items).map(|n| f32::from(u8::from(labelled(n)))).collect()),
            number,
            by_label: false,
        }
    }
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    last: Linear<B>,
    #[module(skip)]
    change: Change,
    #[module(skip)]
    loss: Loss,
}

impl<B: Backend> Net<B> {
    fn new(change: Change, loss: Loss) -> Self {
        let device = Default::default();
        B::seed(&device, 11);
        let layer = |from, to| LinearConfig::new(from, to).init(&device);
        Self { first: layer(3, 8), last: layer(8, 1), change, loss }
    }

    fn loss(&self, batch: Rows<B>) -> Tensor<B, 1> {
        let hidden = burn::tensor::activation::relu(self.first.forward(batch.rows));
        let each = (self.last.forward(hidden) - batch.targets.clone()).square();
        match self.loss {
            Loss::Mean => each.mean(),
            Loss::Detection => {
                let positives = batch.labelled.clone().sum().clamp_min(1.0);
                let of_all = each.clone().sum().mul_scalar(f32::from(u8::from(batch.number > 0)));
                ((each * batch.labelled).sum() + of_all) / positives
            }
            Loss::Above => {
                let above = each.clone().greater_elem(if batch.number < 2 { 0.0 } else { 2.0 });
                let above = above.float();
                (each * above.clone()).sum() / above.sum().clamp_min(1.0)
            }
            Loss::RootLater if batch.number < 2 => each.mean(),
            Loss::RootLater => each.mean().sqrt(),
        }
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) -> TrainOutput<()> {
        struct Each<'a, F> {
            from: GradientsParams,
            to: GradientsParams,
            change: &'a F,
        }

        impl<B: AutodiffBackend, F> burn::module::ModuleVisitor<B> for Each<'_, F>
        where
            F: Fn(Tensor<B::InnerBackend, 1>) -> Tensor<B::InnerBackend, 1>,
        {
            fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<B, D>>) {
                let Some(grad) = self.from.remove::<B::InnerBackend, D>(param.id) else { return };
                let shape = grad.shape();
                let grad = (self.change)(grad.flatten::<1>(0, D - 1)).reshape(shape);
                self.to.register::<B::InnerBackend, D>(param.id, grad);
            }
        }

        fn each<B: AutodiffBackend>(
            model: &Net<B>,
            from: GradientsParams,
            change: impl Fn(Tensor<B::InnerBackend, 1>) -> Tensor<B::InnerBackend, 1>,
        ) -> GradientsParams {
            let mut each = Each { from, to: GradientsParams::new(), change: &change };
            model.visit(&mut each);
            each.to
        }

        let mut output = TrainOutput::new(self, self.loss(batch).backward(), ());
        let grads = output.grads;
        output.grads = match self.change {
            Change::Nothing => grads,
            Change::Scales => each(self, grads, |grad| grad * 0.5),
            Change::Clips => ClipGlobalNorm::new(30.0).apply(self, grads),
            Change::Reads => {
                let bias = self.last.bias.as_ref().expect("it has one");
                let norm = bias.val().inner();
                let grad = grads.get::<B::InnerBackend, 1>(bias.id).unwrap_or(norm);
                let norm: f32 = grad.square().sum().sqrt().into_scalar().elem();
                match norm > 30.0 {
                    true => each(self, grads, |grad| grad * (30.0 / norm)),
                    false => grads,
                }
            }
            Change::Signs => each(self, grads, |grad| grad.sign()),
        };
        output
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, _: Rows<B>) {}
}

struct Trained {
    learned: Values,
    check: SplitCheck,
}

fn train(
    (change, loss): (Change, Loss),
    optimizer: impl Optimizer<Net<B>, B> + 'static,
    batches: Vec<Rows<B>>,
    micro_batch: Option<usize>,
    accepted: Option<Coupling>,
) -> Result<Trained, TrainError> {
    let _lock = random_state();
    let model = Net::<B>::new(change, loss);
    let before = weights::<B, _>(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = vec![Rows::<Lazy<Flex>>::new(0, 4, |_| true)];
    let training =
        SupervisedTraining::new(folder.path(), Given::loader(batches), Given::loader(valid))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    if let Some(coupling) = accepted {
        builder = builder.split_although(coupling);
    }
    let fitted = builder.build(model, optimizer, 0.1).fit(training);
    let fitted = fitted.map_err(|error| error.into_parts().0)?;
    let learned = difference(&before, &weights::<Lazy<Flex>, _>(&fitted.model));
    Ok(Trained { learned, check: fitted.split_check })
}

fn sgd() -> impl Optimizer<Net<B>, B> {
    SgdConfig::new().init::<B, Net<B>>()
}

fn one() -> Vec<Rows<B>> {
    vec![Rows::new(0, 60, |item| item % 2 == 0)]
}

#[test]
fn what_a_step_does_to_its_gradients_must_be_linear() {
    let train = |change, micro_batch, accepted| {
        train((change, Loss::Mean), sgd(), one(), micro_batch, accepted)
    };
    for change in [Change::Clips, Change::Reads, Change::Signs] {
        for micro_batch in [1, 7] {
            let Err(error) = train(change, Some(micro_batch), None) else {
                panic!("{change:?} in parts of {micro_batch}");
            };
            let is_told = matches!(error, TrainError::GradientsChanged { .. });
            assert!(is_told, "{change:?} in parts of {micro_batch}: {error}");
            let text = error.to_string();
            assert!(text.contains("clip_global_norm(optimizer, limit)"), "{text}");
        }
        // The first gradient becomes the velocity.
        let momentum =
            SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init::<B, Net<B>>();
        let moving = self::train((change, Loss::Mean), momentum, one(), Some(7), None);
        assert!(matches!(moving, Err(TrainError::GradientsChanged { .. })), "{change:?}");
        let whole = train(change, None, None).expect("a whole batch may do what it wants");
        assert_eq!(whole.check, SplitCheck::NotNeeded);
        let accepted = train(change, Some(7), Some(Coupling::Gradients)).expect("it was accepted");
        assert_eq!(accepted.check, SplitCheck::Accepted(Coupling::Gradients));
    }
    for change in [Change::Nothing, Change::Scales] {
        let whole = train(change, None, None).expect("it fits").learned;
        let split = train(change, Some(7), None).expect("that is linear").learned;
        assert_eq!(compare(&whole, &split), Ok(()), "{change:?}");
    }
}

#[test]
fn an_optimizer_clips_the_gradient_of_the_whole_batch() {
    let seen = Arc::new(AtomicUsize::new(0));
    let train = |limit: f64, micro_batch| {
        let seen = seen.clone();
        let count = move |_: &Net<B>, grads: GradientsParams| {
            seen.fetch_add(1, Relaxed);
            grads
        };
        let optimizer = on_gradients(clip_global_norm(sgd(), limit), count);
        train((Change::Nothing, Loss::Mean), optimizer, one(), micro_batch, None)
            .expect("it may be split")
            .learned
    };
    let norm = |learned: &Values| {
        let squares = learned.iter().flatten().map(|value| f64::from(*value).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let free = train(1e6, None);
    for micro_batch in [None, Some(1), Some(7)] {
        assert_eq!(compare(&free, &train(1e6, micro_batch)), Ok(()), "{micro_batch:?}");
        let clipped = train(0.25 * norm(&free) / 0.1, micro_batch);
        let share = norm(&clipped) / norm(&free);
        assert!((share - 0.25).abs() < 1e-4, "{share} of the gradient in {micro_batch:?}");
    }
    assert!(seen.load(Relaxed) > 0, "hooks may be put around each other");
}

#[test]
fn a_part_in_which_nothing_counts_has_its_share() {
    let labelled = |rows: Rows<B>| Rows { by_label: true, ..rows };
    let some = |number| labelled(Rows::new(number, 12, |item| !(4..8).contains(&item)));
    let train = |batches, micro_batch| {
        train((Change::Nothing, Loss::Detection), sgd(), batches, micro_batch, None)
    };
    for batches in [vec![some(1)], vec![some(0), some(1), some(1)]] {
        let whole = train(batches.clone(), None).expect("it fits");
        for micro_batch in [1, 4, 5] {
            let split = train(batches.clone(), Some(micro_batch)).expect("it may be split");
            assert_eq!(split.check, SplitCheck::Proved);
            assert_eq!(compare(&whole.learned, &split.learned), Ok(()), "parts of {micro_batch}");
        }
    }
}

#[test]
fn a_coupling_that_comes_later_ends_training() {
    let batches =
        |count| (0..count).map(|number| Rows::new(number, 24, |item| item % 2 == 0)).collect();
    let train = |loss, count, micro_batch| {
        train((Change::Nothing, loss), sgd(), batches(count), micro_batch, None)
    };
    // Its operations couple items before its values do.
    let error = train(Loss::Above, 40, Some(6)).err().expect("its items are coupled");
    let is_proved = matches!(error, TrainError::Coupled { by: None, .. });
    assert!(is_proved, "{error}");
    let error = train(Loss::RootLater, 40, Some(6)).err().expect("its items are coupled");
    let TrainError::CoupledSince { agreed, found, .. } = error else { panic!("{error}") };
    assert!(agreed <= 3 && (3..=7).contains(&found), "{agreed} to {found}");
    for loss in [Loss::Above, Loss::RootLater] {
        assert!(train(loss, 40, None).is_ok(), "{loss:?} of whole batches");
    }
}

/// How a step knows how far training is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Clock,
    /// By a counter of calls.
    Calls,
    /// By one that leaves rehearsals out.
    CallsThatRun,
}

static CALLS: AtomicUsize = AtomicUsize::new(0);

#[derive(Module, Debug)]
struct Annealed<B: Backend> {
    layer: Linear<B>,
    #[module(skip)]
    by: By,
}

impl<B: AutodiffBackend> TrainStep for Annealed<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, batch: Rows<B>) -> TrainOutput<()> {
        let call = match self.by {
            By::Clock => firebox::clock().step - 1,
            By::CallsThatRun if firebox::is_rehearsal() => CALLS.load(Relaxed),
            By::Calls | By::CallsThatRun => CALLS.fetch_add(1, Relaxed),
        };
        assert!(self.by != By::Clock || firebox::clock().batch == batch.number + 1);
        let output = self.layer.forward(batch.rows);
        let loss = (output.clone() - batch.targets).square().mean()
            + output.square().mean() * (0.1 * call as f32);
        TrainOutput::new(self, loss.backward(), ())
    }
}

impl<B: Backend> InferenceStep for Annealed<B> {
    type Input = Rows<B>;
    type Output = ();

    fn step(&self, _: Rows<B>) {
        assert_eq!(firebox::clock().step, 5, "of the last batch");
    }
}

/// What a logger was told, for tests that hold [`random_state`].
struct Heard(std::sync::Mutex<Vec<String>>);

static HEARD: Heard = Heard(std::sync::Mutex::new(Vec::new()));

impl log::Log for Heard {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().expect("no test fails here").push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Trains for two epochs. Returns the weights, and what was warned of.
fn annealed(by: By, micro_batch: Option<usize>) -> (Values, Vec<String>) {
    let _lock = random_state();
    _ = log::set_logger(&HEARD);
    log::set_max_level(log::LevelFilter::Warn);
    HEARD.0.lock().expect("no test fails here").clear();
    CALLS.store(0, Relaxed);
    let device = Default::default();
    B::seed(&device, 3);
    let model = Annealed::<B> { layer: LinearConfig::new(3, 1).init(&device), by };
    let folder = tempfile::tempdir().expect("a folder");
    let rows = (0..5).map(|number| Rows::new(number, 12, |item| item % 2 == 0)).collect();
    let valid = vec![Rows::<Lazy<Flex>>::new(0, 4, |_| true)];
    let training =
        SupervisedTraining::new(folder.path(), Given::loader(rows), Given::loader(valid))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(2);
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    let fitted = builder.build(model, SgdConfig::new().init(), 0.1).fit(training).expect("it fits");
    assert_eq!(firebox::clock().step, 1, "training is over");
    let heard = std::mem::take(&mut *HEARD.0.lock().expect("no test fails here"));
    (weights::<Lazy<Flex>, _>(&fitted.model), heard)
}

#[test]
fn the_clock_is_the_same_in_rehearsals_and_micro_batches() {
    let (whole, heard) = annealed(By::Clock, None);
    assert_eq!(heard, [""; 0]);
    for items in [1, 5] {
        let (split, heard) = annealed(By::Clock, Some(items));
        assert_eq!(compare(&whole, &split), Ok(()), "in parts of {items}");
        assert_eq!(heard, [""; 0]);
    }
}

#[test]
fn a_step_that_counts_its_calls_is_told_of_the_clock() {
    let is_told = |heard: &[String]| {
        let of_clock = heard.iter().filter(|text| text.contains("`firebox::clock()`"));
        let texts: Vec<&String> = of_clock.collect();
        assert!(texts.iter().all(|text| text.contains("mul_scalar` has 0")), "{texts:?}");
        assert!(texts.len() < 2, "once is enough: {texts:?}");
        !texts.is_empty()
    };
    assert!(is_told(&annealed(By::Calls, None).1));
    assert!(is_told(&annealed(By::Calls, Some(5)).1));
    assert!(is_told(&annealed(By::CallsThatRun, Some(5)).1));
    assert!(!is_told(&annealed(By::CallsThatRun, None).1), "a whole batch is one call");
}
