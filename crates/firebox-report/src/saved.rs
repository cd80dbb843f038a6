//! Reports of saved traces, on any device.

use burn_std::DType;
use firebox_dry::{Lifetimes, ReplayError};
use firebox_plan::Split;
use firebox_saved::SavedTrace;
use firebox_trace::{Bytes, TensorIndex, Trace};
use firebox_train::{PlanReport, SavedPlanner, TrainError};

use crate::device::{DeviceReport, ReportError};
use crate::pages::pages;
use crate::story::Story;

impl DeviceReport {
    /// Plans a batch of `items` items and follows its memory. A batch that does not fit is followed
    /// as if it did. `lifetimes` gives the buffers on firebox's pool
    /// ([`Dry::lifetimes`](firebox_dry::Dry::lifetimes)), and none for other allocators.
    ///
    /// # Errors
    ///
    /// If the trace says nothing about such a batch.
    pub fn new(
        (device, allocator): (&str, &str),
        planner: &SavedPlanner,
        trace: &SavedTrace,
        items: usize,
        lifetimes: impl FnOnce(&Trace) -> Result<Lifetimes, ReplayError>,
    ) -> Result<Self, ReportError> {
        let (plan, message) = match planner.plan(trace, items) {
            Err(error @ TrainError::Plan { .. }) => (None, Some(error.to_string())),
            plan => (Some(plan?), None),
        };
        let split = plan.as_ref().map_or(Split::whole(items), |report| report.plan.split());
        let (steps, footprint) = match &plan {
            Some(plan) => planner.footprint_of(trace, plan)?,
            None => planner.footprint(trace, split)?,
        };
        let is_gpu = footprint.paging.is_some();
        let bytes = |tensor| bytes(&steps, tensor, is_gpu);
        let planned = footprint.paging.as_ref().and_then(|paging| paging.pool);
        let story = Story::of(&steps, &footprint, bytes);
        let pages = match &planned {
            Some(planned) => pages(&lifetimes(&steps)?, planned, &story.buffers),
            None => Vec::new(),
        };
        Ok(Self {
            device: device.to_owned(),
            allocator: allocator.to_owned(),
            budget: planner.budget(),
            batch: items,
            split,
            peak: plan.as_ref().map_or(footprint.peak, PlanReport::predicted),
            message,
            story,
            pages,
            advice: planner.advice(trace, items, plan.as_ref())?,
            footprint,
        })
    }
}

/// The bytes of a tensor on the device. burn's GPU backends have 32-bit integers where its CPU
/// backends have 64.
fn bytes(steps: &Trace, tensor: TensorIndex, is_gpu: bool) -> Bytes {
    let info = steps.tensor(tensor);
    match is_gpu && info.dtype == DType::I64 {
        true => info.bytes().scale(0.5),
        false => info.bytes(),
    }
}
