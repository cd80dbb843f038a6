//! What the Learner knows of its batches: plans by phase and shape, and the structures of
//! micro-steps that are known to fit. The training loop asks it for a plan before each batch, and
//! for admission before each micro-step.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use firebox_lazy::{RecordError, Recorder, Rehearsal, forget_calls, remember_calls_within};
use firebox_plan::{Cliffs, Plan, Sizing, Split};
use firebox_trace::{Bytes, MemoryModel, PoolPages, StructuralHash, TensorInfo, Trace};

use crate::device::own_pool::TrainingPool;
use crate::error::{Phase, TrainError};
use crate::planner::growth::Growth;
use crate::planner::overhead::Overhead;
use crate::planner::pages::{OpenPages, Pages, pages_of};
use crate::planner::rehearsal::{Iterations, Rehearsed};
use crate::planner::shape::Shape;

mod admission;
mod assess;
pub(crate) mod growth;
pub(crate) mod labels;
pub(crate) mod overhead;
pub(crate) mod pages;
pub(crate) mod pieces;
mod recorders;
pub(crate) mod rehearsal;
mod search;
pub(crate) mod shape;
#[cfg(test)]
mod tests;
mod tuning;

pub(crate) use self::admission::{Admission, Applicant};
use self::search::may_run_in_fewer_steps;
use self::tuning::Tuning;

/// How many splits are assessed at once. Each holds a recording, the largest item that planning
/// keeps in memory. It does not depend on the number of processors, because plans must not.
const AT_ONCE: usize = 2;

/// How many plans that ran earlier are passed to a memory model.
const REMEMBERED: usize = 4;

/// The share of the budget that recording may use to remember calls of other shapes.
const MOST_REMEMBERED: f64 = 1.0 / 16.0;

/// The plans, and what they were made from.
pub(crate) struct Planner {
    pub(crate) memory: Arc<dyn MemoryModel>,
    pub(crate) budget: Bytes,
    /// The share of the budget that a plan may use. Less than one once more was measured than
    /// predicted.
    share: f64,
    pub(crate) sizing: Sizing,
    /// What to do where a slightly larger micro-batch needs far more memory.
    cliffs: Cliffs,
    pub(crate) overhead: Overhead,
    /// The pool that training uses, if it is our own.
    pub(crate) pool: Option<Arc<TrainingPool>>,
    plans: HashMap<(Phase, Shape), Planned>,
    /// The most memory predicted for the run: that of a plan, of the pages of several plans, or of
    /// a rehearsal that runs parts of a step.
    pub(crate) predicted: Bytes,
    /// The open pages, where pages count, and the group of plans whose pages may be open.
    pages: OpenPages,
    open: usize,
    /// The number of groups of plans, minus one.
    group: usize,
    /// Whether batches are cut to learn their shapes.
    pub(crate) looks_at_shapes: bool,
    /// The most memory that recording may use to remember calls of other shapes.
    remembers: Bytes,
    /// The bytes of the current batch, where they are needed.
    pub(crate) batch: Bytes,
    /// The bytes of batches that outgrew their plan, by their number of items.
    outgrown: HashMap<(Phase, usize), BTreeSet<Bytes>>,
    /// The traces of the plans that ran, for memory models that replay them: the latest few, in
    /// order.
    ran: Vec<((Phase, Shape), Arc<Trace>)>,
    /// What micro-steps of known structures need in addition to what is held.
    known: HashMap<(Phase, StructuralHash), Admitted>,
    /// What micro-steps need up to a value they read, by the structure of the operations before it.
    prefixes: Arc<Mutex<HashMap<StructuralHash, Bytes>>>,
    /// The optimizer's state. Validation does not use it, but it is alive meanwhile.
    optimizer_state: Vec<TensorInfo>,
    /// The paths of the model's running statistics.
    pub(crate) running_state: BTreeSet<String>,
    /// Whether the model is known to read values while it runs.
    reads: bool,
    /// What threads keep permanently after what has run so far, and how much of it the current
    /// batch's `held` includes.
    pub(crate) kept: Arc<AtomicU64>,
    kept_in_held: Bytes,
    /// What the process takes of the host's memory, if the budget is host memory.
    pub(crate) growth: Option<Growth>,
    /// The most bytes that a rehearsal needed. Counts rehearsals on the host, and those that ran
    /// parts of a step to read values.
    rehearsed: Arc<AtomicU64>,
}

/// A plan for batches of one shape.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// How many consecutive batches it was made for.
    iterations: Iterations,
    /// Its rehearsal.
    pub(crate) rehearsed: Rehearsed,
    pub(crate) cost: PlanningCost,
    /// What threads kept permanently when it was made.
    kept: Bytes,
    /// What is alive next to a micro-step, and the bytes of the batch it was planned on.
    held: Bytes,
    batch: Bytes,
    /// The most that one of its micro-steps needs when measured alone, where pages count. Alone, a
    /// micro-step may open pages that the whole iteration has room on.
    standalone: Bytes,
    /// Plans of one group fit next to each other's open pages.
    group: usize,
    tuning: Tuning,
}

impl Planned {
    /// All pages that its batches have open, where pages count.
    fn pages(&self) -> Option<Pages> {
        let mut pages = pages_of(&self.rehearsed.footprint)?;
        let small_page = self.rehearsed.overhead.small_page;
        if small_page > Bytes::ZERO {
            *pages.entry(small_page).or_default() += 1;
        }
        Some(pages)
    }
}

/// What a micro-step of a known structure needs in addition to what is held.
#[derive(Clone, Debug)]
struct Admitted {
    needed: Bytes,
    /// What threads keep permanently after it.
    stays: Bytes,
    /// The pages that it opens when measured alone, where pages count.
    pages: Option<Pages>,
}

/// The cost of making a plan.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanningCost {
    /// The time that planning took.
    pub time: Duration,
    /// How many rehearsals were recorded.
    pub rehearsals: usize,
    /// The total number of operations in them.
    pub operations: usize,
}

impl Drop for Planner {
    /// Lifts the limit on remembered calls: it was computed from this run's plans.
    fn drop(&mut self) {
        remember_calls_within(Bytes::MAX);
    }
}

impl Planner {
    /// A planner without any plans. By default, cliffs are avoided where the memory model keeps
    /// pages. On the host, a slightly smaller size needs only slightly less.
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
            overhead: Overhead::default(),
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

    /// The plan for batches of this shape, if it exists.
    pub(crate) fn planned(&self, phase: Phase, shape: Shape) -> Option<&Planned> {
        self.plans.get(&(phase, shape))
    }

    /// How many consecutive batches of this shape to plan for, or `None` if that plan exists.
    /// `again` tells whether the last batch also had this shape.
    ///
    /// Where pages count, the first shape is planned for two batches. Every other shape, such as
    /// the last batch of an epoch, is planned for one until two come in a row, because two may need
    /// a page that one does not.
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
        // Threads have begun to keep memory that the plan has no room for.
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

    /// Makes the plan for batches of this shape. `rehearse` rehearses one split with a recorder.
    ///
    /// Where pages count, the open pages of earlier plans take room. If the batch fits in fewer
    /// micro-batches without them, the plan assumes so, and they are given back before the batch
    /// runs.
    ///
    /// Where kernels are not chosen yet, the plan counts the candidates that need the most memory.
    /// Once the tuner has chosen, the batch is planned again, after other plans whose kernels are
    /// chosen, and the pages that tuning opened are given back.
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
        // A plan that ran for one batch may run for two. A plan whose micro-batches ran in parts
        // may run that way again.
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
        // Most rehearsed sizes do not come again. No plan counts the remembered calls of other
        // shapes. They may take half of what this plan leaves.
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
            // A loader whose batches all differ must not slow planning down without limit.
            if self.ran.len() > REMEMBERED {
                self.ran.remove(0);
            }
        }
        let standalone = Bytes::ZERO;
        let group = self.group;
        let tunes = rehearsed.footprint.paging.as_ref().is_some_and(|paging| paging.tunes);
        // Kernels that are still not chosen after the same split has run will never be.
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

    /// Tells the planner that batches of a phase have run to their end, including the optimizer
    /// step.
    pub(crate) fn has_run(&mut self, phase: Phase) {
        let plans = self.plans.iter_mut().filter(|((of, _), _)| *of == phase);
        plans.for_each(|(_, planned)| planned.tuning.has_run());
    }

    /// What must be done before a planned batch runs.
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

    /// What pages of several plans may take: as much as one plan may, and at least what this plan
    /// takes.
    fn room(&self, peak: Bytes) -> Bytes {
        self.budget.scale(self.share).max(peak)
    }

    /// The pages that all plans together need on a pool of our own (the largest of each kind), and
    /// the pages of one plan.
    pub(crate) fn pool_pages(&self, phase: Phase, shape: Shape) -> Option<[PoolPages; 2]> {
        let pages = |planned: &Planned| planned.rehearsed.footprint.paging.as_ref()?.pool;
        let of_one = pages(self.planned(phase, shape)?)?;
        let all = self.plans.values().filter_map(pages);
        Some([all.fold(of_one, |one, other| one.larger(&other)), of_one])
    }

    /// Whether planning ran parts of steps, and thereby opened pages.
    pub(crate) fn has_run_steps(&self) -> bool {
        self.reads
    }

    /// Limits later plans to this share of the budget: the predicted memory divided by the measured
    /// memory.
    pub(crate) fn be_cautious(&mut self, share: f64) {
        self.share = self.share.min(share);
    }
}
