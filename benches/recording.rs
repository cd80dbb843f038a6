//! Measures how fast steps are recorded, including automatic differentiation, and whether the cost
//! is linear in their length.
//!
//! Recording executes nothing, so batches are tiny. The time is that of the recorder, burn-autodiff
//! and the modules alone. A call is a call of a backend method. The trace holds more burn-ir
//! operations than calls, because some calls are decomposed there.

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::train::{InferenceStep, TrainStep};
use firebox::trace::{StepRecorder, Trace};
use firebox::{Lazy, initialize};
use firebox_testing::bench;
use firebox_testing::bench::paired::{measure, time};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::stack::{Rows, Stack};

type B = Autodiff<Lazy<Flex>>;

fn main() {
    bench::print_machine();
    let mut result = "result: bench=recording".to_owned();
    if bench::wants("gpt") {
        result += &format!(" ops_per_second={:.0}", gpt_throughput());
    }
    if bench::wants("linearity") {
        for (name, growth) in growths() {
            result += &format!(" growth_{name}={growth:.2}");
        }
    }
    println!("{result}");
}

/// Cost of recording a program, and its trace.
struct Recorded {
    record: Duration,
    discard: Duration,
    trace: Trace,
}

/// Records one iteration: forward, backward and optimizer step.
fn record_iteration<M>(model: &M, batch: &M::Input) -> Recorded
where
    M: TrainStep + AutodiffModule<B>,
    M::Input: Clone,
{
    record_iterations(model, batch, 1)
}

/// Records `count` iterations in one program.
fn record_iterations<M>(model: &M, batch: &M::Input, count: usize) -> Recorded
where
    M: TrainStep + AutodiffModule<B>,
    M::Input: Clone,
{
    let mut optimizer = AdamWConfig::new().init::<B, M>();
    let mut model = model.clone();
    let (recording, record) = time(|| {
        let iterations = || {
            for _ in 0..count {
                let output = model.step(batch.clone());
                let grads: GradientsParams = output.grads;
                model = optimizer.step(1e-4, model, grads);
            }
            (model, optimizer)
        };
        StepRecorder::new().record::<Flex, _>(iterations).expect("recordings do not nest here")
    });
    let (discarded, discard) = time(|| recording.discard());
    Recorded { record, discard, trace: discarded.trace }
}

/// Records a GPT of 12 layers. Returns calls per second.
fn gpt_throughput() -> f64 {
    let device = Default::default();
    let model = Gpt::<B>::new(12, 768, 16, &device);
    initialize(&model);
    let batch = Texts::new(1, 16, &device);

    let trace = record_iteration(&model, &batch).trace;
    let calls = trace.calls().count() as f64;
    let operations = trace.operations().count();
    drop(trace);
    let (mut record, mut discard) =
        (|| record_iteration(&model, &batch).record, || record_iteration(&model, &batch).discard);
    let rounds = measure(bench::rounds(41), &mut [&mut record, &mut discard]);
    let (record, discard) = (rounds.seconds(0), rounds.seconds(1));

    println!("\nGPT, 12 layers of 768, one iteration with AdamW");
    println!("  calls                    {calls:>12}");
    println!("  operations of burn-ir    {operations:>12}");
    println!(
        "  recording                {:>9.2} ms  (quartiles {:.2} to {:.2})",
        record.median * 1e3,
        record.low * 1e3,
        record.high * 1e3
    );
    println!("  discarding               {:>9.2} ms", discard.median * 1e3);
    println!("  calls a second           {:>12.0}  target: 500000", calls / record.median);
    println!("    with discarding        {:>12.0}", calls / (record.median + discard.median));
    println!("  operations of burn-ir    {:>12.0}  a second", operations as f64 / record.median);
    calls / record.median
}

/// Records programs of about 300, 3,000 and 30,000 calls.
///
/// Returns by name the worst cost factor for ten times the calls: for longer programs of one model,
/// with and without automatic differentiation, and for deeper models.
fn growths() -> [(&'static str, f64); 4] {
    let device = Default::default();
    let texts = Texts::new(1, 16, &device);
    let passes = growth("forward passes of a GPT of 12 layers", [1, 10, 100], |count| {
        let model = Gpt::<Lazy<Flex>>::new(12, 64, 16, &device);
        initialize(&model);
        let texts = Texts::new(1, 16, &device);
        move || {
            let program = || {
                for _ in 0..count {
                    InferenceStep::step(&model, texts.clone());
                }
            };
            let (recording, record) = time(|| StepRecorder::new().record::<Flex, _>(program));
            let discarded = recording.expect("recordings do not nest here").discard();
            Recorded { record, discard: Duration::ZERO, trace: discarded.trace }
        }
    });
    let iterations = growth("iterations of a GPT of one layer, AdamW", [1, 8, 64], |count| {
        let model = Gpt::<B>::new(1, 64, 16, &device);
        initialize(&model);
        let texts = texts.clone();
        move || record_iterations(&model, &texts, count)
    });
    let rows = Rows::new(2, &device);
    let chain = growth("one iteration of deeper linear layers, AdamW", [11, 107, 1070], |layers| {
        let model = Stack::<B>::new(layers, &device);
        initialize(&model);
        let rows = rows.clone();
        move || record_iteration(&model, &rows)
    });
    // burn-autodiff 0.21 moves the nodes of a long graph repeatedly where graphs merge.
    let deeper = growth("one iteration of deeper GPTs, AdamW", [1, 8, 80], |layers| {
        let model = Gpt::<B>::new(layers, 64, 16, &device);
        initialize(&model);
        let texts = texts.clone();
        move || record_iteration(&model, &texts)
    });
    [("passes", passes), ("iterations", iterations), ("chain", chain), ("deeper_gpts", deeper)]
}

/// Records the programs that `make` makes for three depths. Returns the worst cost factor for ten
/// times the calls.
fn growth<R: FnMut() -> Recorded>(
    title: &str,
    depths: [usize; 3],
    make: impl Fn(usize) -> R,
) -> f64 {
    let mut programs = depths.map(make);
    let calls = programs.each_mut().map(|record| record().trace.calls().count());
    // Every subject records as many layers as the deepest, so that all are timed for equally long.
    let times = depths.map(|depth| depths[2] / depth);
    let [small, middle, large] = programs.each_mut();
    let mut small = || (0..times[0]).map(|_| small().record).sum::<Duration>() / times[0] as u32;
    let mut middle = || (0..times[1]).map(|_| middle().record).sum::<Duration>() / times[1] as u32;
    let mut large = || large().record;
    let rounds = measure(bench::rounds(15), &mut [&mut small, &mut middle, &mut large]);

    println!("\nlinearity, {title}");
    println!("  {:>8}  {:>10}  {:>12}  {:>14}", "calls", "ms", "ns a call", "x10 calls cost");
    let mut worst: f64 = 0.0;
    for size in 0..3 {
        let seconds = rounds.seconds(size).median;
        let growth = (size > 0).then(|| {
            let more_calls = calls[size] as f64 / calls[size - 1] as f64;
            10.0 * rounds.ratio(size, size - 1).median / more_calls
        });
        worst = worst.max(growth.unwrap_or(0.0));
        println!(
            "  {:>8}  {:>10.3}  {:>12.0}  {:>14}",
            calls[size],
            seconds * 1e3,
            seconds * 1e9 / calls[size] as f64,
            growth.map_or_else(String::new, |growth| format!("x{growth:.2}")),
        );
    }
    println!("  worst: x{worst:.2}  target: at most x11");
    worst
}
