//! Rewrites rehearsed iterations so that each pass of the model computes tensors again instead of
//! keeping them, within a budget. The same is done to each pass that runs.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::planner::speed::Speed;
use firebox_recompute::{
    Demand, Program, Recipe, Selected, anchors_before, apply, model_steps, segment, select,
};
use firebox_trace::{Bytes, Mark, MemoryModel, Step, StructuralHash, Trace};

/// How often a memory model is asked about rewritten iterations.
const ANSWERS: usize = 4;

/// More than what an allocator was measured to reserve for a byte of tensors, which is up to 2.4.
const RESERVED: f64 = 3.0;

/// How often a limit is tried for which nothing is found, or nothing that is cheap enough.
const SELECTIONS: usize = 8;

/// How much less of its peak a pass may take at least after a choice that was too large.
const STEP: f64 = 0.01;

/// A choice that leaves less of the budget than this is good enough.
const SLACK: f64 = 0.02;

/// When training computes tensors again that it would otherwise keep, and how much time that may
/// take.
///
/// Values are the same, bit for bit, on the CPU and on GPUs whose backend does not fuse operations.
/// A model that reads values in its step is rewritten only if it does not fit in another way.
/// Default: [`if_needed`](Self::if_needed), at most 30 % more time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecomputePolicy {
    /// The most time that may be spent, if anything may.
    most: Option<f64>,
}

impl Default for RecomputePolicy {
    fn default() -> Self {
        Self::if_needed()
    }
}

impl RecomputePolicy {
    /// Where a batch cannot be trained in another way: one item does not fit, the micro-batch size
    /// that was asked for does not fit, or the batch must not be split. A model with running
    /// statistics, such as batch normalization, counts as one whose batches must not be split, as
    /// long as the whole batch fits this way.
    pub const fn if_needed() -> Self {
        Self { most: Some(0.3) }
    }

    /// Never.
    pub const fn never() -> Self {
        Self { most: None }
    }

    /// The most time that may be spent on recomputing, as a share of the time of forward and
    /// backward passes. Default: 0.3. A prediction, from the shapes of the operations.
    ///
    /// # Panics
    ///
    /// If the share is negative or not a number.
    pub fn at_most(mut self, share: f64) -> Self {
        assert!(share >= 0.0, "a share of time is not negative: {share}");
        self.most = self.most.map(|_| share);
        self
    }

    /// The most time that may be spent, if anything may.
    pub(crate) fn if_allowed(self) -> Option<f64> {
        self.most
    }
}

/// What the passes of a plan compute again instead of keeping it for the backward pass. Displays
/// as `120 of 480 operations again (7 % more time)`, or with masks, as
/// `120 of 480 operations again, 12 masks packed (7 % more time)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recomputing {
    /// How many operations of the rehearsed iterations are repeats.
    pub repeats: usize,
    /// How many operations the iterations have without repeats.
    pub operations: usize,
    /// How many masks of zeros and ones are kept in a byte for each element.
    pub packed: usize,
    /// The predicted time of the repeats, as a share of the time of forward and backward passes.
    /// From the shapes of operations, see [`RecomputePolicy`].
    pub overhead: f64,
}

impl fmt::Display for Recomputing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { repeats, operations, packed, overhead } = self;
        write!(f, "{repeats} of {operations} operations again")?;
        if *packed > 0 {
            write!(f, ", {packed} masks packed")?;
        }
        write!(f, " ({:.0} % more time)", 100.0 * overhead)
    }
}

/// What the passes of a plan compute again.
#[derive(Clone, Debug)]
pub(crate) struct Recomputed {
    /// The most bytes that tensors and workspace of a pass take.
    limit: Bytes,
    /// The most time that may be spent on repeats, as a share.
    most: f64,
    kinds: Arc<Vec<Kind>>,
    /// The kind of each pass of the iteration, in order.
    passes: Arc<Vec<usize>>,
    speed: Speed,
    /// The time of repeated calls, as a share of the time of all passes.
    overhead: f64,
    /// How many calls of an iteration are repeats, how many masks are packed, and how many calls
    /// were recorded.
    repeats: usize,
    packed: usize,
    calls: usize,
}

/// A kind of pass and its recipe.
#[derive(Clone, Debug)]
struct Kind {
    size: Size,
    recipe: Arc<Recipe>,
}

/// The least that was found by computing tensors again, if that is too much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Least {
    pub(crate) peak: Bytes,
    pub(crate) overhead: f64,
}

/// What tells passes of different sizes apart: the number of calls, and the bytes that they make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size(usize, Bytes);

impl Size {
    fn of(trace: &Trace) -> Self {
        let made = trace.calls().flat_map(|(_, call)| &call.outputs);
        let bytes = made.map(|tensor| trace.tensor(*tensor).bytes()).sum();
        Self(trace.calls().count(), bytes)
    }
}

impl Recomputed {
    pub(crate) fn limit(&self) -> Bytes {
        self.limit
    }

    pub(crate) fn report(&self) -> Recomputing {
        let Self { repeats, packed, calls, overhead, .. } = *self;
        Recomputing { repeats, operations: calls, packed, overhead }
    }

    /// An iteration like the one that was planned, with the same recipes.
    pub(crate) fn rewrite(&self, trace: &Trace) -> Option<Trace> {
        let drains = self.kinds.iter().any(|kind| kind.recipe.drains);
        let mut recipe = Recipe { drains, ..Recipe::default() };
        for (steps, pass) in model_steps(trace).into_iter().zip(&*self.passes) {
            let of_pass = &self.kinds[*pass].recipe;
            recipe.edits.extend(of_pass.behind(anchors_before(trace, steps.start)).edits);
        }
        let rewritten = apply(trace, &recipe);
        let shown = |error: &_| log::warn!("the iteration is shown as it was recorded: {error}");
        rewritten.inspect_err(shown).ok().map(|rewritten| rewritten.trace)
    }

    /// The program for a pass that was recorded. None if it runs as it was recorded: it cannot be
    /// rewritten, need not be, or that would take too much time. No value was read in it.
    pub(crate) fn program(&self, trace: &Trace, memory: &dyn MemoryModel) -> Option<Program> {
        let size = Size::of(trace);
        let rehearsed = self.kinds.iter().filter(|kind| kind.size == size);
        let mut rehearsed = rehearsed.map(|kind| &*kind.recipe).peekable();
        let made = |recipe: &Recipe| {
            let program = Program::new(trace, recipe);
            program.inspect_err(|error| log::debug!("a recipe is another pass's: {error}")).ok()
        };
        if rehearsed.peek().is_some_and(|recipe| recipe.edits.is_empty()) {
            return None;
        }
        rehearsed.find_map(made).or_else(|| {
            let pass = Pass::of(trace.clone(), memory, &self.speed)?;
            let selected = pass.select(self.limit)?;
            let is_cheap = selected.cost <= self.most * pass.demand.total();
            let is_empty = selected.recipe.edits.is_empty();
            (is_cheap && !is_empty).then(|| made(&selected.recipe)).flatten()
        })
    }

    /// The program of a pass on its own.
    pub(crate) fn of_one(&self, trace: &Trace) -> Option<Program> {
        self.kinds.first().and_then(|kind| Program::new(trace, &kind.recipe).ok())
    }
}

/// A forward and backward pass on its own.
struct Pass {
    trace: Trace,
    demand: Demand,
    /// What tensors and workspace take.
    peak: Bytes,
}

impl Pass {
    fn of(trace: Trace, memory: &dyn MemoryModel, speed: &Speed) -> Option<Self> {
        let mut demand = Demand::new(&trace, &speed.rates);
        demand.drains = !memory.is_on_host();
        if let Some(dtype) = speed.bools {
            demand = demand.with_bools(dtype);
        }
        // On a device it is not known which part of a moment is workspace.
        if memory.is_on_host() {
            demand = demand.with_workspace(&trace, &memory.footprint(&trace));
        }
        let peak = select(&trace, Bytes::MAX, &demand)?.peak;
        Some(Self { trace, demand, peak })
    }

    fn select(&self, limit: Bytes) -> Option<Selected> {
        select(&self.trace, limit, &self.demand)
    }
}

/// The passes of a rehearsed iteration.
pub(crate) struct Passes {
    /// One of each kind.
    kinds: Vec<(StructuralHash, Pass)>,
    /// The steps of each, its kind, and how often it is run.
    all: Vec<(Range<usize>, usize, f64)>,
    speed: Speed,
}

/// An iteration with a recipe for its passes.
pub(crate) struct Attempt {
    pub(crate) trace: Trace,
    /// The host memory that its programs take.
    pub(crate) programs: Bytes,
    pub(crate) recomputed: Recomputed,
}

/// What the passes of an iteration compute again.
struct Chosen {
    /// What each pass was to take at most.
    limit: Bytes,
    of_kinds: Vec<Selected>,
    /// The time of repeats, as a share of that of all passes.
    overhead: f64,
    /// What tensors and workspace of the largest pass take.
    peak: Bytes,
}

impl Passes {
    /// None if there are none that can be rewritten.
    pub(crate) fn of(trace: &Trace, memory: &dyn MemoryModel, speed: Speed) -> Option<Self> {
        let (mut kinds, mut all): (Vec<(StructuralHash, Pass)>, _) = (Vec::new(), Vec::new());
        for steps in model_steps(trace) {
            let pass = segment(trace, steps.clone());
            let hash = pass.structural_hash();
            let kind = match kinds.iter().position(|(known, _)| *known == hash) {
                Some(kind) => kind,
                None => {
                    kinds.push((hash, Pass::of(pass, memory, &speed)?));
                    kinds.len() - 1
                }
            };
            let more = trace.steps[steps.end..].iter().find_map(|step| match step {
                Step::Mark(Mark::MicroStepEnd(more)) => Some(*more),
                _ => None,
            });
            all.push((steps, kind, 1.0 + f64::from(more.unwrap_or_default())));
        }
        (!all.is_empty()).then_some(Self { kinds, all, speed })
    }

    /// A pass on its own, as it is recorded where it runs.
    pub(crate) fn alone(trace: &Trace, memory: &dyn MemoryModel, speed: Speed) -> Option<Self> {
        let pass = Pass::of(trace.clone(), memory, &speed)?;
        let all = vec![(0..trace.steps.len(), 0, 1.0)];
        Some(Self { kinds: vec![(trace.structural_hash(), pass)], all, speed })
    }

    fn peak(&self) -> Bytes {
        self.kinds.iter().map(|(_, pass)| pass.peak).max().unwrap_or_default()
    }

    /// What passes compute again so that they take at most `limit`, or what was found to be closest
    /// to it.
    fn choose(&self, limit: Bytes) -> Option<Chosen> {
        let of_kinds: Option<Vec<Selected>> =
            self.kinds.iter().map(|(_, pass)| pass.select(limit)).collect();
        let of_kinds = of_kinds?;
        let (mut time, mut again) = (0.0, 0.0);
        for (_, kind, times) in &self.all {
            time += self.kinds[*kind].1.demand.total() * times;
            again += of_kinds[*kind].cost * times;
        }
        let peak = of_kinds.iter().map(|selected| selected.peak).max().unwrap_or_default();
        let overhead = if time > 0.0 { again / time } else { 0.0 };
        Some(Chosen { limit, of_kinds, overhead, peak })
    }

    /// The iteration with what was chosen, which is to take at most `most` of its time.
    fn attempt(&self, trace: &Trace, chosen: Chosen, most: f64) -> Option<Attempt> {
        let Chosen { limit, of_kinds, overhead, .. } = chosen;
        let drains = of_kinds.iter().any(|selected| selected.recipe.drains);
        let mut recipe = Recipe { drains, ..Recipe::default() };
        for (steps, kind, _) in &self.all {
            let behind = of_kinds[*kind].recipe.behind(anchors_before(trace, steps.start));
            recipe.edits.extend(behind.edits);
        }
        let rewritten = apply(trace, &recipe)
            .inspect_err(|error| log::warn!("an iteration is not rewritten: {error}"))
            .ok()?;
        debug_assert_eq!(firebox_recompute::check(trace, &rewritten), Ok(()));
        let mut programs = Bytes::ZERO;
        for ((_, pass), selected) in self.kinds.iter().zip(&of_kinds) {
            programs += Program::new(&pass.trace, &selected.recipe).ok()?.host_bytes();
        }
        let kinds = self.kinds.iter().zip(of_kinds);
        let kinds = kinds.map(|((_, pass), chosen)| Kind {
            size: Size::of(&pass.trace),
            recipe: Arc::new(chosen.recipe),
        });
        let passes = self.all.iter().map(|(_, kind, _)| *kind).collect();
        let recomputed = Recomputed {
            limit,
            most,
            passes: Arc::new(passes),
            kinds: Arc::new(kinds.collect()),
            speed: self.speed,
            overhead,
            repeats: rewritten.repeats(),
            packed: rewritten.packed(),
            calls: trace.calls().count(),
        };
        Some(Attempt { trace: rewritten.trace, programs, recomputed })
    }

    /// The iteration within the least that is found for at most `most` of its time.
    pub(crate) fn least(&self, trace: &Trace, most: f64) -> Option<Attempt> {
        let (mut low, mut high, mut best) = (Bytes::ZERO, self.peak(), None);
        for _ in 0..SELECTIONS {
            let limit = low + (high - low).scale(0.5);
            let is_good = |found: &Chosen| found.peak <= limit && found.overhead <= most;
            match self.choose(limit).filter(is_good) {
                Some(chosen) => (high, best) = (limit, Some(chosen)),
                None => low = limit,
            }
        }
        self.attempt(trace, best?, most)
    }

    /// Searches the largest limit of a pass with which an iteration that needs `peak` as recorded
    /// stays within the budget, and spends at most `most` of its time on repeats. `answer` tells
    /// what an attempt needs.
    ///
    /// Peaks of iterations follow those of their passes more or less. The search moves along that
    /// line, and halves what is left where it leads out.
    pub(crate) fn within<A>(
        &self,
        trace: &Trace,
        (budget, peak, most): (Bytes, Bytes, f64),
        mut answer: impl FnMut(&Attempt) -> (Bytes, A),
    ) -> Result<(Attempt, A), Option<Least>> {
        // Below the first, nothing is found or it is too slow; above the second, it is too large.
        let (mut low, mut high) = (Bytes::ZERO, self.peak());
        let (mut best, mut least): (Option<(Attempt, A)>, Option<Least>) = (None, None);
        // Passes of no bytes would not be enough, whatever an allocator reserves for them.
        if peak - budget >= high.scale(RESERVED) {
            return Err(None);
        }
        let mut limit = high - (peak - budget);
        let mut answers = 0;
        for _ in 0..SELECTIONS {
            if limit <= low || limit >= high {
                limit = low + (high - low).scale(0.5);
            }
            if (high - low) <= self.peak().scale(SLACK) || answers == ANSWERS {
                break;
            }
            // What comes close is as good as nothing: less is found for a larger limit.
            let chosen = self.choose(limit);
            let chosen = chosen.filter(|chosen| chosen.peak <= limit || least.is_none());
            let peak = chosen.as_ref().map_or(Bytes::MAX, |chosen| chosen.peak);
            let Some(attempt) = chosen.and_then(|chosen| self.attempt(trace, chosen, most)) else {
                low = limit;
                continue;
            };
            let overhead = attempt.recomputed.overhead;
            answers += 1;
            let (needed, more) = answer(&attempt);
            log::debug!("passes within {limit} (found {peak}): {needed} at {overhead:.3}");
            if least.is_none_or(|least| needed < least.peak) {
                least = Some(Least { peak: needed, overhead });
            }
            if overhead > most || needed > budget && peak > limit {
                low = limit;
                continue;
            }
            if needed > budget {
                // What was found is smaller than the limit, and would be found again just below it.
                high = peak;
                limit = high - (needed - budget).max(self.peak().scale(STEP));
                continue;
            }
            let left = budget - needed;
            best = Some((attempt, more));
            if left <= budget.scale(SLACK) {
                break;
            }
            low = limit;
            limit += left;
        }
        best.ok_or(least)
    }
}
