//! Keeps account of a run's memory: describes what is alive outside of its steps, and compares
//! predictions with measurements.

use firebox_plan::StepUse;
use firebox_trace::Bytes;

use super::{Position, Run};
use crate::components::LazyComponents;
use crate::device::DeviceMemory;
use crate::error::{TrainError, over_budget};
use crate::planner::Planner;
use crate::planner::growth::Growth;
use crate::planner::overhead::Overhead;
use crate::report::MemoryUse;
use crate::settings::Settings;

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
{
    /// What goes on outside of the steps for batches of `items` items.
    pub(super) fn overhead(&self, items: usize) -> Overhead {
        let exchange = self.team.as_ref().map_or(Bytes::ZERO, |team| team.exchange);
        Overhead { saves: self.asked.saves, exchange, ..self.loading.overhead(items) }
    }

    /// Takes down what a step has used, if somebody wants to know.
    pub(super) fn log_step(&mut self, planner: &mut Planner) -> Result<(), TrainError> {
        let Position { epoch, batch: iteration, .. } = self.position;
        let lr = Some(self.learner.lr_current());
        let (device, settings) = (self.on.device(), &self.strategy.settings);
        let (loss_scale, left_out) = (self.learning.loss_scale, self.has_left_out());
        self.records.log.end(|| StepUse {
            epoch: Some(epoch),
            iteration,
            lr,
            loss_scale: loss_scale.map(|scale| scale.scale()),
            left_out,
            ..step_use::<LC::Base>(device, planner, settings)
        })?;
        Ok(())
    }

    /// Whether the optimizer has stepped, so that its state exists.
    pub(super) fn has_stepped(&self) -> bool {
        self.learning.scheduler_steps > 0
            && self.learning.loss_scale.is_none_or(|scale| scale.has_stepped())
    }

    /// Takes the learning rate of the next optimizer step. If the latest one was left out, the next
    /// one has its rate: the schedule counts steps that are made.
    pub(super) fn step_lr(&mut self) {
        if !self.has_left_out() {
            self.learner.lr_step();
        }
    }

    /// Whether the latest optimizer step was left out.
    pub(super) fn has_left_out(&self) -> bool {
        self.learning.loss_scale.is_some_and(|scale| scale.has_left_out())
    }

    /// See [`measure`].
    pub(super) fn measure(&self, planner: &mut Planner) -> Result<(), TrainError> {
        let mut outcome = self.strategy.outcome();
        let memory = outcome.memory.get_or_insert_default();
        memory.checking = self.known.took();
        measure::<LC::Base>(self.on.device(), planner, &self.strategy.settings, memory)
    }
}

/// What a step has used of the memory.
pub(crate) fn step_use<B: DeviceMemory>(
    device: &B::Device,
    planner: &mut Planner,
    settings: &Settings,
) -> StepUse {
    let usage = B::pool_usage(device);
    let others = settings.others.held;
    let reserved = match usage {
        Some(usage) => Some(usage.reserved - others),
        None => planner.measured_growth(),
    };
    StepUse {
        budget: planner.budget(),
        predicted: planner.predicted(),
        reserved,
        in_use: usage.map(|usage| usage.in_use - others),
        ..StepUse::default()
    }
}

/// Compares what training holds with the prediction, and notes both. If a device's allocator holds
/// more, later plans use less of the budget. More than the budget is a warning, or an error if the
/// user asked for that.
pub(crate) fn measure<B: DeviceMemory>(
    device: &B::Device,
    planner: &mut Planner,
    settings: &Settings,
    memory: &mut MemoryUse,
) -> Result<(), TrainError> {
    let (predicted, budget) = (planner.predicted(), planner.budget());
    memory.predicted = predicted;
    let usage = B::pool_usage(device);
    let others = settings.others.held;
    let (measured, limit) = match usage {
        Some(usage) => (Some(usage.reserved - others), budget),
        None => (planner.measured_growth(), Growth::limit(budget)),
    };
    let known = memory.measured.unwrap_or_default();
    let Some(measured) = measured.filter(|measured| *measured > known) else { return Ok(()) };
    memory.measured = Some(measured);
    memory.of_process = usage.is_none();
    match usage {
        Some(usage) if measured > predicted => {
            log::warn!(
                "the device has {usage}, {others} of it for other tensors, and {predicted} were predicted: later plans \
                 leave that much more room"
            );
            planner.be_cautious(predicted.ratio(measured));
        }
        Some(usage) => log::info!("the device has {usage}, and {predicted} were predicted"),
        None => log::info!("the process has grown by {measured}, and {predicted} were predicted"),
    }
    if measured > limit && settings.is_strict {
        return Err(TrainError::OverBudget { measured, predicted, budget });
    }
    // Warns once, and not again for every few bytes more.
    if measured > limit && known <= limit {
        settings.warn(&over_budget(measured, predicted, budget).to_string());
    }
    Ok(())
}
