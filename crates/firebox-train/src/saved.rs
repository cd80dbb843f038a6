//! Saved traces: [`Learner::trace`](crate::Learner::trace) records one, and a [`SavedPlanner`]
//! plans batches of it on a machine that has neither the model nor the card.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn_backend::{Backend, BackendTypes, Element};
use firebox_lazy::{RecordError, Rehearsal, StepRecorder};
use firebox_plan::{Sizing, Split};
use firebox_recompute::Rates;
use firebox_saved::{
    About, ENOUGH, InstantiateError, RecordingProgress, Sample, SaveError, SavedTrace,
};
use firebox_trace::{Bytes, Footprint, MemoryModel, Trace};

use crate::check::{Coupling, Gift, Means, Proved, ToSplit};
use crate::components::{LazyComponents, TrainBatch};
use crate::error::{Phase, TrainError};
use crate::parameters::parameter_bytes;
use crate::planner::Planner;
use crate::planner::largest::{largest, largest_from};
use crate::planner::overhead::Overhead;
use crate::planner::parked::{Parks, park_state};
use crate::planner::recompute::{Attempt, Passes, RecomputePolicy};
use crate::planner::rehearsal::{Iterations, RehearsalPlan, rehearse_training};
use crate::planner::shape::Shape;
use crate::planner::speed::Speed;
use crate::reduction::LossReduction;
use crate::report::PlanReport;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::weights;
use crate::whole::Joining;

/// Records the step of a learner for all batch sizes. `settle` is called after each recording that
/// ran parts of the step, because the model reads values. `progress` is told how far recording is.
pub(crate) fn record<LC, S>(
    learner: &burn::train::Learner<LC>,
    (splitter, batch): (&S, &TrainBatch<LC>),
    settings: &Settings,
    settle: impl Fn(&StepRecorder),
    progress: impl Fn(RecordingProgress),
) -> Result<SavedTrace, TrainError>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    let items = splitter.items(batch)?;
    let model = learner.model();
    let about = About {
        model: About::name_of::<LC::TrainingModel>(),
        backend: <LC::Base as Backend>::name(&model.devices()[0]),
        int: <<LC::Base as BackendTypes>::IntElem as Element>::dtype(),
        items,
        parameters: parameter_bytes::<LC::Backend, _>(&model),
        firebox: env!("CARGO_PKG_VERSION").to_owned(),
        splits: settings.states.kept(|| splits(learner, (splitter, batch, items), settings)),
    };
    let course = RehearsalPlan {
        iterations: Iterations::Two,
        has_stepped: false,
        batches: 1,
        pages: true,
        exchanges: false,
        parks: false,
    };
    let mut recorder = StepRecorder::new().substitute_random().refuse_reads();
    let record = |split: Split, at: RecordingProgress| {
        progress(at);
        // A batch of its own, not a part of a larger one.
        let batch = splitter.range(batch, 0..split.batch().get());
        let rehearse = |recorder: &StepRecorder| {
            let rehearse =
                || rehearse_training(learner, splitter, &batch, split, course, None, recorder);
            settings.states.kept(rehearse)
        };
        let mut rehearsed = rehearse(&recorder);
        if let Err(TrainError::Record(RecordError::ReadTooLarge { .. })) = rehearsed {
            recorder = StepRecorder::new().substitute_random();
            rehearsed = rehearse(&recorder);
        }
        settle(&recorder);
        let Rehearsal { trace, replaced, .. } = rehearsed?;
        Ok(Sample { trace, replaced })
    };
    SavedTrace::record(about, record).map_err(|error| match error {
        SaveError::Recording { cause, .. } => cause,
        SaveError::EmptyBatch => TrainError::EmptyBatch { phase: Phase::Training },
        irregular => TrainError::NotSaved { message: irregular.to_string() },
    })
}

/// What the recorded step shows of whether batches may be split.
fn splits<LC, S>(
    learner: &burn::train::Learner<LC>,
    (splitter, batch, items): (&S, &TrainBatch<LC>, usize),
    settings: &Settings,
) -> Option<String>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    if items < 2 {
        return None;
    }
    let items = items.min(ENOUGH);
    let batch = &splitter.range(batch, 0..items);
    let planner = settings.planner::<LC::Backend, _>(&learner.model()).ok()?;
    let weight = splitter.weight(batch);
    let of = ToSplit {
        batch,
        items,
        weight,
        micro_batch: items / 2,
        form: None,
        parts: vec![0..items / 2, items / 2..items],
        splitter,
        reduction: settings.reduction(),
        is_declared: settings.reduction.is_some(),
        ranks: 1,
        weighs: weights::differ(weight, items as f64, items),
        scale: None,
    };
    let proved =
        Means::of(&planner, Bytes::ZERO).check(learner, &of, (true, false)).prove(&of.parts);
    Some(match proved {
        Proved::Exact(gifts, reduction) => {
            let of = match reduction {
                LossReduction::Mean => "a mean over items",
                LossReduction::Sum => "a sum over items",
            };
            let is_given = gifts.iter().any(Gift::is_given);
            let given = if is_given { ", parts are given numbers of their batch" } else { "" };
            format!("exact: {of}{given}")
        }
        Proved::Differs { at: Some(at), .. } => format!("not exact: items meet in {at}"),
        Proved::Differs { coupling, .. } => format!("not exact: {coupling}"),
        Proved::Weighs { .. } => format!("not exact: {}", Coupling::Weights),
        Proved::Meet(at) => format!("not known: items meet in {at}, and may come apart again"),
        Proved::Undecided(why) => format!("not known: {why}"),
    })
}

/// Writes a saved trace.
pub(crate) fn write(trace: &SavedTrace, path: &Path) -> Result<(), TrainError> {
    let written = trace.save(path);
    written.map_err(|cause| TrainError::TraceNotWritten { path: PathBuf::from(path), cause })
}

/// Tries whether a file can be written there, before the trace is recorded.
pub(crate) fn can_write(path: &Path) -> Result<(), TrainError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let tried = tempfile::tempfile_in(folder.unwrap_or(Path::new("."))).map(drop);
    tried.map_err(|cause| TrainError::TraceNotWritten { path: PathBuf::from(path), cause })
}

/// Plans batches of a [`SavedTrace`] on a device that need not be there.
///
/// As [`Learner::plan`](crate::Learner::plan), excludes what only a training run has, such as
/// batches of loader threads. Where a batch is split, also excludes its [joined
/// outputs](crate::LearnerBuilder::metrics_see_whole).
#[derive(Clone)]
pub struct SavedPlanner {
    device: String,
    memory: Arc<dyn MemoryModel>,
    budget: Bytes,
    sizing: Sizing,
    recompute: RecomputePolicy,
    rates: Option<Rates>,
    parks: Parks,
    overhead: Overhead,
}

impl std::fmt::Debug for SavedPlanner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedPlanner")
            .field("device", &self.device)
            .field("memory", &self.memory.name())
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

impl SavedPlanner {
    /// Plans for a device with this name, memory model and budget.
    pub fn new(device: impl Into<String>, memory: Arc<dyn MemoryModel>, budget: Bytes) -> Self {
        Self {
            device: device.into(),
            memory,
            budget,
            sizing: Sizing::default(),
            recompute: RecomputePolicy::default(),
            rates: None,
            parks: Parks::Could,
            overhead: Overhead::default(),
        }
    }

    /// How micro-batch sizes are chosen. Default: [`Sizing::Even`].
    #[must_use]
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = sizing;
        self
    }

    /// When tensors are recomputed instead of kept. Default: as in
    /// [`LearnerBuilder::recompute`](crate::LearnerBuilder::recompute).
    #[must_use]
    pub fn recompute(mut self, policy: RecomputePolicy) -> Self {
        self.recompute = policy;
        self
    }

    /// How fast the device computes, see [`DeviceMemory::rates`](crate::DeviceMemory::rates) and
    /// [`rates_of`](crate::rates_of). Default: unknown.
    #[must_use]
    pub fn rates(mut self, rates: Option<Rates>) -> Self {
        self.rates = rates;
        self
    }

    /// Keeps the optimizer's state outside of the device between steps, as
    /// [`LearnerBuilder::park_optimizer`](crate::LearnerBuilder::park_optimizer) does. Default: it
    /// stays on the device.
    #[must_use]
    pub fn park_optimizer(mut self) -> Self {
        self.parks = Parks::Does;
        self
    }

    /// Counts a checkpoint that is written while training goes on. Default: none.
    #[must_use]
    pub fn with_checkpoint(mut self) -> Self {
        self.overhead.saves = true;
        self
    }

    /// Whether the allocator reserves whole pages and keeps them.
    /// The budget.
    pub fn budget(&self) -> Bytes {
        self.budget
    }

    /// The plan for a batch of `items` items.
    ///
    /// # Errors
    ///
    /// If the batch does not fit however it is cut, or the trace says nothing about such a batch.
    pub fn plan(&self, trace: &SavedTrace, items: usize) -> Result<PlanReport, TrainError> {
        if items == 0 {
            return Err(TrainError::EmptyBatch { phase: Phase::Training });
        }
        let rehearse =
            |split: Split, _: (Iterations, Joining), _: &StepRecorder| rehearsed(trace, split);
        let shape = Shape::of_items(items);
        let planned = self.planner().plan_alone(shape, Joining::Asked, rehearse)?;
        Ok(PlanReport::new(self.device.clone(), self.budget, Phase::Training, &planned))
    }

    /// Two iterations on a batch that is cut as `split` says, and the memory they need at each
    /// step.
    ///
    /// # Errors
    ///
    /// If the trace says nothing about such a batch.
    pub fn footprint(
        &self,
        trace: &SavedTrace,
        split: Split,
    ) -> Result<(Trace, Footprint), TrainError> {
        let trace = self.iterations(trace, split)?;
        let footprint = self.memory.footprint(&trace);
        Ok((trace, footprint))
    }

    /// The iterations that a plan runs, with what it recomputes, and the memory they need at
    /// each step.
    ///
    /// # Errors
    ///
    /// If the trace says nothing about such a batch.
    pub fn footprint_of(
        &self,
        trace: &SavedTrace,
        plan: &PlanReport,
    ) -> Result<(Trace, Footprint), TrainError> {
        let recorded = self.iterations(trace, plan.plan.split())?;
        let recipes = plan.recipes.as_ref();
        let trace = recipes.and_then(|recipes| recipes.rewrite(&recorded)).unwrap_or(recorded);
        let footprint = self.memory.footprint(&trace);
        Ok((trace, footprint))
    }

    /// The least that a batch needs if tensors are recomputed, for at most the policy's share
    /// of time: bytes, and the share. `None` if nothing can be recomputed.
    pub(crate) fn least(
        &self,
        trace: &SavedTrace,
        split: Split,
    ) -> Result<Option<(Bytes, f64)>, TrainError> {
        let most = self.recompute.if_allowed().unwrap_or(MOST_OVERHEAD);
        let trace = self.iterations(trace, split)?;
        let memory = &*self.memory;
        let passes = Passes::of(&trace, memory, Speed::of(memory, self.rates));
        let least = passes.and_then(|passes| passes.least(&trace, most));
        let answer = |attempt: Attempt| {
            (memory.footprint(&attempt.trace).peak, attempt.recomputed.report().overhead)
        };
        Ok(least.map(answer))
    }

    /// What a device runs for a batch that is cut as `split` says.
    fn iterations(&self, trace: &SavedTrace, split: Split) -> Result<Trace, TrainError> {
        let mut trace = trace.sample(split)?.trace;
        if self.parks == Parks::Does {
            park_state(&mut trace);
        }
        Ok(trace)
    }

    fn planner(&self) -> Planner {
        let planner = Planner::new(self.memory.clone(), self.budget, self.sizing);
        let planner = planner.with_rates(self.rates);
        let mut planner = planner.recomputing(self.recompute, false).parking(self.parks);
        planner.count(self.overhead);
        planner
    }

    /// The largest batch of up to 16,777,216 items that fits without being split, and zero if one
    /// item does not fit.
    ///
    /// A larger batch may still fit where pages are opened at sizes that other batches do not need:
    /// not all sizes are tried.
    ///
    /// # Errors
    ///
    /// As [`footprint`](Self::footprint).
    pub fn largest_batch(&self, trace: &SavedTrace) -> Result<usize, TrainError> {
        let planner = self.planner();
        largest(MOST_ITEMS, self.budget, |items| need_of(&planner, trace, items, None))
    }

    /// The same if tensors may be recomputed, for at most the policy's share of time.
    ///
    /// # Errors
    ///
    /// As [`footprint`](Self::footprint).
    pub fn largest_batch_recomputed(&self, trace: &SavedTrace) -> Result<usize, TrainError> {
        let as_recorded = self.largest_batch(trace)?;
        let Some(most) = self.recompute.if_allowed() else { return Ok(as_recorded) };
        let planner = self.planner();
        largest_from(as_recorded, MOST_ITEMS, |items| {
            Ok(need_of(&planner, trace, items, Some(most))? <= self.budget)
        })
    }
}

/// What a whole batch needs. Above the budget, it may be less than what is needed.
fn need_of(
    planner: &Planner,
    trace: &SavedTrace,
    items: usize,
    recompute: Option<f64>,
) -> Result<Bytes, TrainError> {
    match rehearsed(trace, Split::whole(items)) {
        Err(TrainError::Saved(InstantiateError::TooLarge(_))) => Ok(Bytes::MAX),
        rehearsal => Ok(planner.need_of(recompute, rehearsal?)),
    }
}

/// What a rehearsal of a split would have recorded.
fn rehearsed(trace: &SavedTrace, split: Split) -> Result<Rehearsal, TrainError> {
    let Sample { trace, replaced } = trace.sample(split)?;
    Ok(Rehearsal { trace, survivors: Vec::new(), replaced })
}

/// The share of time that advice may cost where a policy says nothing.
const MOST_OVERHEAD: f64 = 0.3;

/// The largest batch that [`SavedPlanner::largest_batch`] tries.
const MOST_ITEMS: usize = 1 << 24;
