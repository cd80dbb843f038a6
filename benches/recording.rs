//! How fast steps are recorded, automatic differentiation included, and whether the cost is linear in their length.
//!
//! Recording executes nothing, so that batches are tiny and the time is that of the recorder, of burn-autodiff and of
//! the modules alone. An operation is a call of a backend's method; the trace holds more operations of burn-ir than
//! calls, because some calls are decomposed there.

#[path = "models/gpt.rs"]
mod gpt;
#[path = "harness/machine.rs"]
mod machine;
#[path = "harness/paired.rs"]
mod paired;
#[path = "models/stack.rs"]
mod stack;

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::train::{InferenceStep, TrainStep};
use firebox::{Lazy, Recorder, Trace, initialize};

use crate::gpt::{Gpt, Texts};
use crate::paired::{measure, time};
use crate::stack::{Rows, Stack};

type B = Autodiff<Lazy<Flex>>;

fn main() {
    machine::print();
    let mut result = "result: bench=recording".to_owned();
    if machine::wants("gpt") {
        result += &format!(" ops_per_second={:.0}", gpt_throughput());
    }
    if machine::wants("linearity") {
        let [alone, chain, gpt] = growths();
        result +=
            &format!(" growth_recorder={alone:.2} growth_chain={chain:.2} growth_gpt={gpt:.2}");
    }
    println!("{result}");
}

/// What recording a program costs, and what became of it.
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
    let mut optimizer = AdamWConfig::new().init::<B, M>();
    let (batch, model) = (batch.clone(), model.clone());
    let (recording, record) = time(|| {
        let iteration = || {
            let output = model.step(batch);
            let grads: GradientsParams = output.grads;
            let model = optimizer.step(1e-4, model, grads);
            (output.item, model, optimizer)
        };
        Recorder::new().record::<Flex, _>(iteration).expect("recordings do not nest here")
    });
    let (discarded, discard) = time(|| recording.discard());
    Recorded { record, discard, trace: discarded.trace }
}

/// Records a GPT of 12 layers. Calls a second.
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
    let rounds = measure(machine::rounds(41), &mut [&mut record, &mut discard]);
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

/// Records programs of some 300, 3,000 and 30,000 calls. What ten times the calls cost, at worst: by the recorder
/// alone, with automatic differentiation of a chain, and of a GPT.
fn growths() -> [f64; 3] {
    let device = Default::default();
    let alone = growth("the recorder alone: forward pass of GPTs", [11, 115, 1150], |layers| {
        let model = Gpt::<Lazy<Flex>>::new(layers, 64, 16, &device);
        initialize(&model);
        let texts = Texts::new(1, 16, &device);
        move || {
            let program = || InferenceStep::step(&model, texts.clone());
            let (recording, record) = time(|| Recorder::new().record::<Flex, _>(program));
            let discarded = recording.expect("recordings do not nest here").discard();
            Recorded { record, discard: Duration::ZERO, trace: discarded.trace }
        }
    });
    let rows = Rows::new(2, &device);
    let chain = growth("iterations of linear layers with AdamW", [11, 107, 1070], |layers| {
        let model = Stack::<B>::new(layers, &device);
        initialize(&model);
        let rows = rows.clone();
        move || record_iteration(&model, &rows)
    });
    let texts = Texts::new(1, 16, &device);
    let gpt = growth("iterations of GPTs with AdamW", [1, 8, 80], |layers| {
        let model = Gpt::<B>::new(layers, 64, 16, &device);
        initialize(&model);
        let texts = texts.clone();
        move || record_iteration(&model, &texts)
    });
    [alone, chain, gpt]
}

/// Records the programs that `make` makes for three depths. What ten times the calls cost, at worst.
fn growth<R: FnMut() -> Recorded>(
    title: &str,
    depths: [usize; 3],
    make: impl Fn(usize) -> R,
) -> f64 {
    let mut programs = depths.map(make);
    let calls = programs.each_mut().map(|record| record().trace.calls().count());
    // Every subject records as many layers as the deepest, so that all are timed for as long.
    let times = depths.map(|depth| depths[2] / depth);
    let [small, middle, large] = programs.each_mut();
    let mut small = || (0..times[0]).map(|_| small().record).sum::<Duration>() / times[0] as u32;
    let mut middle = || (0..times[1]).map(|_| middle().record).sum::<Duration>() / times[1] as u32;
    let mut large = || large().record;
    let rounds = measure(machine::rounds(15), &mut [&mut small, &mut middle, &mut large]);

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
