//! What training leaves, and why it stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::store::EventStoreClient;
use burn::train::{InferenceStep, Interrupter, TrainStep};
use firebox_lazy::{LazyBackend, restore};

use super::{Run, ValidInput};
use crate::capture::records;
use crate::device::DeviceMemory;
use crate::error::{LastState, TrainError};
use crate::signals::Signals;
use crate::splitter::Splitter;

impl<B, LR, M, O, ST, SV> Run<'_, B, LR, M, O, ST, SV>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    LR: LrScheduler + 'static,
    M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep,
    O: Optimizer<M, B> + 'static,
    ST: Splitter<M::Input>,
    SV: Splitter<ValidInput<M, B>>,
{
    /// Whether training is to end, as the interrupter or a signal says.
    pub(super) fn should_stop(&self) -> bool {
        let signal = self.signals.as_ref().and_then(Signals::seen);
        if let Some(signal) = signal.filter(|_| !self.interrupter.should_stop()) {
            self.interrupter.stop(Some(signal));
            let (epoch, iteration) = self.position;
            let text =
                format!("{signal}: training ends in epoch {epoch}, behind batch {iteration}");
            self.strategy.settings.say(log::Level::Warn, &text);
        }
        self.interrupter.should_stop()
    }

    /// Whether a signal says so.
    pub(super) fn is_told_to_end(&self) -> bool {
        self.signals.as_ref().is_some_and(|signals| signals.seen().is_some())
    }

    /// Leaves why training ended, if that is an error, and what it can go on from.
    pub(super) fn leave(&mut self, result: Result<(), TrainError>, store: &EventStoreClient) {
        let loses_the_model = result.as_ref().is_err_and(TrainError::loses_the_model);
        let state = || (!loses_the_model).then(|| self.last_state(store));
        let state = catch_unwind(AssertUnwindSafe(state)).ok().flatten();
        let mut outcome = self.strategy.outcome();
        match result {
            Ok(()) => {
                outcome.at_end = state;
                outcome.stopped = stopped(&self.interrupter);
                outcome.split_check = self.known.split_check();
            }
            Err(cause) => {
                self.watch.come_to_rest_after(&cause);
                outcome.failure = Some((cause, state));
            }
        }
    }

    /// What training can go on from.
    fn last_state(&mut self, store: &EventStoreClient) -> LastState<M, O::Record, LR::Record<B>> {
        self.give_back_statistics();
        let optimizer =
            if self.optimizer_lost { None } else { records(&self.learner, store).optimizer };
        // Not before: a scheduler may share what it counts with its clones.
        for _ in 0..self.scheduler_steps {
            self.scheduler.step();
        }
        let scheduler = self.scheduler.to_record::<B>();
        let (epoch, iteration) = self.position;
        LastState { model: self.learner.model(), optimizer, scheduler, epoch, iteration }
    }

    /// Gives the model the running statistics that it had at the last optimizer step.
    fn give_back_statistics(&mut self) {
        if let Some(start) = self.batch_start.take()
            && let Err(error) = restore::<B, M>(&self.learner.model(), start)
        {
            log::error!("the running statistics are those of a part of a batch: {error}");
        }
    }
}

/// Why training was told to stop, if it was.
fn stopped(interrupter: &Interrupter) -> Option<String> {
    let message = || interrupter.get_message().unwrap_or_else(|| "interrupted".to_owned());
    interrupter.should_stop().then(message)
}
