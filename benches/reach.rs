//! How far an 8 GiB card reaches with batches that are not split: as they are, with the optimizer's
//! state parked between steps, in 16 bit, by computing activations again for at most a fifth more
//! time, and by all three. Predictions, on firebox's pool.
//!
//! The models are one with a contrastive loss and one with batch normalization, whose batches must
//! not or should not be split, a GPT of a single text, of which the longest is looked for, and a
//! GPT that is mostly parameters, of which the one with the most layers is looked for.

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::train::{InferenceStep, TrainStep};
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::dry::Card;
use firebox::plan::{MemoryInfo, SavedPlanner, SavedTrace, rates_of};
use firebox::{Budget, Half, Lazy, Learner, MicroBatch, RecomputePolicy, TrainingBackend};
use firebox_testing::bench::{print_machine, rounds, wants};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::resnet::{Photos, ResNet50};
use firebox_testing::full_size::towers::{Pairs, Towers};

type Full = Autodiff<Lazy<Flex>>;
type Sixteen = Autodiff<Half<Lazy<Flex>>>;

/// The card, and the share of time that may be spent on recomputing.
const CARD: &str = "RTX 3070";
const MOST: f64 = 0.2;

/// Tokens are tried in steps of this many.
const TOKENS: usize = 64;

/// The width of the GPT with many layers, and the tokens of its text.
const WIDTH: usize = 1024;
const LENGTH: usize = 256;

/// What is done to reach farther.
#[derive(Clone, Copy)]
struct Way {
    recomputes: bool,
    parks: bool,
    narrow: bool,
}

const AS_IT_IS: Way = Way { recomputes: false, parks: false, narrow: false };

const WAYS: [Way; 5] = [
    AS_IT_IS,
    Way { parks: true, ..AS_IT_IS },
    Way { narrow: true, ..AS_IT_IS },
    Way { recomputes: true, ..AS_IT_IS },
    Way { recomputes: true, parks: true, narrow: true },
];

/// Both traces of a model: in 32 and in 16 bit.
macro_rules! traces {
    ($model:ident::$new:ident($($arg:expr),*), $batch:expr) => {{
        [
            trace::<Full, _>($model::<Full>::$new($($arg),*), &$batch),
            trace::<Sixteen, _>($model::<Sixteen>::$new($($arg),*), &$batch),
        ]
    }};
}

fn main() {
    print_machine();
    let device = Default::default();
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "model",
        "as it is",
        "parked",
        "16 bit",
        "recomputed",
        "times",
        "all",
        "times",
    ]);
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    // In a test, a small model shows that the bench runs.
    let layers = if rounds(2) == 1 { 1 } else { 6 };
    if wants("towers") {
        let traces = traces!(Towers::new(layers, &device), Pairs::new(8, &device));
        row(&mut table, "two towers, pairs", largest(&traces));
    }
    if wants("resnet50") && rounds(2) > 1 {
        let traces = traces!(ResNet50::new(&device), Photos::new(8, 224, &device));
        row(&mut table, "ResNet-50, images of 224 x 224", largest(&traces));
    }
    if wants("texts") && rounds(2) > 1 {
        for (name, dropout) in [("GPT 12 x 768, texts of 512 tokens", 0.0), ("  with dropout", 0.1)]
        {
            let traces = traces!(
                Gpt::with_dropout(dropout, 12, 768, 512, &device),
                Texts::new(8, 512, &device)
            );
            row(&mut table, name, largest(&traces));
        }
    }
    if wants("length") && rounds(2) > 1 {
        for (name, dropout) in [("GPT 12 x 768, tokens of a text", 0.0), ("  with dropout", 0.1)] {
            row(&mut table, name, WAYS.map(|way| longest(dropout, way)));
        }
    }
    if wants("depth") && rounds(2) > 1 {
        row(&mut table, "GPT of width 1024, layers, one text of 256 tokens", WAYS.map(deepest));
    }
    println!("{table}");
}

fn row(table: &mut Table, name: &str, [plain, parked, narrow, again, all]: [usize; 5]) {
    let times = |most: usize| format!("{:.2}", most as f64 / plain as f64);
    let (of_again, of_all) = (times(again), times(all));
    let [plain, parked, narrow, again, all] =
        [plain, parked, narrow, again, all].map(|most| most.to_string());
    table.add_row([name, &plain, &parked, &narrow, &again, &of_again, &all, &of_all]);
}

fn trace<B, M>(model: M, batch: &M::Input) -> SavedTrace
where
    B: TrainingBackend,
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
    let memory = MemoryInfo::new(card.memory(), card.memory() - card.context(), CARD.to_owned());
    let budget = Budget::free().resolve(&memory).expect("an empty card has room");
    SavedPlanner::new(CARD, card.model(trace.about().int), budget)
        .rates(rates_of(&card))
        .recompute(RecomputePolicy::if_needed().at_most(MOST))
}

/// The planner of a way.
fn planner_of(trace: &SavedTrace, way: Way) -> SavedPlanner {
    let planner = planner(trace);
    let planner = match way.recomputes {
        true => planner,
        false => planner.recompute(RecomputePolicy::never()),
    };
    if way.parks { planner.park_optimizer() } else { planner }
}

/// The largest batches, each way.
fn largest(traces: &[SavedTrace; 2]) -> [usize; 5] {
    WAYS.map(|way| {
        let trace = &traces[usize::from(way.narrow)];
        let planner = planner_of(trace, way);
        planner.largest_batch_recomputed(trace).expect("it is planned")
    })
}

/// The most of something that fits, in steps of `step`.
fn most(step: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut above) = (0, 8);
    while fits(above * step) {
        (fitting, above) = (above, 2 * above);
    }
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        *(if fits(middle * step) { &mut fitting } else { &mut above }) = middle;
    }
    fitting * step
}

/// A GPT of one text.
fn one_text(way: Way, (layers, width, length): (usize, usize, usize), dropout: f64) -> bool {
    let device = Default::default();
    let trace = match way.narrow {
        true => trace::<Sixteen, _>(
            Gpt::<Sixteen>::with_dropout(dropout, layers, width, length, &device),
            &Texts::new(1, length, &device),
        ),
        false => trace::<Full, _>(
            Gpt::<Full>::with_dropout(dropout, layers, width, length, &device),
            &Texts::new(1, length, &device),
        ),
    };
    planner_of(&trace, way).plan(&trace, 1).is_ok()
}

/// The longest text that fits alone.
fn longest(dropout: f64, way: Way) -> usize {
    most(TOKENS, |length| one_text(way, (12, 768, length), dropout))
}

/// The most layers that fit with one text.
fn deepest(way: Way) -> usize {
    most(1, |layers| one_text(way, (layers, WIDTH, LENGTH), 0.0))
}
