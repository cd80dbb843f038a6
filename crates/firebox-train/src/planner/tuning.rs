//! What is known of the kernels that a plan's batches run on: whether burn's tuner has chosen them.

use super::{Planned, Planner};

/// How many batches run before the tuner has chosen: burn's fusion runs the second one in another way than the first, with kernels of
/// its own.
const TUNING_BATCHES: usize = 2;

/// What is known of the kernels of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tuning {
    /// All were chosen when it was made, or are as good as chosen.
    Chosen,
    /// Some were not: those that need the most memory were counted. So many batches have run since.
    Open {
        ran: usize,
        /// Whether one has begun.
        begun: bool,
    },
}

impl Tuning {
    /// What is known when a plan is made.
    pub(super) fn new(tunes: bool) -> Self {
        if tunes { Self::Open { ran: 0, begun: false } } else { Self::Chosen }
    }

    /// A batch begins.
    pub(super) fn begin(&mut self) {
        if let Self::Open { begun, .. } = self {
            *begun = true;
        }
    }

    /// What has begun has run to its end.
    pub(super) fn has_run(&mut self) {
        if let Self::Open { ran, begun } = self {
            *ran += usize::from(std::mem::take(begun));
        }
    }

    /// Whether a batch may fit in fewer micro-batches than planned, as all kernels are chosen by now.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Open { ran, .. } if ran >= TUNING_BATCHES)
    }
}

impl Planner {
    /// Forgets what has run with kernels that were not chosen, if anything ran with chosen ones; says whether. What it has opened
    /// is given back before the next batch runs, as what stays is of a new group.
    pub(super) fn keep_what_is_chosen(&mut self) -> bool {
        let plans = &mut self.plans;
        let is_chosen = |planned: &Planned| planned.tuning == Tuning::Chosen;
        if !self.ran.iter().any(|(key, _)| plans.get(key).is_some_and(is_chosen)) {
            return false;
        }
        self.ran.retain(|(key, _)| plans.get(key).is_some_and(is_chosen));
        for planned in plans.values_mut() {
            if planned.group == self.group && is_chosen(planned) {
                planned.group += 1;
            }
        }
        self.group += 1;
        true
    }
}
