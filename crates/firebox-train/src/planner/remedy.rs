//! What a batch that does not fit would need with the optimizer's state parked.

use firebox_lazy::{Rehearsal, StepRecorder};
use firebox_plan::{Need, ParkedNeed, PlanError, Split};
use firebox_trace::Bytes;

use super::Planner;
use crate::error::{Phase, TrainError};
use crate::planner::parked::Parks;
use crate::planner::rehearsed::{Conditions, assess};

impl Planner {
    /// Adds to the error for a training batch that does not fit what it would need with the
    /// optimizer's state parked, if that could be.
    pub(super) fn tell_of_parking(
        &self,
        mut error: TrainError,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> TrainError {
        if let TrainError::Plan { phase: Phase::Training, cause } = &mut error
            && self.choices.parks == Parks::Could
            && let Some((split, need)) = misfit(cause)
        {
            let budget = self.room.of_plans();
            let recompute = self.choices.recompute.if_allowed();
            let conditions = self.conditions(Phase::Training, budget);
            // By how much a footprint exceeds a budget need not be known, but for this one.
            let limit = recompute.map_or(Bytes::MAX, |_| budget);
            let conditions = Conditions { parks: true, recompute, budget: limit, ..conditions };
            // A failure of this rehearsal is no reason to say less about the batch.
            let recorder = self.recorder(budget);
            let Ok(rehearsal) = rehearse(split, &recorder) else { return error };
            let rehearsed = assess(rehearsal, &conditions);
            let peak = rehearsed.footprint.peak;
            if !rehearsed.state.parked.is_empty() && peak < need.peak {
                need.parked = Some(ParkedNeed { peak, on_host: self.memory.is_on_host() });
            }
        }
        error
    }
}

/// The split that was found not to fit, and what it needs, unless that is too large a buffer.
fn misfit(error: &mut PlanError<TrainError>) -> Option<(Split, &mut Need)> {
    let (split, need) = match error {
        PlanError::DoesNotFit(error) => (Split::chunks(error.batch.get(), 1), &mut error.need),
        PlanError::FixedDoesNotFit(error) => (error.misfit.split, &mut error.misfit.need),
        _ => return None,
    };
    need.oversized.is_none().then_some((split, need))
}
