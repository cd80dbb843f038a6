//! What a run hands back to [`Learner::fit`](crate::Learner::fit).

use burn::train::{LearnerOptimizerRecord, LearnerSchedulerRecord, TrainingModel};

use crate::check::SplitCheck;
use crate::error::{LastState, TrainError};
use crate::report::{MemoryUse, PlanReport};

/// Why a run stopped, and the state to resume from.
pub(crate) type Failure<M, R, S> = (TrainError, Option<LastState<M, R, S>>);

/// What a run hands back in addition to the model.
pub(crate) struct Outcome<M, R, S> {
    pub(crate) plans: Vec<PlanReport>,
    pub(crate) memory: Option<MemoryUse>,
    pub(crate) failure: Option<Failure<M, R, S>>,
    /// The state at the end of a finished run, in case something panics after it.
    pub(crate) at_end: Option<LastState<M, R, S>>,
    /// Whether all ranks know how training ended.
    pub(crate) is_concluded: bool,
    /// Why training stopped before its last epoch.
    pub(crate) stopped: Option<String>,
    /// Whether the gradients of split batches are known to be right.
    pub(crate) split_check: SplitCheck,
}

/// The outcome for these components.
pub(crate) type OutcomeOf<LC> =
    Outcome<TrainingModel<LC>, LearnerOptimizerRecord<LC>, LearnerSchedulerRecord<LC>>;

/// The state to resume from, for these components.
pub(crate) type LastStateOf<LC> =
    LastState<TrainingModel<LC>, LearnerOptimizerRecord<LC>, LearnerSchedulerRecord<LC>>;

impl<M, R, S> Default for Outcome<M, R, S> {
    fn default() -> Self {
        Self {
            plans: Vec::new(),
            memory: None,
            failure: None,
            at_end: None,
            is_concluded: false,
            stopped: None,
            split_check: SplitCheck::NotNeeded,
        }
    }
}
