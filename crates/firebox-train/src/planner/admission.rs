//! Admission: whether a micro-step may run, given what it needs and what is left of the budget.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use firebox_plan::Sizing;
use firebox_recompute::Program;
use firebox_trace::{Bytes, Footprint, Origin, TensorInfo, Trace};

use super::{Admitted, Known, PROGRAMS, Planned, Planner, Written};
use crate::error::{Phase, TrainError};
use crate::planner::overhead::OverheadBytes;
use crate::planner::recompute::{Attempt, Passes};
use crate::planner::rehearsed::recording_bytes;
use crate::planner::shape::Shape;

/// A micro-step that asks to run.
pub(crate) struct Applicant<'a> {
    pub(crate) phase: Phase,
    pub(crate) trace: &'a Trace,
    /// The shape of the batch it belongs to.
    pub(crate) shape: Shape,
    /// What is alive while it runs, apart from itself.
    pub(crate) held: Bytes,
    /// The number of its items.
    pub(crate) items: usize,
    /// Whether the plan for its batch was made on this same batch.
    pub(crate) rehearsed: bool,
}

/// How a micro-step or batch may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Runs,
    /// Once the pages that others left are given back.
    RunsOnceGivenBack,
}

impl Planner {
    /// What is alive next to a micro-step of the current batch. If this batch is larger than the
    /// planned one, for example because its sequences are longer, the excess counts once whole and
    /// once more in parts.
    pub(crate) fn held(&self, planned: &Planned) -> Bytes {
        let more = self.plans.batch - planned.batch;
        let parts = planned.plan.len() as f64;
        // The batches of loaders and the outputs of metrics grow in the same ratio.
        let OverheadBytes { queued, outputs, .. } = planned.rehearsed.overhead;
        let overhead = match planned.batch {
            Bytes::ZERO => Bytes::ZERO,
            batch => (queued + outputs).scale(more.ratio(batch)),
        };
        let more = more + more.scale(1.0 / parts) + overhead;
        let grown = self.grown(planned) + self.ledger.beyond();
        planned.held + self.kept_since(planned) + more + grown
    }

    /// What updates have left since a plan was made that it does not count.
    pub(super) fn grown(&self, planned: &Planned) -> Bytes {
        self.ledger.total() - planned.state
    }

    /// What threads have begun to keep permanently since a plan was made, because of batches of
    /// other shapes.
    pub(super) fn kept_since(&self, planned: &Planned) -> Bytes {
        self.kept() - planned.rehearsed.kept
    }

    pub(super) fn kept(&self) -> Bytes {
        Bytes::new(self.ledger.kept.load(Relaxed))
    }

    /// Notes that a planned micro-step of the current batch did not fit. If this batch is larger
    /// than the planned one, for example because its sequences are longer, batches at least as
    /// large get a new plan.
    pub(crate) fn outgrow(&mut self, phase: Phase, shape: Shape) {
        let planned = self.planned(phase, shape);
        if planned.is_some_and(|planned| self.plans.batch > planned.batch) {
            self.plans.outgrown.entry((phase, shape.items)).or_default().insert(self.plans.batch);
        }
    }

    /// The bytes of the largest batch of `items` items that outgrew its plan and is no larger than
    /// the current batch.
    pub(crate) fn outgrown(&self, phase: Phase, items: usize) -> Bytes {
        let outgrown = self.plans.outgrown.get(&(phase, items));
        let last = outgrown.and_then(|outgrown| outgrown.range(..=self.plans.batch).next_back());
        last.copied().unwrap_or_default()
    }

    /// Whether a micro-step fits in addition to what is held. Its need is computed once and then
    /// looked up by its structure. If the plan computes tensors again, the program that runs
    /// instead of what was recorded comes with the answer.
    ///
    /// Where pages count, the standalone need of a rehearsed micro-step is the measure for later
    /// ones.
    pub(crate) fn admit(
        &mut self,
        step: &Applicant,
    ) -> Result<(Admission, Option<Arc<Program>>), TrainError> {
        let admitted = self.look_up(step);
        let program = admitted.program.clone();
        match self.admit_known(step, admitted) {
            Err(TrainError::GrewTooLarge { phase, items, needed, budget })
                if step.items == 1 || self.sizing(phase) == Sizing::Whole =>
            {
                let too_large = TrainError::GrewTooLarge { phase, items, needed, budget };
                let Some(smaller) = self.squeeze(step, needed, budget) else {
                    return Err(too_large);
                };
                let program = smaller.program.clone();
                self.admit_known(step, smaller).map(|admission| (admission, program))
            }
            admission => admission.map(|admission| (admission, program)),
        }
    }

    /// What a micro-step needs.
    fn look_up(&mut self, step: &Applicant) -> Admitted {
        let Applicant { phase, trace, shape, .. } = *step;
        let planned = self.plans.made.get(&(phase, shape));
        let recomputed = planned.and_then(|planned| planned.rehearsed.recomputed.as_ref());
        // A part of a step that reads values has run as it was recorded.
        let recomputed = recomputed.filter(|_| trace.reads().next().is_none());
        let written = recomputed.map_or(Written::AsRecorded, |one| Written::Within(one.limit()));
        let structure = (phase, trace.structural_hash(), written);
        if let Some(known) = self.known_of(&structure, trace) {
            if step.rehearsed && !known.is_planned {
                let known = Admitted { is_planned: true, ..known };
                self.structures.known.insert(structure, known.clone());
                return known;
            }
            return known;
        }
        let is_alike = planned.is_some_and(|planned| planned.batch == self.plans.batch);
        self.structures.has_new |= phase == Phase::Training && is_alike && !step.rehearsed;
        let memory = self.memory.as_ref();
        let program = recomputed.and_then(|one| one.program(trace, memory)).map(Arc::new);
        let rewritten = program.as_ref().map(|program| program.trace());
        let footprint = memory.footprint(rewritten.unwrap_or(trace));
        let is_planned = step.rehearsed;
        let admitted = Admitted { is_planned, ..self.needs(trace, program, &footprint) };
        self.remember(structure, admitted)
    }

    /// A micro-step that cannot be cut further and needs too much: computes tensors again, if that
    /// is allowed and enough.
    fn squeeze(&mut self, step: &Applicant, needed: Bytes, budget: Bytes) -> Option<Admitted> {
        let Applicant { phase, trace, .. } = *step;
        // A part of a step that reads values has run.
        let may = phase == Phase::Training && trace.reads().next().is_none();
        let most = self.choices.recompute.if_allowed().filter(|_| may)?;
        let structure = (phase, trace.structural_hash(), Written::Squeezed);
        // What was found for a larger budget may be too large for this one.
        let known = self.known_of(&structure, trace);
        if let Some(known) = known.filter(|known| known.needed <= budget) {
            return Some(known);
        }
        let memory = self.memory.clone();
        let passes = Passes::alone(trace, &*memory, self.choices.speed)?;
        let recording = self.recording(trace);
        let answer = |attempt: &Attempt| {
            let programs = if memory.is_on_host() { attempt.programs } else { Bytes::ZERO };
            let footprint = memory.footprint(&attempt.trace);
            (footprint.growth() + recording + programs, footprint)
        };
        let (found, footprint) = passes.within(trace, (budget, needed, most), answer).ok()?;
        let program = Arc::new(found.recomputed.of_one(trace)?);
        log::warn!("a micro-batch that outgrew its plan: {}", found.recomputed.report());
        let admitted = self.needs(trace, Some(program), &footprint);
        Some(self.remember(structure, admitted))
    }

    fn known_of(&self, structure: &Known, trace: &Trace) -> Option<Admitted> {
        let known = self.structures.known.get(structure)?;
        let is_its_own = known.program.as_ref().is_none_or(|program| program.is_of(trace));
        is_its_own.then(|| known.clone())
    }

    /// What recording a micro-step takes.
    fn recording(&self, trace: &Trace) -> Bytes {
        recording_bytes(&*self.memory, trace, trace.calls().count())
    }

    /// What a recorded micro-step needs, given the footprint of what runs.
    fn needs(
        &self,
        trace: &Trace,
        program: Option<Arc<Program>>,
        footprint: &Footprint,
    ) -> Admitted {
        let mut needed = footprint.growth() + self.recording(trace);
        if self.memory.is_on_host() {
            needed += program.as_ref().map_or(Bytes::ZERO, |program| program.host_bytes());
        }
        let made = trace.survivors().into_iter().map(|tensor| trace.tensor(tensor));
        let leaves = made.filter(|tensor| tensor.origin != Origin::Existing).map(TensorInfo::bytes);
        Admitted {
            program,
            needed,
            leaves: leaves.sum(),
            is_planned: false,
            stays: footprint.stays,
            is_paged: footprint.paging.is_some(),
        }
    }

    /// Remembers what a structure needs. Of programs, which are large, only the latest few.
    fn remember(&mut self, structure: Known, admitted: Admitted) -> Admitted {
        if admitted.program.is_some() {
            self.structures.programs.retain(|known| *known != structure);
            self.structures.programs.push_back(structure);
            if self.structures.programs.len() > PROGRAMS
                && let Some(oldest) = self.structures.programs.pop_front()
            {
                self.structures.known.remove(&oldest);
            }
        }
        self.structures.known.insert(structure, admitted.clone());
        admitted
    }

    /// The host memory of the programs of other structures than the one that runs.
    fn other_programs(&self, running: Option<&Arc<Program>>) -> Bytes {
        if !self.memory.is_on_host() {
            return Bytes::ZERO;
        }
        let programs =
            self.structures.programs.iter().filter_map(|known| self.structures.known.get(known));
        let programs = programs.filter_map(|known| known.program.as_ref());
        let is_running =
            |program: &&Arc<Program>| running.is_some_and(|running| Arc::ptr_eq(running, program));
        programs.filter(|program| !is_running(program)).map(|program| program.host_bytes()).sum()
    }

    fn admit_known(
        &mut self,
        step: &Applicant,
        admitted: Admitted,
    ) -> Result<Admission, TrainError> {
        let Applicant { phase, shape, held, items, rehearsed, .. } = *step;
        let others = self.other_programs(admitted.program.as_ref());
        let Admitted { needed, leaves, is_planned, stays, is_paged, .. } = admitted;
        // Threads keep, or will keep, more than was counted when the batch began.
        let kept = self.kept().max(stays);
        let held = held + (kept - self.ledger.kept_in_held) + others + self.ledger.beyond();
        let planned =
            self.plans.made.get_mut(&(phase, shape)).expect("a batch runs that is planned");
        let peak = planned.plan.peak();
        if rehearsed {
            planned.leaves = planned.leaves.max(leaves);
        }
        if rehearsed && is_paged && needed <= peak {
            planned.standalone = planned.standalone.max(needed);
            return Ok(Admission::Runs);
        }
        let budget = self.room.beside(held).max(planned.standalone);
        if needed > budget {
            return Err(TrainError::GrewTooLarge { phase, items: items.into(), needed, budget });
        }
        self.ledger.kept.fetch_max(kept.get(), Relaxed);
        if !is_planned {
            // What outputs grow by with a larger batch is held already.
            let more = match planned.batch {
                Bytes::ZERO => 0.0,
                batch => (self.plans.batch - batch).ratio(batch),
            };
            let outputs = planned.rehearsed.overhead.outputs.scale(more);
            self.ledger.leaves(leaves - planned.leaves - outputs);
        }
        // A micro-step larger than planned, or of another program, may need more than predicted.
        let is_more = self.plans.batch > planned.batch || kept > planned.rehearsed.kept;
        if is_more || !is_planned {
            self.room.predict(held + needed);
        }
        match self.memory.keeps_pages() && needed > planned.standalone {
            true => Ok(Admission::RunsOnceGivenBack),
            false => Ok(Admission::Runs),
        }
    }
}
