//! What is left where training stops before its end.

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::store::EventStoreClient;
use burn::train::{InferenceStep, TrainStep};
use firebox_lazy::{LazyBackend, restore};

use super::{Run, ValidInput};
use crate::capture::records;
use crate::device::DeviceMemory;
use crate::error::{LastState, TrainError};
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
    /// What training can go on from after `cause`.
    pub(super) fn last_state(
        &mut self,
        cause: &TrainError,
        store: &EventStoreClient,
    ) -> Option<LastState<M, O::Record, LR::Record<B>>> {
        if cause.loses_the_model() {
            return None;
        }
        self.give_back_statistics();
        let optimizer =
            if self.optimizer_lost { None } else { records(&self.learner, store).optimizer };
        // Not before: a scheduler may share what it counts with its clones.
        for _ in 0..self.scheduler_steps {
            self.scheduler.step();
        }
        let scheduler = self.scheduler.to_record::<B>();
        let (epoch, iteration) = self.position;
        Some(LastState { model: self.learner.model(), optimizer, scheduler, epoch, iteration })
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
