//! Times a step through `Lazy`, as the Learner runs it, against the backend's own, and times a
//! plan.

use std::fmt::Display;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::module::AutodiffModule;
use burn::optim::{AdamConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use firebox::trace::StepRecorder;
use firebox::{Budget, Lazy, Learner, MicroBatch, initialize};
use firebox_testing::bench::paired::{measure, time};

use crate::model::{self, FromNumbers, Subject};
use crate::real::{self, Device, Real};

type Plain = Autodiff<real::Plain>;
type Decorated = Autodiff<Lazy<Real>>;

/// Minimum duration of a turn in seconds, so that a clock can measure it.
const TURN: f64 = 0.1;

/// Times steps on both backends in turns, in one process.
pub fn ratio(models: &[Subject], rounds: usize, items: Option<usize>) -> anyhow::Result<()> {
    let device = Device::default();
    let mut result = format!("result: bench=ratio target={}", real::NAME);
    for subject in models {
        let items = items.unwrap_or(subject.items());
        let ratio = match subject {
            Subject::Cnn => {
                let (plain, decorated) = (model::cnn(&device), model::cnn(&device));
                compare(plain, decorated, items, rounds, &device)
            }
            gpt => {
                let (plain, decorated) = (model::gpt(*gpt, &device), model::gpt(*gpt, &device));
                compare(plain, decorated, items, rounds, &device)
            }
        };
        println!("{}, {items} items: {ratio}", subject.name());
        result += &format!(" {}={:.4} {0}_ms={:.2}", subject.name(), ratio.median, ratio.plain_ms);
    }
    println!("{result}");
    Ok(())
}

struct Ratio {
    plain_ms: f64,
    low: f64,
    median: f64,
    high: f64,
}

impl Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { plain_ms, low, median, high } = self;
        write!(
            f,
            "{plain_ms:.2} ms a step; through Lazy {median:.4} of it (quartiles {low:.4} to {high:.4})"
        )
    }
}

fn compare<P, D>(plain: P, decorated: D, items: usize, rounds: usize, device: &Device) -> Ratio
where
    P: AutodiffModule<Plain> + TrainStep,
    P::Input: Clone,
    D: AutodiffModule<Decorated> + TrainStep,
    D::Input: Clone,
    FromNumbers: Batcher<Plain, usize, P::Input> + Batcher<Decorated, usize, D::Input>,
{
    let plain_batch: P::Input = FromNumbers.batch((0..items).collect(), device);
    let batch: D::Input = FromNumbers.batch((0..items).collect(), device);
    let mut plain = steps::<Plain, _>(plain, |model, batch| model.step(batch));
    let mut decorated = steps::<Decorated, _>(decorated, |model, batch| {
        let recording = StepRecorder::new().record::<Real, _>(|| model.step(batch));
        let recording = recording.expect("recordings do not nest here");
        black_box(recording.trace().structural_hash());
        recording.run()
    });
    // The first steps compile and tune kernels.
    turn(3, device, || plain(plain_batch.clone()));
    turn(3, device, || decorated(batch.clone()));
    let once = turn(1, device, || plain(plain_batch.clone())).as_secs_f64();
    let count = (TURN / once).ceil() as usize;
    let rounds = measure(
        rounds,
        &mut [&mut || turn(count, device, || plain(plain_batch.clone())), &mut || {
            turn(count, device, || decorated(batch.clone()))
        }],
    );
    let ratio = rounds.ratio(1, 0);
    let plain_ms = rounds.seconds(0).median * 1e3 / count as f64;
    Ratio { plain_ms, low: ratio.low, median: ratio.median, high: ratio.high }
}

/// Trains step by step with Adam.
fn steps<B, M>(
    model: M,
    run: impl Fn(&M, M::Input) -> TrainOutput<M::Output>,
) -> impl FnMut(M::Input)
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
{
    initialize(&model);
    let mut optimizer = AdamConfig::new().init::<B, M>();
    let mut state = Some(model);
    move |batch| {
        let model = state.take().expect("the model comes back from every step");
        let output = run(&model, batch);
        state = Some(optimizer.step(1e-4, model, output.grads));
        black_box(output.item);
    }
}

/// Time of `count` steps, measured until the device has finished them.
fn turn(count: usize, device: &Device, mut step: impl FnMut()) -> Duration {
    let started = Instant::now();
    for _ in 0..count {
        step();
    }
    real::Plain::sync(device).expect("the device is healthy");
    Real::sync(device).expect("the device is healthy");
    started.elapsed()
}

/// Times the first plan of this process and later ones.
pub fn plan(models: &[Subject], memory: Budget, items: Option<usize>) -> anyhow::Result<()> {
    let device = Device::default();
    let mut result = format!("result: bench=plan-time target={}", real::NAME);
    for subject in models {
        let items = items.unwrap_or(64 * subject.items());
        let [first, later] = match subject {
            Subject::Cnn => plans(model::cnn(&device), memory, items, &device)?,
            gpt => plans(model::gpt(*gpt, &device), memory, items, &device)?,
        };
        let name = subject.name();
        println!("{name}, {items} items in {memory}: {first:.3} s, then {later:.3} s");
        result += &format!(" {name}_first={first:.3} {name}_later={later:.3}");
    }
    println!("{result}");
    Ok(())
}

fn plans<M>(model: M, memory: Budget, items: usize, device: &Device) -> anyhow::Result<[f64; 2]>
where
    M: AutodiffModule<Decorated> + TrainStep + Display + 'static,
    M::Input: MicroBatch,
    M::InnerModule: InferenceStep,
    <M::InnerModule as InferenceStep>::Input: MicroBatch,
    FromNumbers: Batcher<Decorated, usize, M::Input>,
{
    initialize(&model);
    let batch: M::Input = FromNumbers.batch((0..items).collect(), device);
    let learner = Learner::builder().auto_batch().memory(memory).build::<Decorated, _, _, _>(
        model,
        AdamConfig::new().init(),
        1e-4,
    );
    let (report, first) = time(|| learner.plan(&batch));
    println!("  {}", report?.plan);
    let mut later: Vec<f64> = Vec::new();
    for _ in 0..3 {
        let (report, time) = time(|| learner.plan(&batch));
        report?;
        later.push(time.as_secs_f64());
    }
    later.sort_by(f64::total_cmp);
    Ok([first.as_secs_f64(), later[later.len() / 2]])
}
