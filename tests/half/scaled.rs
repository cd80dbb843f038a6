//! Losses in half floats are scaled: gradients that would vanish do not, steps whose gradients are
//! not finite are left out, and a loss that is not scaled is an error.

use std::path::Path;

use burn::data::dataloader::batcher::Batcher;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::optim::lr_scheduler::LrScheduler;
use burn::optim::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::prelude::*;
use burn::train::{RegressionOutput, TrainOutput};
use firebox::{MicroBatch, TrainError, scale_loss};

use super::*;

/// Rows of numbers.
#[derive(Clone, Debug, MicroBatch)]
struct Rows<B: Backend> {
    /// `[items, 8]`
    rows: Tensor<B, 2>,
}

#[derive(Clone)]
struct RowBatcher;

impl<B: Backend> Batcher<B, usize, Rows<B>> for RowBatcher {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Rows<B> {
        let number = |item: &usize, at: usize| ((item * 37 + at * 11) % 97) as f32 / 48.0 - 1.0;
        let row = |item| (0..8).map(move |at| number(item, at));
        let rows: Vec<f32> = items.iter().flat_map(row).collect();
        Rows { rows: Tensor::from_data(TensorData::new(rows, [items.len(), 8]), device) }
    }
}

/// Two layers, and a loss that is far from one.
#[derive(Module, Debug)]
struct Layers<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    #[module(skip)]
    times: f64,
    #[module(skip)]
    scales: bool,
}

impl<B: Backend> Layers<B> {
    fn new(times: f64, scales: bool) -> Self {
        let layer = || {
            let mut layer = LinearConfig::new(8, 8).with_bias(false).init(&Default::default());
            let number = |at: usize| ((at as f32 * 0.618_034).fract() - 0.5) * 0.7;
            let weights = TensorData::new((0..64).map(number).collect::<Vec<f32>>(), [8, 8]);
            let weights = Tensor::from_data(weights, &Default::default());
            layer.weight = Param::from_tensor(weights);
            layer
        };
        Self { first: layer(), second: layer(), times, scales }
    }

    fn output(&self, batch: Rows<B>) -> RegressionOutput<B> {
        let target = batch.rows.clone().powi_scalar(2);
        let output = self.second.forward(self.first.forward(batch.rows).tanh());
        let loss = (output.clone() - target.clone()).powi_scalar(2).mean() * self.times;
        RegressionOutput::new(loss, output, target)
    }

    fn weights(&self) -> Vec<f32> {
        let of = |layer: &Linear<B>| layer.weight.val().into_data().iter::<f32>().collect();
        let [first, second]: [Vec<f32>; 2] = [of(&self.first), of(&self.second)];
        [first, second].concat()
    }
}

impl<B: AutodiffBackend> TrainStep for Layers<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> TrainOutput<Self::Output> {
        let output = self.output(batch);
        let loss = output.loss.clone();
        let loss = if self.scales { scale_loss(loss) } else { loss };
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Layers<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> Self::Output {
        self.output(batch)
    }
}

/// The weights after so many steps of gradient descent on a loss that is `times` as large, at a
/// rate that makes up for it.
fn descended<B>(times: f64, scales: bool, steps: usize, log: &Path) -> Result<Vec<f32>, TrainError>
where
    B: AutodiffBackend<Device = <Flex as BackendTypes>::Device> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
{
    descended_at::<B, _>(0.1 / times, 5, (times, scales), steps, log)
}

/// The same at other rates, in other micro-batches of the batches of 12.
fn descended_at<B, R>(
    rate: R,
    micro_batch: usize,
    (times, scales): (f64, bool),
    steps: usize,
    log: &Path,
) -> Result<Vec<f32>, TrainError>
where
    B: AutodiffBackend<Device = <Flex as BackendTypes>::Device> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    R: LrScheduler + 'static,
{
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(RowBatcher);
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(RowBatcher);
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(12).build(numbers(12 * steps)),
        valid.batch_size(12).build(numbers(12)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).quiet();
    let builder = builder.micro_batch(micro_batch).log_json(log);
    let model = Layers::<B>::new(times, scales);
    let learner = builder.build(model, SgdConfig::new().init(), rate);
    match learner.fit(training) {
        Ok(fitted) => Ok(fitted.model.weights()),
        Err(error) => Err(error.into_parts().0),
    }
}

/// What the log says of each step: the scale, and whether the step was left out.
fn logged(log: &Path) -> Vec<(Option<f64>, bool)> {
    let text = std::fs::read_to_string(log).expect("there is a log");
    let line = |line: &str| {
        let step: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
        (step["loss_scale"].as_f64(), step["left_out"].as_bool().expect("it is told"))
    };
    text.lines().map(line).collect()
}

fn moved(from: &[f32], to: &[f32]) -> f64 {
    from.iter().zip(to).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn gradients_that_would_vanish_do_not() {
    const FAINT: f64 = 1e-7;
    let folder = tempfile::tempdir().expect("a folder");
    let log = |name: &str| folder.path().join(name);
    let begin = Layers::<Full>::new(1.0, true).weights();
    let full = descended::<Full>(FAINT, true, 40, &log("full")).expect("it fits");
    let half = descended::<Floats>(FAINT, true, 40, &log("half")).expect("it fits");
    let (way, apart) = (moved(&begin, &full), moved(&full, &half));
    assert!(apart < 0.02 * way, "{apart} after a way of {way}");
    assert!(logged(&log("full")).iter().all(|step| *step == (None, false)));
    let steps = logged(&log("half"));
    assert_eq!(steps.len(), 40);
    assert!(steps.iter().all(|step| *step == (Some(65_536.0), false)), "{steps:?}");
    // Outside of the Learner nothing is scaled, and the gradient of the first layer is gone.
    let _alone = alone();
    let model = Layers::<Floats>::new(FAINT, true);
    let batch = RowBatcher.batch((0..12).collect(), &Default::default());
    let output = TrainStep::step(&model, batch);
    let grad = output.grads.get::<InnerFloats, 2>(model.first.weight.id).expect("it has one");
    assert!(grad.into_data().iter::<f32>().all(|number| number == 0.0), "it has vanished");
}

#[test]
fn steps_that_overflow_are_left_out_until_the_scale_fits() {
    const LOUD: f64 = 3e4;
    let folder = tempfile::tempdir().expect("a folder");
    let log = |name: &str| folder.path().join(name);
    let begin = Layers::<Full>::new(1.0, true).weights();
    let few = descended::<Floats>(LOUD, true, 3, &log("few")).expect("it fits");
    assert_eq!(few, begin, "steps that are left out change nothing");
    let half = descended::<Floats>(LOUD, true, 40, &log("half")).expect("it fits");
    let steps = logged(&log("half"));
    let left_out = steps.iter().filter(|(_, left_out)| *left_out).count();
    assert!((4..30).contains(&left_out), "{left_out} steps are left out");
    let scale = steps.last().and_then(|(scale, _)| *scale).expect("losses are scaled");
    assert_eq!(scale, 65_536.0 / 2_f64.powi(left_out as i32));
    assert!(steps[..left_out].iter().all(|(_, left_out)| *left_out), "the first ones");
    assert!(moved(&begin, &half) > 0.1 && half.iter().all(|weight| weight.is_finite()));
}

#[test]
fn the_same_steps_are_left_out_however_a_batch_is_split() {
    let folder = tempfile::tempdir().expect("a folder");
    for times in [3e2, 3e3, 3e4] {
        let of = |micro_batch: usize| {
            let log = folder.path().join(format!("{times}-{micro_batch}"));
            let rate = 0.1 / times;
            descended_at::<Floats, _>(rate, micro_batch, (times, true), 30, &log).expect("it fits");
            logged(&log)
        };
        let whole = of(12);
        assert!(whole.iter().any(|(_, left_out)| *left_out), "{whole:?}");
        for micro_batch in [7, 6, 5, 3] {
            assert_eq!(of(micro_batch), whole, "{times} in micro-batches of {micro_batch}");
        }
    }
}

#[test]
fn the_schedule_stands_still_where_a_step_is_left_out() {
    const LOUD: f64 = 3e4;
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let schedule = || ExponentialLrSchedulerConfig::new(0.1 / LOUD, 0.9).init().expect("it decays");
    descended_at::<Floats, _>(schedule(), 5, (LOUD, true), 40, &log).expect("it fits");
    let mut schedule = schedule();
    let mut expected = schedule.step();
    let text = std::fs::read_to_string(&log).expect("there is a log");
    let rates = text.lines().map(|line| {
        let step: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
        step["lr"].as_f64().expect("it has a rate")
    });
    for (rate, (_, left_out)) in rates.zip(logged(&log)) {
        assert!((rate - expected).abs() <= 1e-9 * expected, "{rate} is not {expected}: {text}");
        if !left_out {
            expected = schedule.step();
        }
    }
}

#[test]
fn a_loss_that_is_never_finite_and_one_that_is_not_scaled_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let error = descended::<Floats>(1e12, true, 40, &log).expect_err("it overflows unscaled");
    assert!(matches!(error, TrainError::NotFinite { .. }), "{error}");
    let error = descended::<Floats>(1.0, false, 3, &log).expect_err("it is not scaled");
    assert!(matches!(error, TrainError::LossNotScaled), "{error}");
    assert!(error.to_string().contains("firebox::scale_loss(loss)"), "{error}");
    descended::<Sixteen>(1.0, false, 3, &log).expect("brain floats need no scale");
}
