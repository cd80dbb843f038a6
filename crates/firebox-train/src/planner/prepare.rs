//! The planner's one door for the training and validation loops: [`Planner::prepare`] makes a batch
//! ready to run, and plans it first if it has no plan.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use firebox_lazy::{Rehearsal, StepRecorder};
use firebox_plan::{Plan, Split};
use firebox_trace::{Bytes, PoolPages};

use super::{Planned, Planner, Replanned};
use crate::error::{Phase, TrainError};
use crate::planner::admission::Admission;
use crate::planner::overhead::Overhead;
use crate::planner::rehearsal::Iterations;
use crate::planner::rehearsed::{Conditions, assess};
use crate::planner::shape::Shape;
use crate::whole::Joining;

/// A batch that is about to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchToRun {
    pub(crate) phase: Phase,
    pub(crate) shape: Shape,
    /// Whether a batch of the same shape comes before it, or other batches are summed up with it.
    pub(crate) again: bool,
    /// Which of its outputs are to be joined for the metrics, if that fits.
    pub(crate) joining: Joining,
}

/// How a batch runs.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) shape: Shape,
    pub(crate) plan: Arc<Plan>,
    /// Which of its outputs are joined for the metrics.
    pub(crate) joining: Joining,
    /// What is alive next to one of its micro-batches.
    pub(crate) held: Bytes,
    /// What must be done before it runs.
    pub(crate) admission: Admission,
    /// On firebox's pool: the pages that all plans together need (the largest of each kind), and
    /// the pages of this plan.
    pub(crate) pages: Option<[PoolPages; 2]>,
    /// Its plan, if it was made on this same batch.
    pub(crate) made: Option<Planned>,
}

impl Planner {
    /// Decides how a batch runs. If it has no plan, `overhead` tells what goes on outside of its
    /// steps, and `rehearse` rehearses one split of it for a number of iterations, with outputs
    /// joined or not.
    ///
    /// # Errors
    ///
    /// If the batch does not fit however it is cut, and those of `rehearse`.
    pub(crate) fn prepare(
        &mut self,
        batch: &BatchToRun,
        overhead: impl FnOnce() -> Overhead,
        mut rehearse: impl FnMut(
            Split,
            (Iterations, Joining),
            &StepRecorder,
        ) -> Result<Rehearsal, TrainError>,
    ) -> Result<Prepared, TrainError> {
        let BatchToRun { phase, shape, again, joining } = *batch;
        let mut made = None;
        let mut overhead = Some(overhead);
        // Once more, if the first plan has shown what an optimizer brings along.
        while let Some((iterations, why)) = self.to_plan(phase, shape, again) {
            self.overhead = overhead.take().map_or(self.overhead, |overhead| overhead());
            let rehearse = |split: Split, joining: Joining, recorder: &StepRecorder| {
                rehearse(split, (iterations, joining), recorder)
            };
            let planned = self.plan((phase, shape), iterations, joining, rehearse)?.clone();
            let is_over = self.grown(&planned) == Bytes::ZERO;
            made = Some(Planned { again: why, ..planned });
            if is_over {
                break;
            }
        }
        let admission = self.begin(phase, shape);
        let making = self.plans.made[&(phase, shape)].rehearsed.idle + self.plans.making;
        // Where an allocator is measured, that says what more there is.
        if self.memory.is_on_host() {
            self.room.predict(making);
        }
        if let Some(made) = &mut made {
            made.making = making;
        }
        let planned = &self.plans.made[&(phase, shape)];
        let (plan, held, joining) = (planned.plan.clone(), self.held(planned), planned.joining);
        let pages = self.pool_pages(planned);
        Ok(Prepared { shape, plan, joining, held, admission, pages, made })
    }

    /// The plan for training batches of this shape, without running one, with the outputs that are
    /// to be joined.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare).
    pub(crate) fn plan_alone(
        &mut self,
        shape: Shape,
        joining: Joining,
        mut rehearse: impl FnMut(
            Split,
            (Iterations, Joining),
            &StepRecorder,
        ) -> Result<Rehearsal, TrainError>,
    ) -> Result<Planned, TrainError> {
        let iterations = Iterations::Two;
        let rehearse = |split: Split, joining: Joining, recorder: &StepRecorder| {
            rehearse(split, (iterations, joining), recorder)
        };
        self.plan((Phase::Training, shape), iterations, joining, rehearse).cloned()
    }

    /// What one split of a training batch needs, without a search. Above the budget, it may be less
    /// than what is needed. `recompute` is the share of time that may be spent on computing tensors
    /// again, if any.
    pub(crate) fn need_of(&self, recompute: Option<f64>, rehearsal: Rehearsal) -> Bytes {
        let conditions = self.conditions(Phase::Training, self.room.budget);
        let conditions = Conditions { recompute, ..conditions };
        assess(rehearsal, &conditions).footprint.peak
    }

    /// How many consecutive batches of this shape to plan for, or `None` if that plan exists.
    /// `again` tells whether the last batch also had this shape.
    ///
    /// Where pages count, the first shape is planned for two batches. Every other shape, such as
    /// the last batch of an epoch, is planned for one until two come in a row, because two may need
    /// a page that one does not.
    pub(super) fn to_plan(
        &self,
        phase: Phase,
        shape: Shape,
        again: bool,
    ) -> Option<(Iterations, Option<Replanned>)> {
        let has_trained = self.plans.made.keys().any(|(phase, _)| *phase == Phase::Training);
        let iterations = match phase {
            Phase::Training if has_trained && !again && !self.memory.is_on_host() => {
                Iterations::One
            }
            _ => Iterations::Two,
        };
        let planned = self.planned(phase, shape);
        if let Some(planned) = planned.filter(|planned| planned.tuning.is_over()) {
            return Some((planned.iterations, Some(Replanned::Tuned)));
        }
        // Threads have begun to keep memory, or updates have left some, that the plan has no room
        // for.
        let has_no_room = planned.and_then(|planned| {
            let (kept, grown) = (self.kept_since(planned), self.grown(planned));
            let has_more = planned.kept < self.kept() || grown > Bytes::ZERO;
            let is_too_much = planned.plan.peak() + kept + grown > self.room.of_plans();
            let why = match grown {
                Bytes::ZERO => Replanned::ThreadsKeep(kept),
                grown => Replanned::UpdatesLeft(grown),
            };
            (has_more && is_too_much).then_some((planned.iterations, Some(why)))
        });
        if has_no_room.is_some() {
            return has_no_room;
        }
        let planned = planned.map(|planned| planned.iterations);
        let is_enough = planned == Some(Iterations::Two) || planned == Some(iterations);
        (!is_enough).then_some((iterations, None))
    }

    /// Begins a planned batch. Returns what must be done before it runs: where an allocator keeps
    /// pages, those of another plan are given back, so that a plan counts its own alone.
    pub(super) fn begin(&mut self, phase: Phase, shape: Shape) -> Admission {
        self.ledger.begin();
        let grown = self.planned(phase, shape).map_or(Bytes::ZERO, |planned| self.grown(planned));
        let planned = self.plans.made.get_mut(&(phase, shape)).expect("it has a plan");
        planned.tuning.begin();
        let (peak, kept) = (planned.plan.peak() + grown, planned.rehearsed.kept);
        self.ledger.kept.fetch_max(kept.get(), Relaxed);
        self.ledger.kept_in_held = self.kept();
        self.room.predict(peak + (self.kept() - kept));
        let is_open = self.plans.open.replace((phase, shape)) == Some((phase, shape));
        match is_open || !self.memory.keeps_pages() {
            true => Admission::Runs,
            false => Admission::RunsOnceGivenBack,
        }
    }

    fn pool_pages(&self, planned: &Planned) -> Option<[PoolPages; 2]> {
        let pages = |planned: &Planned| planned.rehearsed.footprint.paging.as_ref()?.pool;
        let of_one = pages(planned)?;
        let all = self.plans.made.values().filter_map(pages);
        Some([all.fold(of_one, |one, other| one.larger(&other)), of_one])
    }
}
