//! Asks before a batch is split for the first time whether its gradient is the sum over its parts.

use std::cell::Cell;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainStep};
use firebox_lazy::LazyBackend;
use firebox_trace::Bytes;

use super::{Run, ValidInput};
use crate::check::{Check, Host, Outcome};
use crate::device::DeviceMemory;
use crate::error::{Phase, TrainError};
use crate::shape::Shape;
use crate::splitter::Splitter;

/// On how many batches it is asked before it is given up.
const ATTEMPTS: usize = 8;

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
    /// Compares gradients if a batch is to be split and it is not known yet whether it may be.
    pub(super) fn check_split(
        &mut self,
        batch: &M::Input,
        items: usize,
        shape: Shape,
    ) -> Result<(), TrainError> {
        let Some(planner) = &self.planner else { return Ok(()) };
        let planned = planner.planned(Phase::Training, shape);
        let (Some(asked), Some(planned)) = (self.asked, planned) else { return Ok(()) };
        if planned.plan.is_whole() {
            return Ok(());
        }
        let settings = &self.strategy.settings;
        let check = Check {
            learner: &self.learner,
            splitter: &self.strategy.train_splitter,
            batch,
            items,
            reduction: settings.reduction,
            memory: planner.memory.clone(),
            budget: planner.budget - planned.held,
            needed: Cell::new(Bytes::ZERO),
            normalizes: !planner.running_state.is_empty(),
            host: (!planner.memory.is_on_host()).then(Host::new),
        };
        let warn = |text: &str| settings.say(log::Level::Warn, &format!("warning: {text}"));
        let outcome = check.run()?;
        let needed = check.needed.get() + planned.held;
        match outcome {
            Outcome::Agrees => self.asked = None,
            Outcome::Differs { coupling, by, parameter } => {
                let cause = TrainError::Coupled { coupling, by, parameter };
                if !settings.accepted.contains(&coupling) {
                    return Err(cause);
                }
                log::warn!("{cause}");
                self.asked = None;
            }
            Outcome::NotCheckable(why) => {
                warn(&format!("whether batches may be split is not known: {why}"));
                self.asked = None;
            }
            Outcome::NotEstablished(why) if asked + 1 == ATTEMPTS => {
                warn(&format!(
                    "whether batches may be split is not known after {ATTEMPTS} of them: {why}"
                ));
                self.asked = None;
            }
            Outcome::NotEstablished(why) => {
                log::debug!("whether batches may be split is not known yet: {why}");
                self.asked = Some(asked + 1);
            }
        }
        if let Some(planner) = &mut self.planner {
            planner.predicted = planner.predicted.max(needed);
        }
        Ok(())
    }
}
