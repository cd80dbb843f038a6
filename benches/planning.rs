//! Measures the cost of planning: the planner alone, and the whole search with recordings and
//! memory model, for the CPU and for a card.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Display;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer};
use burn::train::{InferenceStep, TrainStep};
use firebox::dry::{Card, Cuda, Dry, DryCuda, Lease};
use firebox::plan::{Accumulating, Need, PlanOptions, SavedPlanner, SavedTrace, Split, plan};
use firebox::trace::{Heap, Items, MemoryModel, StepRecorder, Trace, rehearse};
use firebox::train::ByMicroBatch;
use firebox::{Bytes, Lazy, Learner, LearnerBuilder, MicroBatch, initialize};
use firebox_testing::bench;
use firebox_testing::bench::paired::{measure, time};
use firebox_testing::full_size::cnn::{Cnn, Images};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::stack::{Rows, Stack};

type B = Autodiff<Lazy<Flex>>;

/// Time limit of `plan`, given the footprints.
const PLAN_TARGET: Duration = Duration::from_millis(50);
/// Cost limit of the whole search, in recordings of a rehearsal.
const SEARCH_TARGET: f64 = 10.0;
/// Time limit of the whole search on a card.
const CARD_TARGET: Duration = Duration::from_millis(1500);
/// Micro-steps per iteration that the Learner rehearses when a batch is split.
const PIECES: usize = 3;

fn main() {
    bench::print_machine();
    let device = Default::default();
    let mut result = "result: bench=planning".to_owned();
    if bench::wants("plan") {
        result += &format!(" plan_ms={:.4}", planner_alone());
    }
    if bench::wants("gpt") {
        let model = Gpt::new(12, 768, 16, &device);
        let ratio = search("GPT, 12 layers of 768, batch 64", model, Texts::new(64, 16, &device));
        result += &format!(" search_gpt={ratio:.2}");
    }
    if bench::wants("cnn") {
        let ratio = search("CNN, batch 256", Cnn::new(&device), Images::new(256, &device));
        result += &format!(" search_cnn={ratio:.2}");
    }
    if bench::wants("card") {
        let (first, later) = on_a_card();
        result += &format!(" card_first_s={first:.2} card_later_s={later:.2}");
    }
    println!("{result}");
}

/// Times the Learner's search for a GPT on a card that is not present. Returns the first in the
/// process and later ones, in seconds.
fn on_a_card() -> (f64, f64) {
    type OnCard = Autodiff<Lazy<DryCuda>>;
    const LENGTH: usize = 256;
    let card = Card::named("RTX 3060 12GB").expect("in the table");
    // Lends a device for the model and batches. None of their data is in memory.
    let lease = Lease::<Cuda>::take(&card.properties()).expect("no other card was asked for");
    let device = lease.device();
    let model = Gpt::<OnCard>::new(12, 768, LENGTH, device);
    initialize(&model);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(10));
    let build = |builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        builder.build::<OnCard, _, _, _>(model.clone(), AdamWConfig::new().init(), 1e-3)
    };
    let learner = build(builder);
    let batch = |items| Texts::new(items, LENGTH, device);
    let (report, first) = time(|| learner.plan(&batch(64)).expect("one item fits"));
    println!(
        "\nthe whole search, GPT, 12 layers of 768, {LENGTH} tokens, {}: {}",
        card.name(),
        report.plan
    );
    println!("  rehearsals recorded                {:>10}", report.cost.rehearsals);
    for answer in report.plan.asked() {
        println!("    {:<30}   {:>10}", answer.split.to_string(), answer.need.peak.to_string());
    }
    println!("  calls recorded                     {:>10}", report.cost.operations);
    let target = CARD_TARGET.as_secs_f64();
    println!(
        "  the first search                   {:>10.2} s   target: under {target}",
        first.as_secs_f64()
    );
    let subject = batch(64);
    let rounds =
        measure(bench::rounds(5), &mut [&mut || time(|| black_box(learner.plan(&subject))).1]);
    let later = rounds.seconds(0);
    println!(
        "  later ones                         {:>10.2} s   (quartiles {:.2} to {:.2})",
        later.median, later.low, later.high
    );
    let (trace, recorded) = time(|| learner.trace(&batch(24)).expect("it follows rules"));
    let file = trace.to_bytes();
    let (loaded, read) = time(|| SavedTrace::from_bytes(&file).expect("it was just written"));
    let model = Arc::new(Dry::<DryCuda>::new(card.properties()));
    let planner = SavedPlanner::new(card.name(), model, Bytes::gib(10));
    let (saved, planned) = time(|| planner.plan(&loaded, 64).expect("one item fits"));
    assert_eq!(saved.plan.split(), report.plan.split());
    println!("  a saved trace: recorded in         {:>10.2} s", recorded.as_secs_f64());
    println!("    its file                         {:>10} KiB", file.len() / 1024);
    println!("    read in                          {:>10.2} s", read.as_secs_f64());
    println!("    a search with it                 {:>10.2} s", planned.as_secs_f64());
    for items in [64, 4096] {
        black_box(learner.plan(&batch(items)).expect("one item fits"));
        println!("  most memory of the process, batches of {items:<5} {:>6}", most_memory());
    }
    (first.as_secs_f64(), later.median)
}

/// The most memory that this process has held, on Linux.
fn most_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    most.map_or_else(|| "unknown".into(), |most| most.trim().to_owned())
}

/// Times `plan` for a model of 100 layers whose footprints are known. Returns milliseconds.
fn planner_alone() -> f64 {
    const ITEMS: usize = 4096;
    let device = Default::default();
    let model = Stack::<B>::new(100, &device);
    initialize(&model);
    let batch = Rows::<B>::new(ITEMS, &device);
    let heap = Heap::flex();
    let mut footprints: HashMap<(usize, Accumulating), Need> = HashMap::new();
    let mut of = |items: Items, accumulating| {
        let need = footprints.entry((items.get(), accumulating)).or_insert_with(|| {
            let pieces = if accumulating == Accumulating::Yes { PIECES } else { 1 };
            Need::upper_bound(heap.footprint(&rehearsal(&model, &batch, items.get(), pieces)).peak)
        });
        need.clone()
    };
    let one = of(Items::new(1), Accumulating::Yes).peak;
    // On the host the largest micro-batch decides.
    let mut known = |split: Split| Ok::<_, Infallible>(of(split.largest(), split.accumulating()));
    let options = PlanOptions::new();
    let items = Items::new(ITEMS);
    let whole = plan(items, Bytes::MAX, &options, &mut known).expect("everything fits").peak();
    // What one item needs, plus an eighth of what the rest of the batch adds.
    let budget = Bytes::new(one.get() + whole.get().saturating_sub(one.get()) / 8);
    let split = plan(items, budget, &options, &mut known).expect("one item fits");

    let mut subject = || time(|| black_box(plan(items, budget, &options, &mut known))).1;
    let rounds = measure(bench::rounds(1001), &mut [&mut subject]);
    let time = rounds.seconds(0);
    let (low, ms, high) = (time.low * 1e3, time.median * 1e3, time.high * 1e3);
    println!("\nplan() alone, 100 layers, footprints given: {split}");
    println!("  questions  {:>10}", split.asked().len());
    let target = PLAN_TARGET.as_millis();
    println!(
        "  time       {ms:>10.4} ms  target: under {target} (quartiles {low:.4} to {high:.4})"
    );
    ms
}

/// Records two iterations of `pieces` micro-steps as the search does, and discards the recording.
fn rehearsal<M>(model: &M, batch: &M::Input, items: usize, pieces: usize) -> Trace
where
    M: TrainStep + AutodiffModule<B>,
    M::Input: MicroBatch,
{
    let recorder = StepRecorder::new().substitute_random().refuse_reads();
    let rehearsal = rehearse::<B, _>(&recorder, model, |model| {
        let mut model = model.clone();
        let mut optimizer = AdamConfig::new().init::<B, M>();
        for _ in 0..2 {
            let mut grads = GradientsParams::new();
            for _ in 0..pieces {
                let micro = batch.range(0..items);
                grads = model.step(micro).grads;
            }
            model = optimizer.step(1e-3, model.clone(), grads);
        }
    });
    rehearsal.expect("recordings do not nest here").trace
}

/// Records one iteration: forward, backward, optimizer step.
fn iteration<M>(model: &M, batch: &M::Input) -> Trace
where
    M: TrainStep + AutodiffModule<B>,
    M::Input: MicroBatch,
{
    let recorder = StepRecorder::new().substitute_random().refuse_reads();
    let rehearsal = rehearse::<B, _>(&recorder, model, |model| {
        let mut optimizer = AdamConfig::new().init::<B, M>();
        let output = model.step(batch.range(0..1));
        drop(optimizer.step(1e-3, model.clone(), output.grads));
    });
    rehearsal.expect("recordings do not nest here").trace
}

/// Times the search for the fewest micro-batches of a batch that must be split. Returns the time in
/// recordings of a rehearsal.
fn search<M>(title: &str, model: M, batch: M::Input) -> f64
where
    M: TrainStep + AutodiffModule<B> + Display + 'static,
    M::Input: MicroBatch,
    M::InnerModule: InferenceStep,
    <M::InnerModule as InferenceStep>::Input: MicroBatch,
{
    initialize(&model);
    let builder = |budget: Bytes| Learner::builder().auto_batch().memory(budget);
    let build = |builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        builder.build::<B, _, _, _>(model.clone(), AdamConfig::new().init(), 1e-3)
    };
    let learner = |budget| build(builder(budget));
    let whole = learner(Bytes::gib(1 << 20)).plan(&batch).expect("everything fits");
    let heap = Heap::flex();
    let one = heap.footprint(&rehearsal(&model, &batch, 1, PIECES)).peak;
    // What one item needs, plus a quarter of what the rest of the batch adds.
    let budget = Bytes::new(one.get() + whole.predicted().get().saturating_sub(one.get()) / 4);
    let report = learner(budget).plan(&batch).expect("one item fits");
    let size = report.micro_batch();

    let searching = learner(budget);
    let trace = rehearsal(&model, &batch, size, PIECES);
    let rounds = measure(
        bench::rounds(15),
        &mut [
            &mut || time(|| black_box(searching.plan(&batch))).1,
            &mut || time(|| black_box(rehearsal(&model, &batch, size, PIECES))).1,
            &mut || time(|| black_box(iteration(&model, &batch))).1,
            &mut || time(|| black_box(heap.footprint(&trace))).1,
        ],
    );
    let ms = |subject| rounds.seconds(subject).median * 1e3;
    let (ratio, iterations) = (rounds.ratio(0, 1), rounds.ratio(0, 2));
    let calls = trace.calls().count();
    println!("\nthe whole search, {title} in {}: {}", report.budget, report.plan);
    println!("  rehearsals recorded                {:>10}", report.cost.rehearsals);
    println!("  calls recorded                     {:>10}", report.cost.operations);
    println!("  the search                         {:>10.2} ms", ms(0));
    println!("  one recording of a rehearsal       {:>10.2} ms  ({calls} calls)", ms(1));
    println!("  its footprint                      {:>10.2} ms", ms(3));
    println!("  one recording of an iteration      {:>10.2} ms", ms(2));
    println!(
        "  search / recording of a rehearsal  {:>10.2}     target: under {SEARCH_TARGET} (quartiles {:.2} to {:.2})",
        ratio.median, ratio.low, ratio.high
    );
    println!("  search / recording of an iteration {:>10.2}", iterations.median);
    ratio.median
}
