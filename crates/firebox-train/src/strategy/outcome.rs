//! What a run leaves.

use burn::lr_scheduler::LrScheduler;
use burn::optim::Optimizer;

use crate::check::SplitCheck;
use crate::error::{LastState, TrainError};
use crate::report::{MemoryUse, PlanReport};

/// Why a run stopped, and what training can go on from.
pub(crate) type Failure<M, R, S> = (TrainError, Option<LastState<M, R, S>>);

/// What a run leaves beside the model.
pub(crate) struct Outcome<M, R, S> {
    pub(crate) plans: Vec<PlanReport>,
    pub(crate) memory: Option<MemoryUse>,
    pub(crate) failure: Option<Failure<M, R, S>>,
    /// What training can go on from where it came to its end: for when something panics behind it.
    pub(crate) at_end: Option<LastState<M, R, S>>,
    /// Why training stopped before its last epoch.
    pub(crate) stopped: Option<String>,
    /// What is known of the gradients of split batches.
    pub(crate) split_check: SplitCheck,
}

/// What a run of these leaves.
pub(crate) type OutcomeOf<B, LR, M, O> =
    Outcome<M, <O as Optimizer<M, B>>::Record, <LR as LrScheduler>::Record<B>>;

impl<M, R, S> Default for Outcome<M, R, S> {
    fn default() -> Self {
        Self {
            plans: Vec::new(),
            memory: None,
            failure: None,
            at_end: None,
            stopped: None,
            split_check: SplitCheck::NotNeeded,
        }
    }
}
