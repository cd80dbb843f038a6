//! What recomputation costs: a step within a half, a third and a fifth of its activations, by the
//! cost model of an RTX 4090; how long choosing takes; and, in the part `clock`, what it costs on
//! the CPU by the clock.
//!
//! Activations are what the step takes at its peak above what existed before it. The peaks are
//! those of tensors, and of the CPU's memory model on the rewritten trace, which is verified. For
//! the clock, steps run as recorded and rewritten in turn. The part `rates` compares choices made
//! for a device with those made for another one.

use std::sync::Arc;
use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::tensor::{BoolStore, DType};
use burn::train::TrainStep;
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::dry::Card;
use firebox::plan::rates_of;
use firebox::trace::{Heap, MemoryModel, StepRecorder, Trace};
use firebox::{Bytes, Lazy, initialize};
use firebox_recompute::{Demand, Program, Rates, apply, check, select};
use firebox_testing::bench::paired::{measure, time};
use firebox_testing::bench::{print_machine, rounds, wants};
use firebox_testing::full_size::cnn::{Cnn, Images};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::resnet::{Photos, ResNet50};
use firebox_testing::zoo::{self, Zoo};

type B = Autodiff<Lazy<Flex>>;

/// How often a program is asked whether it is that of a recording, as each step does once.
const LOOKUPS: u32 = 100;

fn main() {
    print_machine();
    let device = Default::default();
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "step",
        "calls",
        "activations",
        "within",
        "more time",
        "tensors",
        "heap",
        "chosen in",
        "applied in",
    ]);
    let gpt = |dropout, layers, width, length, items| {
        let model = Gpt::<B>::with_dropout(dropout, layers, width, length, &device);
        trace(&model, Texts::new(items, length, &device))
    };
    if wants("gpt") {
        rows(&mut table, "GPT 12 x 768, 4 x 512 tokens", &gpt(0.0, 12, 768, 512, 4));
        rows(&mut table, "  with dropout", &gpt(0.1, 12, 768, 512, 4));
        rows(&mut table, "GPT 48 x 512, 2 x 512 tokens", &gpt(0.0, 48, 512, 512, 2));
        rows(&mut table, "  with dropout", &gpt(0.1, 48, 512, 512, 2));
    }
    if wants("resnet50") {
        let model = ResNet50::<B>::new(&device);
        let photos = Photos::new(32, 224, &device);
        rows(&mut table, "ResNet-50, 32 x 224 x 224", &trace(&model, photos));
    }
    if wants("cnn") {
        let images = Images::new(256, &device);
        rows(&mut table, "CNN, 256 images", &trace(&Cnn::<B>::new(&device), images));
    }
    if wants("zoo") {
        rows(&mut table, "ResNet of the zoo, 128", &of_zoo::<zoo::ResNet<B>>(128));
        rows(&mut table, "U-Net of the zoo, 128", &of_zoo::<zoo::UNet<B>>(128));
        rows(&mut table, "LSTM of the zoo, 512", &of_zoo::<zoo::Recurrent<B>>(512));
    }
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    println!("{table}");
    if wants("clock") {
        clock();
    }
    if wants("rates") {
        rates();
    }
}

/// What a choice costs on other devices than the one that it was made for.
fn rates() {
    let device = Default::default();
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["step", "within", "device", "flop/byte", "chosen for it", "for another"]);
    let gpt = Gpt::<B>::with_dropout(0.1, 12, 768, 512, &device);
    elsewhere(&mut table, "GPT 12 x 768, dropout", &trace(&gpt, Texts::new(4, 512, &device)));
    let resnet = ResNet50::<B>::new(&device);
    elsewhere(&mut table, "ResNet-50", &trace(&resnet, Photos::new(32, 224, &device)));
    println!("{table}");
    println!("assumed of the CPU: {:?}", Rates::CPU);
}

fn elsewhere(table: &mut Table, name: &str, trace: &Trace) {
    let of_card = |name: &'static str| {
        let card = Card::named(name).expect("in the table");
        (name, rates_of(&card).expect("its throughput is known"), Rates::RTX_4090)
    };
    // Many cores have more than their share of operations, and less of the memory.
    let many = Rates { flops: 20.0 * Rates::CPU.flops, ..times_three(Rates::CPU) };
    let devices = [
        of_card("RTX 3070"),
        of_card("A100 40GB"),
        of_card("L4"),
        of_card("H100 80GB"),
        ("CPU, many cores", many, Rates::CPU),
    ];
    let bools = DType::Bool(BoolStore::Native);
    let demand = |rates: &Rates| Demand::new(trace, rates).with_bools(bools);
    let existing: Bytes = trace.existing().map(|of| trace.tensor(of).bytes()).sum();
    let peak = select(trace, Bytes::MAX, &demand(&Rates::CPU)).expect("nothing is repeated").peak;
    for part in [2, 3] {
        let limit = existing + (peak - existing).scale(1.0 / f64::from(part));
        for (device, own, assumed) in &devices {
            let total = |trace: &Trace| own.costs(trace).iter().sum::<f64>();
            let more = |rates: &Rates| {
                let selected = select(trace, limit, &demand(rates))?;
                let rewritten = apply(trace, &selected.recipe).expect("it is its recipe");
                Some(total(&rewritten.trace) / total(trace) - 1.0)
            };
            let shown = |more: Option<f64>| match more {
                Some(more) => format!("{:.1} %", 100.0 * more),
                None => "-".to_owned(),
            };
            table.add_row([
                name.to_owned(),
                format!("1/{part}"),
                (*device).to_owned(),
                format!("{:.0}", own.flops / own.bandwidth),
                shown(more(own)),
                shown(more(assumed)),
            ]);
        }
    }
}

fn times_three(rates: Rates) -> Rates {
    let Rates { bandwidth, mixed_bandwidth, .. } = rates;
    Rates { bandwidth: 3.0 * bandwidth, mixed_bandwidth: 3.0 * mixed_bandwidth, ..rates }
}

/// Times steps on the CPU, as they are recorded and within parts of their activations.
fn clock() {
    let device = Default::default();
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["step", "seconds", "within", "heap", "predicted", "more time"]);
    let gpt = Gpt::<B>::with_dropout(0.0, 24, 128, 256, &device);
    timed(&mut table, "GPT 24 x 128, 4 x 256 tokens", gpt, || Texts::new(4, 256, &device));
    let resnet = ResNet50::<B>::new(&device);
    timed(&mut table, "ResNet-50, 16 x 128 x 128", resnet, || Photos::new(16, 128, &device));
    println!("{table}");
}

fn timed<M: TrainStep + AutodiffModule<B>>(
    table: &mut Table,
    name: &str,
    model: M,
    batch: impl Fn() -> M::Input,
) {
    let heap = Heap::flex();
    initialize(&model);
    let record = || {
        let batch = batch();
        let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch).grads);
        recording.expect("recordings do not nest here")
    };
    // Running statistics come from a step from the second one on.
    record().run();
    let recording = record();
    let recorded = recording.trace().clone();
    recording.run();
    let footprint = heap.footprint(&recorded);
    let existing: Bytes = recorded.existing().map(|of| recorded.tensor(of).bytes()).sum();
    let run = |program: Option<&Arc<Program>>| {
        let step = || {
            let mut recording = record();
            assert!(program.is_none_or(|program| recording.rewrite(program, || ())));
            recording.run()
        };
        time(step).1
    };
    let demand = Demand::new(&recorded, &Rates::CPU);
    for part in [2.0, 3.0] {
        let peak = select(&recorded, Bytes::MAX, &demand).expect("nothing is repeated").peak;
        let limit = existing + (peak - existing).scale(1.0 / part);
        let within = format!("1/{part}");
        let selected = select(&recorded, limit, &demand).filter(|found| found.peak <= limit);
        let Some(selected) = selected else {
            table.add_row([name, "", &within, "nothing was found", "", ""]);
            continue;
        };
        let program = Program::new(&recorded, &selected.recipe).expect("it passes the checker");
        let program = Arc::new(program);
        let (mut as_recorded, mut again) = (|| run(None), || run(Some(&program)));
        let rounds = measure(rounds(9), &mut [&mut as_recorded, &mut again]);
        let more = rounds.ratio(1, 0);
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        table.add_row([
            name.to_owned(),
            format!("{:.3}", rounds.seconds(0).median),
            within,
            format!("{} of {}", heap.footprint(program.trace()).peak, footprint.peak),
            format!("{:.1} %", 100.0 * selected.cost / demand.total()),
            format!(
                "{:.1} % ({:.1} to {:.1})",
                percent(more.median),
                percent(more.low),
                percent(more.high)
            ),
        ]);
    }
}

fn of_zoo<M>(items: usize) -> Trace
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let device = Default::default();
    trace(&M::new(&device), M::batch(&(0..items).collect::<Vec<_>>(), &device))
}

/// A forward and a backward pass, recorded.
fn trace<M: TrainStep + AutodiffModule<B>>(model: &M, batch: M::Input) -> Trace {
    initialize(model);
    let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch).grads);
    recording.expect("recordings do not nest here").discard().trace
}

fn rows(table: &mut Table, name: &str, trace: &Trace) {
    let heap = Heap::flex();
    let demand = Demand::new(trace, &Rates::RTX_4090);
    let whole = demand.total();
    let existing: Bytes = trace.existing().map(|tensor| trace.tensor(tensor).bytes()).sum();
    let unlimited = select(trace, Bytes::MAX, &demand).expect("nothing is repeated");
    let peak = unlimited.peak;
    let activations = peak - existing;
    for part in [2.0, 3.0, 5.0] {
        let limit = existing + activations.scale(1.0 / part);
        let began = Instant::now();
        let selected = select(trace, limit, &demand);
        let time = began.elapsed();
        let Some(selected) = selected else {
            table.add_row([name, "", "", &format!("1/{part}"), "nothing was found"]);
            continue;
        };
        let rewritten = apply(trace, &selected.recipe).expect("it is a recipe for this trace");
        check(trace, &rewritten).expect("values stay what they are");
        let program = Program::new(trace, &selected.recipe).expect("it was verified");
        let began = Instant::now();
        assert!((0..LOOKUPS).all(|_| program.is_of(trace)));
        let applied = began.elapsed() / LOOKUPS;
        let heaps = [trace, &rewritten.trace].map(|trace| heap.footprint(trace).peak);
        let percent = |cost: f64| format!("{:.1} %", 100.0 * cost / whole);
        let reached = if selected.peak <= limit { "" } else { " (not reached)" };
        table.add_row([
            name.to_owned(),
            trace.calls().count().to_string(),
            activations.to_string(),
            format!("1/{part}{reached}"),
            percent(selected.cost),
            format!("{} of {peak}", selected.peak),
            format!("{} of {}", heaps[1], heaps[0]),
            format!("{:.2} s", time.as_secs_f64()),
            format!("{:.0} µs", applied.as_secs_f64() * 1e6),
        ]);
    }
}
