//! What the Learner knows of its batches: plans by phase and shape, and the structures of
//! micro-steps that are known to fit. The training loop asks it for a plan before each batch, and
//! for admission before each micro-step.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_backend::DType;
use firebox_plan::{Plan, Sizing, Split};
use firebox_recompute::{Program, Rates};
use firebox_trace::{Bytes, MemoryModel, Nonlinear, StructuralHash, TensorInfo};

use crate::device::own_pool::TrainingPool;
use crate::error::Phase;
use crate::planner::growth::Growth;
use crate::planner::ledger::Ledger;
use crate::planner::overhead::Overhead;
use crate::planner::parked::Parks;
use crate::planner::recompute::RecomputePolicy;
use crate::planner::rehearsal::Iterations;
use crate::planner::rehearsed::Rehearsed;
use crate::planner::room::Room;
use crate::planner::shape::Shape;
use crate::planner::speed::Speed;
use crate::whole::Joining;

mod admission;
mod again;
mod assess;
pub(crate) mod growth;
pub(crate) mod labels;
pub(crate) mod largest;
pub(crate) mod ledger;
pub(crate) mod overhead;
pub(crate) mod parked;
mod prepare;
pub(crate) mod recompute;
mod recorders;
pub(crate) mod rehearsal;
pub(crate) mod rehearsed;
mod remedy;
pub(crate) mod room;
mod search;
pub(crate) mod shape;
pub(crate) mod speed;
#[cfg(test)]
mod tests;
mod tuning;

pub(crate) use self::admission::{Admission, Applicant};
pub use self::again::Replanned;
pub(crate) use self::again::Splits;
pub(crate) use self::prepare::{BatchToRun, Prepared};
use self::tuning::Tuning;

/// How many splits are assessed at once. Each holds a recording, the largest item that planning
/// keeps in memory. It does not depend on the number of processors, because plans must not.
const AT_ONCE: usize = 2;

/// How many programs that compute tensors again are kept.
const PROGRAMS: usize = 8;

/// The plans, and what they were made from.
pub(crate) struct Planner {
    memory: Arc<dyn MemoryModel>,
    room: Room,
    choices: Choices,
    overhead: Overhead,
    /// The pool that training uses, if it is firebox's.
    pool: Option<Arc<TrainingPool>>,
    plans: Plans,
    structures: Structures,
    ledger: Ledger,
    step: KnownOfStep,
    /// What the process takes of the host's memory, if the budget is host memory.
    growth: Option<Growth>,
}

/// How batches may be made to fit.
struct Choices {
    sizing: Sizing,
    /// When passes compute tensors again, and how the device computes.
    recompute: RecomputePolicy,
    speed: Speed,
    /// Whether the optimizer's state is outside of the device between steps.
    parks: Parks,
    /// Whether batches are split although that changes the statistics that a model normalizes by.
    splits_statistics: bool,
    /// Whether training batches must not be split.
    stays_whole: bool,
}

/// The plans, and how batches are told apart.
struct Plans {
    made: HashMap<(Phase, Shape), Planned>,
    /// How an earlier run split batches that this one has not seen yet.
    kept: HashMap<(Phase, Shape), Split>,
    /// The plan whose pages are open, where the allocator keeps them.
    open: Option<(Phase, Shape)>,
    /// Whether batches are cut to learn their shapes.
    looks_at_shapes: bool,
    /// The structural hash of cutting the latest batch. `None` if it was not cut.
    form: Option<StructuralHash>,
    /// The bytes of the current batch, where they are needed.
    batch: Bytes,
    /// The most bytes that are alive at once while it is made.
    making: Bytes,
    /// The bytes of batches that outgrew their plan, by their number of items.
    outgrown: HashMap<(Phase, usize), BTreeSet<Bytes>>,
}

/// The structures of micro-steps that have run.
#[derive(Default)]
struct Structures {
    /// What they need in addition to what is held.
    known: HashMap<Known, Admitted>,
    /// Those of them that have a program, the oldest first.
    programs: VecDeque<Known>,
    /// What micro-steps need up to a value they read, by the structure of the operations before it.
    prefixes: Arc<Mutex<HashMap<StructuralHash, Bytes>>>,
    /// Whether a training step was another program than those of earlier batches like it.
    has_new: bool,
}

/// What rehearsals and micro-steps have shown of the user's step.
#[derive(Default)]
struct KnownOfStep {
    /// The paths of the model's running statistics.
    running_state: BTreeSet<String>,
    /// What the training step makes of its gradients, if that is nothing linear.
    nonlinear: Option<Nonlinear>,
    /// Whether the model is known to read values while it runs.
    reads: bool,
}

/// A plan for batches of one shape.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Arc<Plan>,
    /// Which outputs are joined for the metrics.
    pub(crate) joining: Joining,
    /// How many consecutive batches it was made for.
    iterations: Iterations,
    /// Its rehearsal.
    pub(crate) rehearsed: Rehearsed,
    pub(crate) cost: PlanningCost,
    /// Why there is another plan than before, if so.
    pub(crate) again: Option<Replanned>,
    /// What threads kept permanently when it was made.
    kept: Bytes,
    /// What is alive next to a micro-step, and the bytes of the batch it was planned on.
    held: Bytes,
    batch: Bytes,
    /// The most that is alive while the batch is made that it was planned on.
    pub(crate) making: Bytes,
    /// What updates have left by the time that its batches are trained, and what one of its
    /// micro-steps leaves.
    state: Bytes,
    leaves: Bytes,
    /// The most that one of its micro-steps needs when measured alone, where pages count. Alone, a
    /// micro-step may open pages that the whole iteration has room on.
    standalone: Bytes,
    tuning: Tuning,
}

/// A structure of micro-steps: its phase, its hash, and what runs for it.
type Known = (Phase, StructuralHash, Written);

/// What runs for a recorded micro-step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Written {
    AsRecorded,
    /// As its plan says: tensors are recomputed so that it takes at most this much.
    Within(Bytes),
    /// In what was left when it outgrew its plan.
    Squeezed,
}

/// What a micro-step of a known structure needs in addition to what is held.
#[derive(Clone, Debug)]
struct Admitted {
    /// What runs instead of the recorded steps.
    program: Option<Arc<Program>>,
    needed: Bytes,
    /// What it leaves: its outputs and gradients.
    leaves: Bytes,
    /// Whether a plan has counted it.
    is_planned: bool,
    /// What threads keep permanently after it.
    stays: Bytes,
    /// Whether it lies on pages. Measured alone, it may open some that its iteration has room on.
    is_paged: bool,
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

impl Planner {
    /// A planner without any plans.
    pub(crate) fn new(memory: Arc<dyn MemoryModel>, budget: Bytes, sizing: Sizing) -> Self {
        let choices = Choices {
            sizing,
            recompute: RecomputePolicy::never(),
            speed: Speed::of(&*memory, None),
            parks: Parks::Never,
            splits_statistics: false,
            stays_whole: false,
        };
        let plans = Plans {
            made: HashMap::new(),
            kept: HashMap::new(),
            open: None,
            looks_at_shapes: true,
            form: None,
            batch: Bytes::ZERO,
            making: Bytes::ZERO,
            outgrown: HashMap::new(),
        };
        Self {
            memory,
            room: Room::new(budget),
            choices,
            overhead: Overhead::default(),
            pool: None,
            plans,
            structures: Structures::default(),
            ledger: Ledger::default(),
            step: KnownOfStep::default(),
            growth: None,
        }
    }

    /// Compares the process's growth with plans, where the budget is host memory.
    pub(crate) fn measuring(mut self, growth: Option<Growth>) -> Self {
        self.growth = growth;
        self
    }

    /// Computes tensors again where the policy says so. Batches of models with running statistics
    /// are then rather kept whole, unless those may be split.
    pub(crate) fn recomputing(mut self, policy: RecomputePolicy, splits_statistics: bool) -> Self {
        self.choices.recompute = policy;
        self.choices.splits_statistics = splits_statistics;
        self
    }

    /// Plans with the optimizer's state parked, or says what that would save.
    pub(crate) fn parking(mut self, parks: Parks) -> Self {
        self.choices.parks = parks;
        self
    }

    /// Whether the optimizer's state is parked.
    pub(crate) fn parks(&self) -> bool {
        self.choices.parks == Parks::Does
    }

    /// What is parked between optimizer steps.
    pub(crate) fn parked(&self) -> Bytes {
        self.ledger.parked.iter().map(TensorInfo::bytes).sum()
    }

    /// Takes these for the device's rates, if they are known.
    pub(crate) fn with_rates(mut self, rates: Option<Rates>) -> Self {
        self.choices.speed.rates = rates.unwrap_or(self.choices.speed.rates);
        self
    }

    /// Packs masks in booleans of this type.
    pub(crate) fn with_bools(mut self, dtype: DType) -> Self {
        self.choices.speed.bools = Some(dtype);
        self
    }

    /// How batches may be cut.
    fn sizing(&self, phase: Phase) -> Sizing {
        match self.choices.stays_whole && phase == Phase::Training {
            true => Sizing::Whole,
            false => self.choices.sizing,
        }
    }

    /// Whether the user has asked for batches that are never split.
    pub(crate) fn is_never_split(&self) -> bool {
        self.choices.sizing == Sizing::Whole
    }

    /// Whether training batches stay whole because of their items.
    pub(crate) fn stays_whole(&self) -> bool {
        self.choices.stays_whole
    }

    /// Plans every training batch whole from now on. False if the user has chosen the size of
    /// micro-batches, or nothing may be recomputed.
    pub(crate) fn keep_whole(&mut self) -> bool {
        let is_free = !matches!(self.choices.sizing, Sizing::Fixed(_) | Sizing::Whole);
        let may = is_free && self.choices.recompute.if_allowed().is_some();
        if may {
            self.choices.stays_whole = true;
            self.plans.made.retain(|(phase, _), _| *phase != Phase::Training);
        }
        may
    }

    /// Counts this in plans that are made without running.
    pub(crate) fn count(&mut self, overhead: Overhead) {
        self.overhead = overhead;
    }

    /// The plan for batches of this shape, if it exists.
    fn planned(&self, phase: Phase, shape: Shape) -> Option<&Planned> {
        self.plans.made.get(&(phase, shape))
    }

    /// Tells the planner that batches of a phase have run to their end, including the optimizer
    /// step.
    pub(crate) fn has_run(&mut self, phase: Phase) {
        let plans = self.plans.made.iter_mut().filter(|((of, _), _)| *of == phase);
        plans.for_each(|(_, planned)| planned.tuning.has_run());
    }

    /// The memory model that plans are made with.
    pub(crate) fn memory(&self) -> &Arc<dyn MemoryModel> {
        &self.memory
    }

    /// The structural hash of cutting the latest batch, which tells batches of other shapes apart.
    /// `None` if it was not cut.
    pub(crate) fn form(&self) -> Option<StructuralHash> {
        self.plans.form
    }

    /// What training may use.
    pub(crate) fn budget(&self) -> Bytes {
        self.room.budget
    }

    /// The most memory predicted for the run so far.
    pub(crate) fn predicted(&self) -> Bytes {
        self.room.predicted()
    }

    /// Raises the prediction for the run to at least `needed`.
    pub(crate) fn predict(&mut self, needed: Bytes) {
        self.room.predict(needed);
    }

    /// Plans pages on firebox's pool from now on.
    pub(crate) fn use_pool(&mut self, pool: &Arc<TrainingPool>) {
        self.pool = Some(pool.clone());
    }

    pub(crate) fn pool(&self) -> Option<&Arc<TrainingPool>> {
        self.pool.as_ref()
    }

    /// Notes what threads keep permanently before anything has run.
    pub(crate) fn keep_for_threads(&self, bytes: Bytes) {
        self.ledger.kept.fetch_max(bytes.get(), Relaxed);
    }

    /// What threads keep permanently after what has run so far. Whoever runs something outside of
    /// the plans raises it.
    pub(crate) fn kept_by_threads(&self) -> &Arc<AtomicU64> {
        &self.ledger.kept
    }

    /// Whether the model is known to have running statistics.
    pub(crate) fn has_running_state(&self) -> bool {
        !self.step.running_state.is_empty()
    }

    /// What the training step makes of its gradients, if that is nothing linear.
    pub(crate) fn nonlinear(&self) -> Option<&Nonlinear> {
        self.step.nonlinear.as_ref()
    }

    /// Whether a training step was another program than those of earlier batches like it, since
    /// this was asked last.
    pub(crate) fn takes_new_structure(&mut self) -> bool {
        std::mem::take(&mut self.structures.has_new)
    }

    /// Notes that the optimizer brings state along from an earlier run, for these parameters.
    pub(crate) fn bringing(mut self, parameters: Vec<(String, Bytes)>) -> Self {
        self.ledger.brought = parameters;
        self
    }

    /// What updates of the parameters have left.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Notes the paths of running statistics.
    pub(crate) fn add_running_state(&mut self, paths: Vec<String>) {
        self.step.running_state.extend(paths);
    }

    /// What the process has grown by, if the budget is host memory and the system tells.
    pub(crate) fn measured_growth(&mut self) -> Option<Bytes> {
        self.growth.as_mut().and_then(Growth::measured)
    }

    /// Whether planning ran parts of steps, and thereby opened pages.
    pub(crate) fn has_run_steps(&self) -> bool {
        self.step.reads
    }

    /// Limits later plans to this share of the budget: the predicted memory divided by the measured
    /// memory.
    pub(crate) fn be_cautious(&mut self, share: f64) {
        self.room.limit(share);
    }
}
