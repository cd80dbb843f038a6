//! What the Learner knows of its batches: plans by phase and shape, and the structures of micro-steps that
//! are known to fit.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use firebox_lazy::{RecordError, Recorder, Rehearsal, forget_calls, remember_calls_within};
use firebox_plan::{
    Cliffs, Need, Plan, PlanError, PlanOptions, Probing, Sizing, Split, plan_at_once,
};
use firebox_trace::{Bytes, Items, MemoryModel, PoolPages, StructuralHash, TensorInfo, Trace};

use crate::beside::Beside;
use crate::error::{Phase, TrainError};
use crate::growth::Growth;
use crate::own_pool::TrainingPool;
use crate::pages::{OpenPages, Pages, pages_of};
use crate::rehearsal::{Conditions, Iterations, Rehearsed, assess};
use crate::shape::Shape;

mod admission;
mod assess;
mod recorders;
#[cfg(test)]
mod tests;
mod tuning;

pub(crate) use self::admission::{Admission, Applicant};
use self::assess::{assess_all, failed, need_of};
use self::tuning::Tuning;

/// How many splits are assessed at once. Each has a recording, the most that planning keeps in memory. The number of processors does
/// not count, because what is planned must not depend on it.
const AT_ONCE: usize = 2;

/// How many plans a memory model is told of as having run before.
const REMEMBERED: usize = 4;

/// The share of the budget that recording may use to remember calls of other shapes.
const MOST_REMEMBERED: f64 = 1.0 / 16.0;

/// Plans, and what they were made from.
pub(crate) struct Planner {
    pub(crate) memory: Arc<dyn MemoryModel>,
    pub(crate) budget: Bytes,
    /// The share of the budget that a plan may use: less than all once more was measured than predicted.
    share: f64,
    pub(crate) sizing: Sizing,
    /// What to do where a slightly larger micro-batch needs far more memory.
    cliffs: Cliffs,
    pub(crate) beside: Beside,
    /// The pool that is trained on, where buffers lie on pages of our own.
    pub(crate) pool: Option<Arc<TrainingPool>>,
    plans: HashMap<(Phase, Shape), Planned>,
    /// The most that the run was predicted to need: any plan, the pages of several, or a rehearsal that runs parts of a step.
    pub(crate) predicted: Bytes,
    /// The pages that are open, where pages count, and the plans whose pages may be.
    pages: OpenPages,
    open: usize,
    /// How many groups of plans there are, less one.
    group: usize,
    /// Whether batches are cut to see their shapes.
    pub(crate) looks_at_shapes: bool,
    /// What recording remembers of calls of other shapes, at most.
    remembers: Bytes,
    /// The bytes of the batch that is run now, where they are asked for.
    pub(crate) batch: Bytes,
    /// The bytes of batches, by their items, that did not fit as they were planned.
    outgrown: HashMap<(Phase, usize), BTreeSet<Bytes>>,
    /// What plans have run so far, for a memory model that wants to know: the latest few, in their order.
    ran: Vec<((Phase, Shape), Arc<Trace>)>,
    /// What micro-steps of a known structure need beside what is held.
    known: HashMap<(Phase, StructuralHash), Known>,
    /// What micro-steps need up to a value that they read, by the structure of what comes before it.
    prefixes: Arc<Mutex<HashMap<StructuralHash, Bytes>>>,
    /// The optimizer's state, which validation does not see and lives beside it.
    optimizer_state: Vec<TensorInfo>,
    /// The paths of the running statistics of the model.
    pub(crate) running_state: BTreeSet<String>,
    /// Whether the model is known to read values while it runs.
    reads: bool,
    /// What threads keep for good after what has run so far, and that much of it as the batch that is run now was told of.
    pub(crate) kept: Arc<AtomicU64>,
    kept_in_held: Bytes,
    /// What the process takes of the host's memory, where that is what the budget is for.
    pub(crate) growth: Option<Growth>,
    /// The bytes that rehearsals needed, at most: those on the host, and those which ran parts of a step to read values.
    rehearsed: Arc<AtomicU64>,
}

/// A plan for batches of one shape.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// How many batches in a row it was made for.
    iterations: Iterations,
    /// Its rehearsal.
    pub(crate) rehearsed: Rehearsed,
    pub(crate) cost: PlanningCost,
    /// What threads had kept for good when it was made.
    kept: Bytes,
    /// What is alive beside a micro-step, and the bytes of the batch that it was planned on.
    held: Bytes,
    batch: Bytes,
    /// What its micro-steps were found to need when measured by themselves, where their pages count: by itself one may open
    /// pages that the whole iteration has room on.
    standalone: Bytes,
    /// Plans of one group have been found to fit beside each other's pages.
    group: usize,
    tuning: Tuning,
}

impl Planned {
    /// The pages that batches have open in all, where pages count.
    fn pages(&self) -> Option<Pages> {
        let mut pages = pages_of(&self.rehearsed.footprint)?;
        let small_page = self.rehearsed.beside.small_page;
        if small_page > Bytes::ZERO {
            *pages.entry(small_page).or_default() += 1;
        }
        Some(pages)
    }
}

/// What a micro-step of a known structure needs beside what is held.
#[derive(Clone, Debug)]
struct Known {
    needed: Bytes,
    /// What threads keep for good behind it.
    stays: Bytes,
    /// The pages that it opens by itself, where pages count.
    pages: Option<Pages>,
}

/// What making a plan cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanningCost {
    /// The time it took.
    pub time: Duration,
    /// How many rehearsals were recorded.
    pub rehearsals: usize,
    /// How many operations these had in all.
    pub operations: usize,
}

impl Drop for Planner {
    /// What this run had left for it no longer holds.
    fn drop(&mut self) {
        remember_calls_within(Bytes::MAX);
    }
}

impl Planner {
    /// A planner of which nothing is asked yet. `cliffs`, if not chosen, are avoided where pages count: on the host a size that is
    /// a little smaller needs a little less.
    pub(crate) fn new(
        memory: Arc<dyn MemoryModel>,
        budget: Bytes,
        sizing: Sizing,
        cliffs: Option<Cliffs>,
    ) -> Self {
        let usual = if memory.keeps_pages() { Cliffs::Avoid } else { Cliffs::Ignore };
        Self {
            memory,
            budget,
            share: 1.0,
            sizing,
            cliffs: cliffs.unwrap_or(usual),
            beside: Beside::default(),
            pool: None,
            plans: HashMap::new(),
            predicted: Bytes::ZERO,
            pages: OpenPages::default(),
            open: 0,
            group: 0,
            looks_at_shapes: true,
            remembers: Bytes::ZERO,
            batch: Bytes::ZERO,
            outgrown: HashMap::new(),
            ran: Vec::new(),
            known: HashMap::new(),
            prefixes: Arc::default(),
            optimizer_state: Vec::new(),
            running_state: BTreeSet::new(),
            reads: false,
            kept: Arc::default(),
            kept_in_held: Bytes::ZERO,
            growth: None,
            rehearsed: Arc::default(),
        }
    }

    /// The plan for batches of this shape, if there is one already.
    pub(crate) fn planned(&self, phase: Phase, shape: Shape) -> Option<&Planned> {
        self.plans.get(&(phase, shape))
    }

    /// For how many batches in a row batches of this shape are to be planned, if that is not done yet; `again` says that the last
    /// batch was of this shape as well.
    ///
    /// Where pages count, the first shape is planned for two, and every other one, such as that of the last batch of an epoch, for
    /// one until two come in a row: two may need a page that one does not.
    pub(crate) fn to_plan(&self, phase: Phase, shape: Shape, again: bool) -> Option<Iterations> {
        let has_trained = self.plans.keys().any(|(phase, _)| *phase == Phase::Training);
        let iterations = match phase {
            Phase::Training if has_trained && !again && !self.memory.is_on_host() => {
                Iterations::One
            }
            _ => Iterations::Two,
        };
        let planned = self.planned(phase, shape);
        if let Some(planned) = planned.filter(|planned| planned.tuning.is_over()) {
            return Some(planned.iterations);
        }
        // Threads have begun to keep what it has no room for.
        let has_no_room = planned.filter(|planned| {
            let peak = planned.plan.peak() + self.kept_since(planned);
            planned.kept < self.kept() && peak > self.budget.scale(self.share)
        });
        if let Some(planned) = has_no_room {
            return Some(planned.iterations);
        }
        let planned = planned.map(|planned| planned.iterations);
        let is_enough = planned == Some(Iterations::Two) || planned == Some(iterations);
        (!is_enough).then_some(iterations)
    }

    /// Makes the plan for batches of this shape; `rehearse` rehearses one way to cut them, with a recorder.
    ///
    /// Where pages count, those of earlier plans take room. If the batch fits in fewer micro-batches without them, it is planned so,
    /// and they are given back before it runs.
    ///
    /// Where kernels are not chosen yet, those that need the most memory are counted. Once the tuner has chosen, the batch is
    /// planned again, behind others whose kernels are chosen, and the pages that tuning has opened are given back.
    pub(crate) fn plan(
        &mut self,
        phase: Phase,
        shape: Shape,
        iterations: Iterations,
        mut rehearse: impl FnMut(Split, &Recorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<&Planned, TrainError> {
        let started = Instant::now();
        let mut cost = PlanningCost::default();
        if self.memory.is_on_host() {
            remember_calls_within(Bytes::ZERO);
        }
        let tuned = self.planned(phase, shape).filter(|planned| planned.tuning.is_over());
        let tuned = tuned.map(|planned| planned.plan.split());
        let gives_back = tuned.is_some() && !self.keep_what_is_chosen();
        let mut found = self.search(phase, shape.items, gives_back, &mut cost, &mut rehearse);
        if gives_back && found.is_ok() {
            self.ran.clear();
            self.group += 1;
        }
        let may_gain = !gives_back
            && !self.ran.is_empty()
            && match &found {
                Ok((plan, _)) => {
                    let fits = |split| self.fits_given_back(phase, split, &mut cost, &mut rehearse);
                    may_run_in_fewer_steps(plan, self.sizing, fits)
                }
                Err(TrainError::Plan { .. }) => true,
                Err(_) => false,
            };
        if may_gain {
            let alone = self.search(phase, shape.items, true, &mut cost, &mut rehearse);
            let steps = |found: &Result<(Plan, Rehearsed), TrainError>| {
                found.as_ref().map_or(usize::MAX, |(plan, _)| plan.len())
            };
            if steps(&alone) < steps(&found) {
                found = alone;
                self.ran.clear();
                self.group += 1;
            }
        }
        // What ran for one batch may run for two, and what ran in parts of its micro-batches may do so again.
        let small = Shape::of_items(shape.items);
        let run = self.planned(phase, shape).or_else(|| self.planned(phase, small)).cloned();
        let is_none = |error: &TrainError| {
            let too_long = matches!(error, TrainError::Record(RecordError::TooLong { .. }));
            too_long || matches!(error, TrainError::Plan { .. })
        };
        if let (Some(planned), Some(cause)) =
            (run, found.as_ref().err().filter(|error| is_none(error)))
        {
            log::warn!("batches keep the plan that they have, as there is no other: {cause}");
            let kept = self.kept();
            let planned = Planned { iterations, tuning: Tuning::Chosen, kept, ..planned };
            return Ok(self.plans.entry((phase, shape)).insert_entry(planned).into_mut());
        }
        let (plan, mut rehearsed) = found?;
        self.predicted = self.predicted.max(Bytes::new(self.rehearsed.load(Relaxed)));
        // Most sizes that were rehearsed do not come again. What is remembered of calls of other shapes is counted in no plan, and
        // has half of what this one leaves.
        forget_calls();
        if self.memory.is_on_host() {
            let most = self.predicted.max(plan.peak());
            self.remembers =
                (self.budget - most).scale(0.5).min(self.budget.scale(MOST_REMEMBERED));
            remember_calls_within(self.remembers);
        }
        cost.time = started.elapsed();
        if phase == Phase::Training {
            self.optimizer_state.clone_from(&rehearsed.optimizer_state);
            self.running_state.extend(rehearsed.running_state.iter().cloned());
        }
        let held = rehearsed.held;
        if let Some(trace) = rehearsed.trace.take() {
            self.ran.retain(|(ran, _)| *ran != (phase, shape));
            self.ran.push(((phase, shape), trace));
            // A loader whose batches all differ must not make planning ever slower.
            if self.ran.len() > REMEMBERED {
                self.ran.remove(0);
            }
        }
        let standalone = Bytes::ZERO;
        let group = self.group;
        let tunes = rehearsed.footprint.paging.as_ref().is_some_and(|paging| paging.tunes);
        // What is still not chosen although the same split has run will never be.
        let tuning = Tuning::new(tunes && tuned != Some(plan.split()));
        let planned = Planned {
            plan,
            iterations,
            rehearsed,
            cost,
            kept: self.kept(),
            held,
            batch: self.batch,
            standalone,
            group,
            tuning,
        };
        Ok(self.plans.entry((phase, shape)).insert_entry(planned).into_mut())
    }

    /// Whether a split fits once the pages that what has run has left are given back.
    fn fits_given_back(
        &self,
        phase: Phase,
        split: Split,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &Recorder) -> Result<Rehearsal, TrainError>,
    ) -> bool {
        let budget = self.budget.scale(self.share);
        cost.rehearsals += 1;
        // What goes wrong in a rehearsal that was not needed is no reason to stop.
        let Ok(rehearsal) = rehearse(split, &self.recorder(budget)) else { return false };
        let rehearsed = assess(rehearsal, &self.conditions(phase, budget, true));
        cost.operations += rehearsed.operations;
        rehearsed.footprint.peak <= budget
    }

    /// Searches a plan for batches of `items` items behind what has run, whose pages stay open or are given back.
    ///
    /// At first no read is allowed inside a rehearsal. A model that reads values is so found before anything of a
    /// large batch has been run, and is then planned from one item upwards.
    fn search(
        &mut self,
        phase: Phase,
        items: usize,
        gives_back: bool,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &Recorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<(Plan, Rehearsed), TrainError> {
        let budget = self.budget.scale(self.share);
        let (plan, mut rehearsals) = loop {
            let reads = self.reads;
            let recorder = self.recorder(budget);
            let conditions = self.conditions(phase, budget, gives_back);
            let probing = if reads { Probing::FromOne } else { Probing::FromWhole };
            let options = PlanOptions::new().sizing(self.sizing).probing(probing);
            let options = options.cliffs(self.cliffs);
            // A footprint on the host is found faster than recorded, and reading takes the memory that it measures.
            let alone = reads || self.memory.is_on_host();
            let options = options.at_once(if alone { 1 } else { AT_ONCE });
            let mut rehearsals: HashMap<Split, Rehearsed> = HashMap::new();
            let mut too_long = None;
            let result = plan_at_once(Items::new(items), budget, &options, |splits| {
                cost.rehearsals += splits.len();
                let assessed = assess_all(splits, |split| rehearse(split, &recorder), &conditions);
                let needs = splits.iter().zip(assessed).map(|(split, assessed)| match assessed {
                    Ok(rehearsed) => {
                        cost.operations += rehearsed.operations;
                        self.rehearsed.fetch_max(rehearsed.planning.get(), Relaxed);
                        let need = need_of(&rehearsed);
                        rehearsals.insert(*split, rehearsed);
                        Ok(need)
                    }
                    // A smaller micro-batch may be shorter.
                    Err(error @ TrainError::Record(RecordError::TooLong { needed, .. })) => {
                        too_long = Some(error);
                        Ok(Need::heuristic(needed))
                    }
                    // What comes before a read is too large already.
                    Err(TrainError::Record(RecordError::ReadTooLarge { needed, .. })) if reads => {
                        Ok(Need::heuristic(needed))
                    }
                    Err(error) => Err(error),
                });
                needs.collect()
            });
            match result {
                Err(PlanError::Footprint {
                    cause: TrainError::Record(RecordError::ReadTooLarge { .. }),
                    ..
                }) if !reads => self.reads = true,
                Err(cause) => return Err(too_long.unwrap_or_else(|| failed(phase, cause))),
                Ok(plan) => break (plan, rehearsals),
            }
        };
        let rehearsed = rehearsals.remove(&plan.split()).expect("what is planned was rehearsed");
        Ok((plan, rehearsed))
    }

    /// Says that batches of a phase have run to their end, optimizer step included.
    pub(crate) fn has_run(&mut self, phase: Phase) {
        let plans = self.plans.iter_mut().filter(|((of, _), _)| *of == phase);
        plans.for_each(|(_, planned)| planned.tuning.has_run());
    }

    /// What is to be done before a batch runs that has a plan.
    pub(crate) fn begin(&mut self, phase: Phase, shape: Shape) -> Admission {
        let planned = self.plans.get_mut(&(phase, shape)).expect("it has a plan");
        planned.tuning.begin();
        let (peak, group) = (planned.plan.peak(), planned.group);
        let pages = planned.pages();
        let kept = planned.rehearsed.kept;
        self.kept.fetch_max(kept.get(), Relaxed);
        self.kept_in_held = self.kept();
        let peak = peak + (self.kept() - kept);
        let Some(pages) = pages else {
            self.predicted = self.predicted.max(peak);
            return Admission::Runs;
        };
        let together = self.pages.with(&pages).max(peak);
        if group == self.open && together <= self.room(peak) {
            self.pages.open(&pages);
            self.predicted = self.predicted.max(together);
            return Admission::Runs;
        }
        self.open = group;
        self.pages.give_back(&pages);
        self.predicted = self.predicted.max(peak);
        Admission::RunsOnceGivenBack
    }

    /// What pages of several plans may take: what a plan may, and no less than this one does.
    fn room(&self, peak: Bytes) -> Bytes {
        self.budget.scale(self.share).max(peak)
    }

    fn conditions(&self, phase: Phase, budget: Bytes, gives_back: bool) -> Conditions<'_> {
        let idle_state = match phase {
            Phase::Training => &[],
            Phase::Validation => self.optimizer_state.as_slice(),
        };
        let before = self.ran.iter().map(|(_, trace)| trace.as_ref()).collect();
        let memory = self.memory.as_ref();
        let kept = self.kept();
        Conditions { memory, budget, before, gives_back, beside: &self.beside, idle_state, kept }
    }

    /// The pages that all plans together need on a pool of ours, the largest of each kind, and those of one plan.
    pub(crate) fn pool_pages(&self, phase: Phase, shape: Shape) -> Option<[PoolPages; 2]> {
        let pages = |planned: &Planned| planned.rehearsed.footprint.paging.as_ref()?.pool;
        let of_one = pages(self.planned(phase, shape)?)?;
        let all = self.plans.values().filter_map(pages);
        Some([all.fold(of_one, |one, other| one.larger(&other)), of_one])
    }

    /// Whether planning has run parts of steps, which has opened pages.
    pub(crate) fn has_run_steps(&self) -> bool {
        self.reads
    }

    /// Lets later plans use no more than this share of the budget: what was predicted over what was measured.
    pub(crate) fn be_cautious(&mut self, share: f64) {
        self.share = self.share.min(share);
    }
}

/// Whether a batch that is planned behind others may run in fewer steps where they have left nothing; `fits` tells which splits
/// fit so. Asked for are the next split that was not found to fit behind them, and, if that is one of two sizes, which may need
/// more than a larger one, the next of one size.
fn may_run_in_fewer_steps(plan: &Plan, sizing: Sizing, fits: impl FnMut(Split) -> bool) -> bool {
    let does_fit = |split: &Split| {
        plan.asked().iter().any(|asked| asked.split == *split && asked.need.peak <= plan.budget())
    };
    let is_chosen = matches!(sizing, Sizing::Fixed(_));
    let mut fewer = plan.with_fewer_steps(sizing).filter(|split| !is_chosen && !does_fit(split));
    let next = fewer.next();
    let even = next.filter(Split::is_uneven).and_then(|_| fewer.find(|split| !split.is_uneven()));
    next.into_iter().chain(even).any(fits)
}
