//! Plans that are not the first of their batches: splits of an earlier run that a resumed one goes
//! on with, and why a batch is planned again.

use std::fmt;

use firebox_lazy::{RecordError, Rehearsal, StepRecorder};
use firebox_plan::{Plan, Split};
use firebox_trace::Bytes;
use serde::{Deserialize, Serialize};

use super::assess::need_of;
use super::{Planned, Planner, PlanningCost};
use crate::error::{Phase, TrainError};
use crate::planner::rehearsed::Rehearsed;
use crate::planner::shape::Shape;

/// How batches are split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Splits {
    plans: Vec<(Phase, Shape, Split)>,
    /// The bytes of batches that outgrew the plan for their number of items.
    outgrown: Vec<(Phase, usize, Bytes)>,
    /// What threads keep permanently. The next plans count it.
    kept_by_threads: Bytes,
}

/// Why a batch is planned again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Replanned {
    /// The device's kernels are tuned by now.
    Tuned,
    /// Threads keep so much more than when it was planned, for batches of other shapes: those of
    /// validation, for example.
    ThreadsKeep(Bytes),
    /// Updates have left so much more than the plan counts.
    UpdatesLeft(Bytes),
}

impl fmt::Display for Replanned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tuned => f.write_str("kernels are tuned by now"),
            Self::ThreadsKeep(more) => {
                write!(f, "batches of other shapes have left {more} that threads keep")
            }
            Self::UpdatesLeft(more) => write!(f, "updates have left {more} more"),
        }
    }
}

impl Planner {
    /// How batches are split by now.
    pub(crate) fn splits(&self) -> Splits {
        let of = |(key, planned): (&(Phase, Shape), &Planned)| (key.0, key.1, planned.plan.split());
        let mut plans: Vec<_> = self.plans.made.iter().map(of).collect();
        plans.sort_unstable_by_key(|(phase, shape, _)| (*phase, *shape));
        let outgrown = self.plans.outgrown.iter();
        let outgrown = outgrown.flat_map(|((phase, items), outgrown)| {
            outgrown.iter().map(|bytes| (*phase, *items, *bytes))
        });
        let mut outgrown: Vec<_> = outgrown.collect();
        outgrown.sort_unstable();
        Splits { plans, outgrown, kept_by_threads: self.kept() }
    }

    /// Splits batches as an earlier run has, where that fits.
    pub(crate) fn go_on_with(&mut self, splits: &Splits) {
        for (phase, items, bytes) in &splits.outgrown {
            self.plans.outgrown.entry((*phase, *items)).or_default().insert(*bytes);
        }
        let plans = splits.plans.iter().map(|(phase, shape, split)| ((*phase, *shape), *split));
        self.plans.kept.extend(plans);
        self.keep_for_threads(splits.kept_by_threads);
    }

    /// The plan with the split that an earlier run had for these batches, if it had one and it
    /// fits.
    pub(super) fn as_before(
        &mut self,
        phase: Phase,
        shape: Shape,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Option<(Plan, Rehearsed)> {
        let split = self.plans.kept.remove(&(phase, shape))?;
        let most = self.choices.recompute.if_allowed().filter(|_| phase == Phase::Training);
        for recompute in [None, most] {
            let mut wanted = self.wanted(phase, shape.items);
            wanted.recompute = recompute;
            let rehearsed = match self.rehearse_one(wanted, split, cost, rehearse) {
                Err(TrainError::Record(RecordError::ReadTooLarge { .. })) if !self.step.reads => {
                    self.step.reads = true;
                    self.rehearse_one(wanted, split, cost, rehearse)
                }
                rehearsed => rehearsed,
            };
            let rehearsed = rehearsed.ok()?;
            if let Some(plan) = Plan::of_split(self.room.of_plans(), split, need_of(&rehearsed)) {
                return Some((plan, rehearsed));
            }
            if most.is_none() || self.step.reads {
                break;
            }
        }
        log::warn!(
            "{phase} batches of {} are no longer split as {split}, which does not fit",
            shape.items
        );
        None
    }
}
