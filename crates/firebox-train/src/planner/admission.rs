//! Whether a micro-step may run: what it needs, against what is left beside what is held.

use std::sync::atomic::Ordering::Relaxed;

use firebox_trace::{Bytes, Trace};

use super::{Known, Planned, Planner};
use crate::beside::BesideBytes;
use crate::error::{Phase, TrainError};
use crate::pages::{OpenPages, pages_of};
use crate::rehearsal::recording_bytes;
use crate::shape::Shape;

/// A micro-step that asks to be run.
pub(crate) struct Applicant<'a> {
    pub(crate) phase: Phase,
    pub(crate) trace: &'a Trace,
    /// The batch that it is a part of.
    pub(crate) shape: Shape,
    /// What is alive beside it.
    pub(crate) held: Bytes,
    /// Its items.
    pub(crate) items: usize,
    /// Whether the plan for its batch was made on this very batch.
    pub(crate) rehearsed: bool,
}

/// What may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Runs,
    /// It has no room beside the pages that others have left, and runs once those are given back.
    RunsOnceGivenBack,
}

impl Planner {
    /// What is alive beside a micro-step of the batch that is run now. A batch that is larger than the one that was planned, as one of
    /// longer sequences, is there whole and once more in parts.
    pub(crate) fn held(&self, planned: &Planned) -> Bytes {
        let more = self.batch - planned.batch;
        let parts = planned.plan.len() as f64;
        // What loaders have prepared and what metrics hold is as much longer.
        let BesideBytes { queued, outputs, .. } = planned.rehearsed.beside;
        let beside = match planned.batch {
            Bytes::ZERO => Bytes::ZERO,
            batch => (queued + outputs).scale(more.ratio(batch)),
        };
        let more = more + more.scale(1.0 / parts) + beside;
        planned.held + self.kept_since(planned) + self.remembers + more
    }

    /// What threads keep for good since a plan was made: batches of other shapes have had them do so.
    pub(super) fn kept_since(&self, planned: &Planned) -> Bytes {
        self.kept() - planned.rehearsed.kept
    }

    pub(super) fn kept(&self) -> Bytes {
        Bytes::new(self.kept.load(Relaxed))
    }

    /// Notes that a micro-step of the batch that is run now did not fit, although it was planned so. Where the batch is larger than the
    /// one that was planned, as one of longer sequences, those that are as large are planned anew.
    pub(crate) fn outgrow(&mut self, phase: Phase, shape: Shape) {
        let planned = self.planned(phase, shape);
        if planned.is_some_and(|planned| self.batch > planned.batch) {
            self.outgrown.entry((phase, shape.items)).or_default().insert(self.batch);
        }
    }

    /// The bytes of the largest batch of `items` items that did not fit as it was planned, and is no larger than the one that is run now.
    pub(crate) fn outgrown(&self, phase: Phase, items: usize) -> Bytes {
        let outgrown = self.outgrown.get(&(phase, items));
        let last = outgrown.and_then(|outgrown| outgrown.range(..=self.batch).next_back());
        last.copied().unwrap_or_default()
    }

    /// Whether a micro-step fits beside what is held. Its needs are looked up by its structure, and found out once.
    ///
    /// What a micro-step needs by itself that was rehearsed is what later ones are compared with, where pages count.
    pub(crate) fn admit(&mut self, step: &Applicant) -> Result<Admission, TrainError> {
        let Applicant { phase, trace, shape, held, items, rehearsed } = *step;
        let memory = self.memory.as_ref();
        let structure = (phase, trace.structural_hash());
        let known = self.known.entry(structure).or_insert_with(|| {
            let footprint = memory.footprint(trace);
            let recording = recording_bytes(memory, trace, trace.calls().count());
            let (needed, stays) = (footprint.growth() + recording, footprint.stays);
            Known { needed, stays, pages: pages_of(&footprint) }
        });
        let Known { needed, stays, pages } = known.clone();
        // Threads keep more than the batch was told of, or will.
        let kept = self.kept().max(stays);
        let held = held + (kept - self.kept_in_held);
        let planned = self.plans.get_mut(&(phase, shape)).expect("a batch runs that is planned");
        let peak = planned.plan.peak();
        if rehearsed && pages.is_some() && needed <= peak {
            planned.standalone = planned.standalone.max(needed);
            return Ok(Admission::Runs);
        }
        let budget = (self.budget - held).max(planned.standalone);
        if needed > budget {
            return Err(TrainError::GrewTooLarge { phase, needed, budget });
        }
        self.kept.fetch_max(kept.get(), Relaxed);
        // Larger than what was planned, it may need more.
        if pages.is_none() && (self.batch > planned.batch || kept > planned.rehearsed.kept) {
            self.predicted = self.predicted.max(held + needed);
        }
        let Some(pages) = pages.filter(|_| needed > planned.standalone) else {
            return Ok(Admission::Runs);
        };
        let own = planned.pages().unwrap_or_default();
        let room = self.room(peak);
        let together = self.pages.with(&pages);
        if together <= room {
            self.pages.open(&pages);
            self.predicted = self.predicted.max(together);
            return Ok(Admission::Runs);
        }
        // The pages of other batches go; those of this one may still be needed.
        let mut alone = OpenPages::default();
        alone.open(&own);
        let needed = alone.with(&pages);
        if needed > room && items > 1 {
            return Err(TrainError::GrewTooLarge { phase, needed, budget: room });
        }
        alone.open(&pages);
        self.pages = alone;
        self.predicted = self.predicted.max(needed);
        Ok(Admission::RunsOnceGivenBack)
    }
}
