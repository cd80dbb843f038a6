//! Tests the largest batch that runs unsplit: the planned size against the size the driver has room
//! for.

use firebox::Bytes;
use firebox_testing::machine::device;
use libtest_mimic::{Failed, Trial};

use crate::child::{Job, Pools, Task};
use crate::trial::{CARD, LIMIT, Left, card, ensure, only, run_with, test};

/// The models, and budgets that hold many, some and few pages.
const MODELS: [&str; 7] = ["mlp", "cnn", "resnet", "unet", "encoder", "gpt", "lstm"];
const BUDGETS: [Bytes; 3] = [Bytes::mib(2200), Bytes::mib(900), Bytes::mib(330)];

const CARDS: [&str; 4] = [CARD, "T4", "RTX 4090", "H100 80GB"];

/// Minimum ratio of the planned size to the largest batch that runs.
const SHARE: f64 = 0.95;
/// Sizes to try above the planned one, in hundredths of it, until one does not run.
const ABOVE: std::ops::RangeInclusive<u32> = 101..=130;
/// Sizes below the planned one, in hundredths. All of them must run.
const BELOW: [u32; 5] = [80, 90, 94, 97, 99];
/// Sizes to tune before the largest is planned, in hundredths of the earlier plan. The tuner
/// chooses kernels for a range of sizes. Where none is chosen yet, the kernel that takes the most
/// memory counts, and a larger batch is split for it.
const TUNED: [usize; 2] = [100, 106];
/// Number of times the planned size must run.
const PROCESSES: usize = 3;
/// Limit of rounds. Planning and tuning alternate until the plan stays the same, because a larger
/// batch may need kernels that are not tuned yet.
const ROUNDS: usize = 4;

/// A whole card of items takes minutes to plan, tune and run in a debug build.
const SEARCH_LIMIT: std::time::Duration = LIMIT.saturating_mul(30);

/// The most that the driver may have given out, over what was in use at the peak, where a batch
/// fills the card.
const MOST_UNUSED: f64 = 1.12;

/// One model in one budget on one card.
struct Search {
    card: &'static str,
    model: &'static str,
    memory: Bytes,
    pools: Pools,
    /// Compiled kernels and tuned choices.
    kernels: tempfile::TempDir,
}

impl Search {
    /// A job for batches of `items` items, unsplit, with nothing else.
    fn job(&self, items: usize) -> Job {
        let kernels = self.kernels.path().to_owned();
        let micro_batch = Some(items);
        Job { pools: self.pools, workers: 0, micro_batch, ..Job::new(self.model, items, kernels) }
    }

    /// The largest batch planned to run unsplit.
    fn planned(&self) -> Result<usize, Failed> {
        let task = Task::FindLargest;
        let job = Job { memory: Some(self.memory), task, ..self.job(1) };
        let left = run_with(&only(self.card), &job, SEARCH_LIMIT, |_, _| ())?;
        let largest = left.fitted()?.largest;
        largest.ok_or_else(|| left.complaint("no size was found"))
    }

    /// Tunes the kernels that batches of `items` items need, on such a card with more memory: plans
    /// count the candidate that needs most until a kernel is chosen.
    fn tune(&self, items: usize) -> Result<(), Failed> {
        let mut machine = device(&card(self.card));
        machine.memory *= 4;
        let machine = firebox_blank::Settings::new([machine]);
        let job = Job { memory: Some(card(self.card).memory() * 3), ..self.job(items) };
        run_with(&machine, &job, SEARCH_LIMIT, |_, _| ())?.fitted()?;
        Ok(())
    }

    /// Runs batches of `items` items on a card where the driver gives out no more than the budget.
    /// `memory` is what the plan may use.
    fn run(&self, items: usize, memory: Bytes) -> Result<Left, Failed> {
        let machine = device(&card(self.card)).leaving(self.memory.get());
        let machine = firebox_blank::Settings::new([machine]);
        let job = Job { memory: Some(memory), ..self.job(items) };
        run_with(&machine, &job, SEARCH_LIMIT, |_, _| ())
    }

    /// Whether batches of `items` items run without a plan that limits them: no allocation is
    /// refused.
    fn runs(&self, items: usize) -> Result<bool, Failed> {
        self.tune(items)?;
        let left = self.run(items, card(self.card).memory())?;
        let refused = left.books.as_ref().map_or(0, |books| books.device(0).refused());
        Ok(left.fitted().is_ok() && refused == 0)
    }

    /// The largest batch planned to run unsplit, once the kernels of its size are tuned.
    fn planned_when_tuned(&self) -> Result<usize, Failed> {
        let mut planned = self.planned()?;
        for _ in 0..ROUNDS {
            for share in TUNED {
                self.tune(planned * share / 100)?;
            }
            let before = std::mem::replace(&mut planned, self.planned()?);
            if planned == before {
                break;
            }
        }
        Ok(planned)
    }

    /// Runs the largest planned batch, and compares what the driver gave out with what was in use.
    fn fill(&self) -> Result<(), Failed> {
        let Self { card, model, memory, .. } = self;
        let planned = self.planned_when_tuned()?;
        let left = self.run(planned, *memory)?;
        let books = left.books.as_ref().ok_or("the child kept no books")?;
        let refused = books.device(0).refused();
        let in_use = left.fitted()?.most_in_use.ok_or("nothing was in use")?;
        let reserved = left.peak();
        let unused = reserved.ratio(in_use);
        println!(
            "{model} in {memory} on {card}: {planned} items, {reserved} at the driver, {in_use} in \
             use, {unused:.3}"
        );
        ensure(refused == 0 && reserved <= *memory && unused <= MOST_UNUSED, || {
            left.complaint(&format!("{reserved} of {memory}, {refused} refused, {unused:.3}"))
        })
    }

    fn compare(&self) -> Result<(), Failed> {
        let Self { card, model, memory, .. } = self;
        let planned = self.planned_when_tuned()?;
        let mut unused = String::new();
        for _ in 0..PROCESSES {
            let left = self.run(planned, *memory)?;
            if let Some(most_in_use) = left.fitted()?.most_in_use {
                unused = format!(", {:.3} of what is in use", left.peak().ratio(most_in_use));
            }
            let books = left.books.as_ref().ok_or("the child kept no books")?;
            let refused = books.device(0).refused();
            ensure(refused == 0 && left.peak() <= *memory, || {
                left.complaint(&format!("{planned} are planned, and the driver refused"))
            })?;
        }
        let of = |share: u32| planned * share as usize / 100;
        for share in BELOW {
            let runs = self.runs(of(share))?;
            ensure(runs, || {
                format!("{model} in {memory} on {card}: {} do not run", of(share)).into()
            })?;
        }
        let mut largest = planned;
        let mut size = planned;
        for share in ABOVE {
            size = of(share).max(size + 1);
            if !self.runs(size)? {
                break;
            }
            largest = size;
        }
        // Trying larger sizes has tuned kernels that the plan did not know.
        let again = if largest == planned { planned } else { self.planned()? };
        let share = planned.max(again) as f64 / largest as f64;
        println!(
            "{model} in {memory} on {card}: planned {planned}, then {again}, largest {largest}, \
             {share:.3}{unused}"
        );
        ensure(share >= SHARE, || format!("{again} are planned, and {largest} run").into())
    }
}

/// The tests: all budgets on one card, and one budget on each of the others. Each takes minutes and
/// runs only with `-- --ignored`.
pub fn tests() -> Vec<Trial> {
    let all = BUDGETS.map(|memory| (CARD, memory));
    let others = CARDS.into_iter().filter(|card| *card != CARD).map(|card| (card, BUDGETS[1]));
    let models = |(card, memory)| MODELS.map(|model| (card, memory, model));
    let searches = all.into_iter().chain(others).flat_map(models);
    let of_each = |search| [Pools::Burns, Pools::Ours].map(|pools| (search, pools));
    let trial = |((card, memory, model), pools): ((&'static str, Bytes, &'static str), Pools)| {
        let card_name = card.replace(' ', "_");
        let name = format!("largest_{model}_{}_{card_name}{}", memory.get() >> 20, pools.suffix());
        let search = move || {
            let kernels = tempfile::tempdir()?;
            Search { card, model, memory, pools, kernels }.compare()
        };
        test(name.to_lowercase(), search).with_ignored_flag(true)
    };
    searches.flat_map(of_each).map(trial).chain(whole_cards()).collect()
}

/// The tests with all memory of a card, on our pool.
fn whole_cards() -> impl Iterator<Item = Trial> {
    let of_card = |card| MODELS.map(|model| (card, model));
    CARDS.into_iter().flat_map(of_card).map(|(name, model)| {
        let fill = move || {
            let (memory, kernels) = (card(name).memory().scale(0.9), tempfile::tempdir()?);
            Search { card: name, model, memory, pools: Pools::Ours, kernels }.fill()
        };
        let test_name = format!("filled_{model}_{}", name.replace(' ', "_"));
        test(test_name.to_lowercase(), fill).with_ignored_flag(true)
    })
}
