//! What there is to show of a saved trace on one device.

use std::io;
use std::path::PathBuf;

use burn_std::DType;
use firebox_dry::{Lifetimes, ReplayError};
use firebox_plan::Split;
use firebox_saved::SavedTrace;
use firebox_trace::{Bytes, Footprint, TensorIndex, Trace};
use firebox_train::{Advice, PlanReport, SavedPlanner, TrainError};

use crate::pages::{Page, pages};
use crate::story::Story;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The batch cannot be planned, for another reason than that it does not fit.
    #[error(transparent)]
    Plan(#[from] TrainError),
    /// The pages cannot be drawn.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The picture cannot be drawn.
    #[error("the picture cannot be drawn: {0}")]
    Chart(String),
    /// The file cannot be written.
    #[error("{} cannot be written: {cause}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The data cannot be written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// A batch of a saved trace on one device: how it is split, and its memory from operation to
/// operation.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceReport {
    /// The device.
    pub device: String,
    /// Who places buffers on it.
    pub allocator: String,
    /// What training may use.
    pub budget: Bytes,
    /// The items of the batch.
    pub batch: usize,
    /// How the batch is split: as planned, or not at all if it does not fit.
    pub split: Split,
    /// The predicted peak: that of the plan, which counts what goes on outside of steps too.
    pub peak: Bytes,
    /// Why it does not fit.
    pub message: Option<String>,
    /// The memory of two iterations.
    pub footprint: Footprint,
    /// The course of them.
    pub story: Story,
    /// What lies where at the peak, on firebox's pool.
    pub pages: Vec<Page>,
    /// What would need less.
    pub advice: Vec<Advice>,
}

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
