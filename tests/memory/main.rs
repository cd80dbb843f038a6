//! Compares predicted with measured memory on the Flex backend, for whole training runs.
//!
//! Each case trains in a child process through the Learner, with metrics, for three iterations,
//! under a counting allocator. The prediction that the Learner prints is compared with the peak of
//! the heap above its level before the model was built.

mod making;
mod soak;

use std::process::Command;

use Split::{Into, Loop, Loosely, Parked, ToFit, Whole};
use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{SupervisedTraining, TrainStep};
use firebox::trace::{Heap, StepRecorder};
use firebox::{Bytes, Half, Lazy, LazyBackend, Learner, Park, WeightedGradients, join};
use firebox_lazy::{HOST_BYTES_PER_CALL, host_bytes_of_descriptions};
use firebox_testing::classifiers::{Kind, Model, Numbered};
use peak_alloc::PeakAlloc;
use soak::SOAKS;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;
type Sixteen = Autodiff<Half<Lazy<Flex>>>;

/// Environment variable that holds the case of a child process.
const CASE: &str = "FIREBOX_TEST_CASE";

/// A training run: the model, the batch size, and the micro-batch size if it is split.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    kind: Kind,
    items: usize,
    /// Items in a micro-batch, or the budget.
    split: Split,
    optimizer: Optimizing,
}

/// How a batch is split.
#[derive(Clone, Copy, Debug)]
enum Split {
    Whole,
    Into(usize),
    /// Into what fits in this many MiB in addition to what [threads keep](Heap::kept). More is an
    /// error.
    ToFit(u64),
    /// Same as `ToFit`, but more is a warning.
    Loosely(u64),
    /// As `Into`, with the optimizer's state in a file between steps.
    Parked(usize),
    /// The same in a loop of the user's own.
    Loop(usize),
}

#[derive(Clone, Copy, Debug)]
enum Optimizing {
    Adam,
    /// Adam, in 16 bit.
    Half,
    AdamW,
    Momentum,
}

macro_rules! cases {
    ($($name:ident: $kind:ident, $items:literal, $split:expr, $optimizer:ident;)*) => {
        const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            kind: Kind::$kind,
            items: $items,
            split: $split,
            optimizer: Optimizing::$optimizer,
        }),*];

        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*
    };
}

cases! {
    mlp_of_256: Mlp, 256, Whole, Adam;
    mlp_of_1024: Mlp, 1024, Whole, Adam;
    mlp_of_1024_split: Mlp, 1024, Into(256), Adam;
    mlp_with_momentum: Mlp, 512, Whole, Momentum;
    cnn_of_64: Cnn, 64, Whole, Adam;
    cnn_of_160: Cnn, 160, Whole, AdamW;
    cnn_of_160_split: Cnn, 160, Into(64), Adam;
    encoder_of_16: Encoder, 16, Whole, AdamW;
    encoder_of_48: Encoder, 48, Whole, Adam;
    encoder_of_48_split: Encoder, 48, Into(16), AdamW;
    lstm_of_64: Lstm, 64, Whole, Adam;
    lstm_of_160: Lstm, 160, Whole, AdamW;
    lstm_of_160_split: Lstm, 160, Into(64), Momentum;
    detached_of_96: Detached, 96, Whole, Adam;
    detached_of_224_split: Detached, 224, Into(64), AdamW;
    mlp_to_fit: Mlp, 1500, ToFit(46), Adam;
    cnn_to_fit: Cnn, 150, ToFit(22), Adam;
    encoder_to_fit: Encoder, 52, ToFit(22), AdamW;
    lstm_to_fit: Lstm, 170, ToFit(22), Momentum;
    long_lstm_to_fit: Long, 250, ToFit(10), Adam;
    wide_of_1500_split: Wide, 1500, Into(300), Adam;
    wide_to_fit: Wide, 1500, ToFit(64), Adam;
    mlp_parked: Mlp, 1024, Parked(256), Adam;
    encoder_parked: Encoder, 48, Parked(16), AdamW;
    lstm_parked: Lstm, 160, Parked(64), Momentum;
    mlp_parked_in_a_loop: Mlp, 1024, Loop(256), Adam;
    encoder_parked_in_a_loop: Encoder, 48, Loop(16), AdamW;
    lstm_parked_in_a_loop: Lstm, 160, Loop(64), Momentum;
    mlp_in_16_bit: Mlp, 1024, Into(256), Half;
    cnn_in_16_bit: Cnn, 160, Into(64), Half;
    encoder_in_16_bit: Encoder, 48, Whole, Half;
    lstm_in_16_bit: Lstm, 160, Into(64), Half;
}

/// Memory that no budget sees: the step takes 64 MiB itself.
const HOARDING: [Case; 2] = {
    let strict = Case {
        name: "hoarding_strict",
        kind: Kind::Hoarding,
        items: 64,
        split: ToFit(48),
        optimizer: Optimizing::Adam,
    };
    [strict, Case { name: "hoarding", split: Loosely(48), ..strict }]
};

/// Runs a case in a child process. Returns whether it succeeded, and its two outputs.
fn run(name: &str) -> (bool, String, String) {
    let test = std::env::current_exe().expect("a test has a path");
    let output = Command::new(test)
        .args(["--exact", "in_a_process_of_its_own", "--ignored", "--nocapture"])
        .env(CASE, name)
        .output()
        .expect("a test can be run");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_budget_does_not_see_is_told() {
    let (succeeded, _, errors) = run("hoarding");
    assert!(succeeded && errors.contains("warning: training took"), "{errors}");
    let (succeeded, _, errors) = run("hoarding_strict");
    assert!(!succeeded && errors.contains("it fits: training took"), "{errors}");
}

/// Starts a long run and prints what it measured.
#[track_caller]
fn soak(name: &str) {
    let (succeeded, text, errors) = run(name);
    assert!(succeeded, "{text}{errors}");
    let line = text.lines().find_map(|line| line.strip_prefix("measured: ")).expect("a result");
    println!("{name}: {line}");
}

#[test]
fn soak_of_a_cnn() {
    soak("soak_of_a_cnn");
}

#[test]
fn soak_of_lengths() {
    soak("soak_of_lengths");
}

#[test]
#[ignore = "takes minutes in the release profile"]
fn long_soak_of_a_cnn() {
    soak("long_soak_of_a_cnn");
}

#[test]
#[ignore = "takes minutes in the release profile"]
fn long_soak_of_lengths() {
    soak("long_soak_of_lengths");
}

/// Runs a case and compares prediction and measurement.
#[track_caller]
fn check(name: &str) {
    let (succeeded, text, errors) = run(name);
    assert!(succeeded, "{text}{errors}");
    assert!(!errors.contains("warning: training took"), "{errors}");
    check_ratio(name, &text);
}

/// Compares prediction and measurement in the output of a case.
#[track_caller]
fn check_ratio(name: &str, text: &str) {
    let line = text.lines().find_map(|line| line.strip_prefix("measured: ")).expect("a result");
    let numbers: Vec<f64> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
    let [predicted, measured] = numbers[..] else { panic!("{line}") };
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let ratio = predicted / measured;
    println!(
        "{name}: {:.2} MiB predicted, {:.2} MiB measured, {ratio:.3}",
        mib(predicted),
        mib(measured)
    );
    assert!(mib(measured) >= 8.0, "{name} is too small to tell: {} MiB", mib(measured));
    // What threads keep is counted in full and depends on the machine.
    let least = (predicted - Heap::flex().kept().get() as f64) / measured;
    assert!(ratio >= 0.98 && least <= 1.15, "{name}: {ratio:.3} of what was measured");
}

#[test]
#[ignore = "is run by the other tests, once for each case"]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(CASE) else {
        println!("not run: {CASE} names no case");
        return;
    };
    if name == "recording" {
        return record();
    }
    if let Some(workers) = name.strip_prefix("making_by_") {
        return making::train(workers.parse().expect("a number"));
    }
    if let Some(soak) = SOAKS.iter().find(|soak| soak.name == name) {
        return soak.run();
    }
    let case =
        CASES.iter().chain(&HOARDING).find(|case| case.name == name).expect("a case of this name");
    let (predicted, measured) = match case.optimizer {
        Optimizing::Adam => train::<B>(case, AdamConfig::new().init()),
        Optimizing::Half => train::<Sixteen>(case, AdamConfig::new().init()),
        Optimizing::AdamW => train::<B>(case, AdamWConfig::new().init()),
        Optimizing::Momentum => {
            let momentum = MomentumConfig::new();
            train::<B>(case, SgdConfig::new().with_momentum(Some(momentum)).init())
        }
    };
    println!("measured: {} {}", predicted.get(), measured.get());
}

/// Budget of a case that must fit in `mib` MiB. What threads keep depends on the machine and is
/// added.
fn budget(mib: u64) -> Bytes {
    Bytes::mib(mib) + Heap::flex().kept()
}

/// Reads the sum of each parameter.
struct Sums;

impl<B: Backend> ModuleVisitor<B> for Sums {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let sum = param.val().sum().into_data().convert::<f32>();
        // In a rehearsal it may be a guess.
        assert!(sum.iter::<f32>().all(f32::is_finite), "a parameter is a number");
    }
}

/// Trains for three iterations in a loop, with parked state, and returns the predicted and the
/// measured peak.
fn train_in_a_loop<B, O>(case: &Case, items: usize, mut optimizer: O) -> (Bytes, Bytes)
where
    B: AutodiffBackend<Device = FlexDevice> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    O: Optimizer<Model<B>, B>,
{
    let device = Default::default();
    let folder = tempfile::tempdir().expect("a folder");
    let level = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let mut model = Model::<B>::new(case.kind, &device);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).micro_batch(items);
    let builder = builder.park_optimizer(Park::Disk(folder.path().to_owned()));
    let mut steps = builder.quiet().step_planner(&model).expect("it is ready");
    for iteration in 0..3 {
        let numbers = iteration * case.items..(iteration + 1) * case.items;
        let batch = Numbered(case.kind).batch(numbers.collect(), &device);
        let stepped = steps.step(&mut model, &mut optimizer, &batch, |model, optimizer, parts| {
            let mut gradients = WeightedGradients::mean(parts.weight());
            parts.each(
                model,
                |model, micro| model.step(micro).grads,
                |model, grads, weight| gradients.add(model, grads, weight),
            )?;
            let grads = gradients.finish(model);
            parts.update(model, |model| {
                *model = optimizer.step(1e-3, model.clone(), grads);
                // What is read runs before anything is parked.
                if matches!(case.kind, Kind::Encoder) {
                    model.visit(&mut Sums);
                }
            })
        });
        stepped.expect("it fits");
    }
    let measured = Bytes::new((HEAP.peak_usage() - level) as u64);
    // What a model reads is computed in rehearsals, too.
    (steps.memory().predicted, measured)
}

/// Trains for three iterations and returns the predicted and the measured peak.
fn train<B>(case: &Case, optimizer: impl Optimizer<Model<B>, B> + 'static) -> (Bytes, Bytes)
where
    B: AutodiffBackend<Device = FlexDevice> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
{
    if let Loop(items) = case.split {
        return train_in_a_loop::<B, _>(case, items, optimizer);
    }
    let device = Default::default();
    let folder = tempfile::tempdir().expect("a folder");
    let loader = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let batcher = Numbered(case.kind);
    let train = DataLoaderBuilder::<B, _, _>::new(batcher.clone())
        .batch_size(case.items)
        .build(loader(3 * case.items));
    let valid =
        DataLoaderBuilder::<B::InnerBackend, _, _>::new(batcher).batch_size(2).build(loader(2));
    let level = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let model = Model::<B>::new(case.kind, &device);
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let builder = Learner::builder().auto_batch();
    let builder = match case.kind {
        Kind::Wide => builder
            .metrics_see_whole(join::classification::<B>)
            .metrics_see_whole(join::classification::<B::InnerBackend>),
        _ => builder,
    };
    let builder = match case.split {
        Whole => builder.memory(Bytes::gib(2)),
        Into(items) => builder.memory(Bytes::gib(2)).micro_batch(items),
        ToFit(mib) => builder.memory(budget(mib)).strict(),
        Loosely(mib) => builder.memory(budget(mib)),
        Parked(items) | Loop(items) => {
            let park = Park::Disk(folder.path().to_owned());
            builder.memory(Bytes::gib(2)).micro_batch(items).park_optimizer(park)
        }
    };
    let fitted = builder.build(model, optimizer, 1e-3).fit(training).expect("it fits");
    let measured = Bytes::new((HEAP.peak_usage() - level) as u64);
    if let (ToFit(mib), false) = (case.split, matches!(case.kind, Kind::Hoarding)) {
        assert!(measured <= budget(mib), "{measured} of {}", budget(mib));
    }
    (fitted.report.expect("a plan was made").predicted(), measured)
}

/// Compares the memory that a recording takes with the memory counted for it.
fn record() {
    for kind in [Kind::Long, Kind::Lstm] {
        let device = Default::default();
        let model = Model::<B>::new(kind, &device);
        firebox::initialize(&model);
        let batch = Numbered(kind).batch((0..32).collect(), &device);
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        let recording =
            StepRecorder::new().record::<Flex, _>(|| model.step(batch)).expect("records");
        let took = HEAP.peak_usage() - before;
        let trace = recording.trace();
        let calls = trace.calls().count() as u64;
        let counted = HOST_BYTES_PER_CALL.get() * calls + host_bytes_of_descriptions(trace).get();
        let ratio = counted as f64 / took as f64;
        println!("{kind:?}: {calls} calls took {took} bytes, {counted} are counted: {ratio:.3}");
        assert!((1.0..1.3).contains(&ratio), "{kind:?}: {ratio:.3}");
    }
}

#[test]
fn what_a_recording_takes_is_counted() {
    let (succeeded, text, errors) = run("recording");
    assert!(succeeded, "{text}{errors}");
    text.lines().filter(|line| line.contains("are counted")).for_each(|line| println!("{line}"));
}
