//! What recomputation costs: a step within a half, a third and a fifth of its activations, by the
//! cost model of an RTX 4090, against a lower bound; and how long choosing takes.
//!
//! Activations are what the step takes at its peak above what existed before it. The peaks are
//! those of tensors, and of the CPU's memory model on the rewritten trace, which is verified.

use std::time::Instant;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::train::TrainStep;
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::{Bytes, Heap, Lazy, MemoryModel, Recorder, Trace, initialize};
use firebox_recompute::{Demand, Rates, apply, check, lower_bound, select};
use firebox_testing::bench::{print_machine, wants};
use firebox_testing::full_size::cnn::{Cnn, Images};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::zoo::{self, Zoo};

type B = Autodiff<Lazy<Flex>>;

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
        "bound",
        "tensors",
        "heap",
        "chosen in",
    ]);
    let gpt = |layers, width, length, items| {
        let model = Gpt::<B>::new(layers, width, length, &device);
        trace(&model, Texts::new(items, length, &device))
    };
    if wants("gpt") {
        rows(&mut table, "GPT 12 x 768, 4 x 512 tokens", &gpt(12, 768, 512, 4));
        rows(&mut table, "GPT 48 x 512, 2 x 512 tokens", &gpt(48, 512, 512, 2));
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
    let recording = Recorder::new().record::<Flex, _>(|| model.step(batch).grads);
    recording.expect("recordings do not nest here").discard().trace
}

fn rows(table: &mut Table, name: &str, trace: &Trace) {
    let heap = Heap::flex();
    let demand = Demand::of(Rates::RTX_4090.costs(trace));
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
        let bound = lower_bound(trace, limit, &demand.time);
        let heaps = [trace, &rewritten.trace].map(|trace| heap.footprint(trace).peak);
        let percent = |cost: f64| format!("{:.1} %", 100.0 * cost / whole);
        let reached = if selected.peak <= limit { "" } else { " (not reached)" };
        table.add_row([
            name.to_owned(),
            trace.calls().count().to_string(),
            activations.to_string(),
            format!("1/{part}{reached}"),
            percent(selected.cost),
            bound.map_or("none".to_owned(), percent),
            format!("{} of {peak}", selected.peak),
            format!("{} of {}", heaps[1], heaps[0]),
            format!("{:.2} s", time.as_secs_f64()),
        ]);
    }
}
