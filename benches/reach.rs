//! How far an 8 GiB card reaches with batches that are not split: as they are, with the optimizer's
//! state parked between steps, by computing activations again for at most a fifth more time, and by
//! both. Predictions, on firebox's pool.
//!
//! The models are one with a contrastive loss and one with batch normalization, whose batches must
//! not or should not be split, and a GPT of a single text, of which the longest is looked for.

use std::sync::Arc;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::train::{InferenceStep, TrainStep};
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::dry::{Card, Dry, DryPooledCuda};
use firebox::{
    Budget, Lazy, Learner, MemoryInfo, MicroBatch, RecomputePolicy, SavedPlanner, SavedTrace,
};
use firebox_testing::bench::{print_machine, rounds, wants};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::resnet::{Photos, ResNet50};
use firebox_testing::full_size::towers::{Pairs, Towers};

type B = Autodiff<Lazy<Flex>>;

/// The card, and the share of time that may be spent on computing again.
const CARD: &str = "RTX 3070";
const MOST: f64 = 0.2;

/// Tokens are tried in steps of this many.
const TOKENS: usize = 64;

fn main() {
    print_machine();
    let device = Default::default();
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["model", "as it is", "parked", "computed again", "times", "both", "times"]);
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    // In a test, a small model shows that the bench runs.
    let layers = if rounds(2) == 1 { 1 } else { 6 };
    if wants("towers") {
        let trace = trace(Towers::<B>::new(layers, &device), &Pairs::new(8, &device));
        row(&mut table, "two towers, pairs", largest(&trace));
    }
    if wants("resnet50") && rounds(2) > 1 {
        let trace = trace(ResNet50::<B>::new(&device), &Photos::new(8, 224, &device));
        row(&mut table, "ResNet-50, images of 224 x 224", largest(&trace));
    }
    if wants("texts") && rounds(2) > 1 {
        for (name, dropout) in [("GPT 12 x 768, texts of 512 tokens", 0.0), ("  with dropout", 0.1)]
        {
            let model = Gpt::<B>::with_dropout(dropout, 12, 768, 512, &device);
            let trace = trace(model, &Texts::new(8, 512, &device));
            row(&mut table, name, largest(&trace));
        }
    }
    if wants("length") && rounds(2) > 1 {
        for (name, dropout) in [("GPT 12 x 768, tokens of a text", 0.0), ("  with dropout", 0.1)] {
            let lengths = WAYS.map(|way| longest(dropout, way));
            row(&mut table, name, lengths);
        }
    }
    println!("{table}");
}

/// Whether tensors are computed again, and whether the optimizer's state is parked.
type Way = (bool, bool);

const WAYS: [Way; 4] = [(false, false), (false, true), (true, false), (true, true)];

fn row(table: &mut Table, name: &str, [plain, parked, again, both]: [usize; 4]) {
    let times = |most: usize| format!("{:.2}", most as f64 / plain as f64);
    let (of_again, of_both) = (times(again), times(both));
    let [plain, parked, again, both] = [plain, parked, again, both].map(|most| most.to_string());
    table.add_row([name, &plain, &parked, &again, &of_again, &both, &of_both]);
}

fn trace<M>(model: M, batch: &M::Input) -> SavedTrace
where
    M: TrainStep<Input: MicroBatch + Clone>
        + AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>
        + std::fmt::Display
        + 'static,
{
    let learner = Learner::builder().auto_batch().quiet();
    let learner = learner.build(model, AdamConfig::new().init(), 1e-3);
    learner.trace(batch).expect("the step is recorded")
}

fn planner(trace: &SavedTrace) -> SavedPlanner {
    let card = Card::named(CARD).expect("it is in the table");
    let model = Dry::<DryPooledCuda>::new(card.properties()).with_traces_of_ints(trace.about().int);
    let memory = MemoryInfo::new(card.memory(), card.memory() - card.context(), CARD.to_owned());
    let budget = Budget::free().resolve(&memory).expect("an empty card has room");
    SavedPlanner::new(CARD, Arc::new(model), budget)
        .recompute(RecomputePolicy::if_needed().at_most(MOST))
}

/// The largest batches, each way.
fn largest(trace: &SavedTrace) -> [usize; 4] {
    WAYS.map(|(recomputes, parks)| {
        let planner = planner(trace);
        let planner = if parks { planner.park_optimizer() } else { planner };
        let largest = match recomputes {
            true => planner.largest_batch_recomputed(trace),
            false => planner.largest_batch(trace),
        };
        largest.expect("it is planned")
    })
}

/// The longest text that fits alone.
fn longest(dropout: f64, (recomputes, parks): Way) -> usize {
    let device = Default::default();
    let policy = match recomputes {
        true => RecomputePolicy::if_needed().at_most(MOST),
        false => RecomputePolicy::never(),
    };
    let fits = |length: usize| {
        let model = Gpt::<B>::with_dropout(dropout, 12, 768, length, &device);
        let trace = trace(model, &Texts::new(1, length, &device));
        let planner = planner(&trace).recompute(policy);
        let planner = if parks { planner.park_optimizer() } else { planner };
        planner.plan(&trace, 1).is_ok()
    };
    let (mut fitting, mut above) = (1, 32);
    while fits(above * TOKENS) {
        (fitting, above) = (above, 2 * above);
    }
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        *(if fits(middle * TOKENS) { &mut fitting } else { &mut above }) = middle;
    }
    fitting * TOKENS
}
