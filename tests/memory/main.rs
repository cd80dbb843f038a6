//! Predicted against measured memory on the Flex backend, for whole training runs.
//!
//! Each case is trained in a process of its own through the Learner, with metrics, for three iterations, under a
//! counting allocator. What is compared is the prediction that the Learner prints and the peak of the heap above its
//! level before the model was built.

mod models;

use std::process::Command;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig};
use burn::train::SupervisedTraining;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, Lazy, Learner};
use models::{Kind, Model, Numbered};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// The name under which a process of a test learns its case.
const CASE: &str = "FIREBOX_TEST_CASE";

/// A training run: the model, the items of a batch, and of a micro-batch if it is to be split.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    kind: Kind,
    items: usize,
    micro_batch: Option<usize>,
    optimizer: Optimizing,
}

#[derive(Clone, Copy, Debug)]
enum Optimizing {
    Adam,
    AdamW,
    Momentum,
}

macro_rules! cases {
    ($($name:ident: $kind:ident, $items:literal, $micro:expr, $optimizer:ident;)*) => {
        const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            kind: Kind::$kind,
            items: $items,
            micro_batch: $micro,
            optimizer: Optimizing::$optimizer,
        }),*];

        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*
    };
}

cases! {
    mlp_of_256: Mlp, 256, None, Adam;
    mlp_of_1024: Mlp, 1024, None, Adam;
    mlp_of_1024_split: Mlp, 1024, Some(256), Adam;
    mlp_with_momentum: Mlp, 512, None, Momentum;
    cnn_of_64: Cnn, 64, None, Adam;
    cnn_of_160: Cnn, 160, None, AdamW;
    cnn_of_160_split: Cnn, 160, Some(64), Adam;
    encoder_of_16: Encoder, 16, None, AdamW;
    encoder_of_48: Encoder, 48, None, Adam;
    encoder_of_48_split: Encoder, 48, Some(16), AdamW;
    lstm_of_64: Lstm, 64, None, Adam;
    lstm_of_160: Lstm, 160, None, AdamW;
    lstm_of_160_split: Lstm, 160, Some(64), Momentum;
}

/// Runs a case in a process of its own and compares.
#[track_caller]
fn check(name: &str) {
    let test = std::env::current_exe().expect("a test has a path");
    let output = Command::new(test)
        .args(["--exact", "in_a_process_of_its_own", "--ignored", "--nocapture"])
        .env(CASE, name)
        .output()
        .expect("a test can be run");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.split("measured: ").nth(1)).expect("a result");
    let numbers: Vec<f64> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
    let [predicted, measured] = numbers[..] else { panic!("{line}") };
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let ratio = predicted / measured;
    println!(
        "{name}: {:.2} MiB predicted, {:.2} MiB measured, {ratio:.3}",
        mib(predicted),
        mib(measured)
    );
    assert!(mib(measured) >= 16.0, "{name} is too small to tell: {} MiB", mib(measured));
    assert!((0.98..=1.25).contains(&ratio), "{name}: {ratio:.3} of what was measured");
}

#[test]
#[ignore = "is run by the other tests, once for each case"]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(CASE) else {
        println!("not run: {CASE} names no case");
        return;
    };
    let case = CASES.iter().find(|case| case.name == name).expect("a case of this name");
    let (predicted, measured) = match case.optimizer {
        Optimizing::Adam => train(case, AdamConfig::new().init()),
        Optimizing::AdamW => train(case, AdamWConfig::new().init()),
        Optimizing::Momentum => {
            let momentum = MomentumConfig::new();
            train(case, SgdConfig::new().with_momentum(Some(momentum)).init())
        }
    };
    println!("measured: {} {}", predicted.get(), measured.get());
}

/// Trains for three iterations; gives the predicted and the measured peak.
fn train(case: &Case, optimizer: impl Optimizer<Model<B>, B> + 'static) -> (Bytes, Bytes) {
    let device = Default::default();
    let folder = tempfile::tempdir().expect("a folder");
    let loader = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let batcher = Numbered(case.kind);
    let train = DataLoaderBuilder::<B, _, _>::new(batcher.clone())
        .batch_size(case.items)
        .build(loader(3 * case.items));
    let valid = DataLoaderBuilder::<Lazy<Flex>, _, _>::new(batcher).batch_size(2).build(loader(2));
    let level = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let model = Model::<B>::new(case.kind, &device);
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(2));
    if let Some(items) = case.micro_batch {
        builder = builder.micro_batch(items);
    }
    let fitted = builder.build(model, optimizer, 1e-3).fit(training).expect("it fits");
    let measured = Bytes::new((HEAP.peak_usage() - level) as u64);
    (fitted.report.expect("a plan was made").predicted(), measured)
}
