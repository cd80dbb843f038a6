//! Ends a run: notices requests to stop, and hands back why training ended and the state to resume
//! from.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::lr_scheduler::LrScheduler;
use burn::train::Interrupter;
use firebox_lazy::restore;

use super::outcome::LastStateOf;
use super::{Position, Run};
use crate::components::{LazyComponents, TrainBatch, ValidBatch};
use crate::error::{LastState, TrainError};
use crate::run::capture::records;
use crate::splitter::Splitter;

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// Whether training must end because of the interrupter or a signal.
    pub(super) fn should_stop(&self) -> bool {
        self.notice_signal();
        match &self.team {
            None => self.asked.interrupter.should_stop(),
            // All ranks stop after the same step.
            Some(team) => team.stop().is_some(),
        }
    }

    /// Whether a signal asked training to end.
    pub(super) fn is_told_to_end(&self) -> bool {
        match &self.team {
            None => self.asked.signals.as_ref().is_some_and(|signals| signals.seen().is_some()),
            Some(team) => team.stop().is_some_and(|stop| stop.by_signal),
        }
    }

    /// Stores the result of training in the outcome: the error, if any, and the state to resume
    /// from.
    pub(super) fn leave(&mut self, result: Result<(), TrainError>) {
        let loses_the_model = result.as_ref().is_err_and(TrainError::loses_the_model);
        let state = || (!loses_the_model).then(|| self.last_state());
        let state = catch_unwind(AssertUnwindSafe(state)).ok().flatten();
        let mut outcome = self.strategy.outcome();
        outcome.is_concluded = true;
        match result {
            Ok(()) => {
                outcome.at_end = state;
                outcome.stopped = stopped(&self.asked.interrupter);
                outcome.split_check = self.known.split_check();
            }
            Err(cause) => {
                self.on.watch.come_to_rest_after(&cause);
                outcome.failure = Some((cause, state));
            }
        }
    }

    /// The state to resume from.
    fn last_state(&mut self) -> LastStateOf<LC> {
        self.give_back_statistics();
        let optimizer = if self.learning.optimizer_lost {
            None
        } else {
            records(&self.learner, &self.asked.store).optimizer
        };
        // Steps only now, because a scheduler may share its counters with its clones.
        for _ in 0..self.learning.scheduler_steps {
            self.learning.scheduler.step();
        }
        let scheduler = self.learning.scheduler.to_record::<LC::Backend>();
        let Position { epoch, batch: iteration, .. } = self.position;
        LastState { model: self.learner.model(), optimizer, scheduler, epoch, iteration }
    }

    /// Restores the running statistics that the model had at the last optimizer step.
    fn give_back_statistics(&mut self) {
        if let Some(start) = self.learning.batch_start.take()
            && let Err(error) = restore::<LC::Backend, _>(&self.learner.model(), start)
        {
            log::error!("the running statistics are those of a part of a batch: {error}");
        }
    }
}

/// Why training was stopped, if it was.
fn stopped(interrupter: &Interrupter) -> Option<String> {
    let message = || interrupter.get_message().unwrap_or_else(|| "interrupted".to_owned());
    interrupter.should_stop().then(message)
}
