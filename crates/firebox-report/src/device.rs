//! What there is to show of a step on one device.

use std::io;
use std::path::PathBuf;

use firebox_plan::{Advice, Split};
use firebox_trace::{Bytes, Footprint};

use crate::page::Page;
use crate::story::Story;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The batch cannot be planned, for another reason than that it does not fit.
    #[cfg(feature = "saved")]
    #[error(transparent)]
    Plan(#[from] firebox_train::TrainError),
    /// The pages cannot be drawn.
    #[cfg(feature = "saved")]
    #[error(transparent)]
    Replay(#[from] firebox_dry::ReplayError),
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

/// A batch on one device: how it is split, and its memory from operation to
/// operation.
#[derive(Debug)]
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
    /// The memory of the recorded iterations.
    pub footprint: Footprint,
    /// The course of them.
    pub story: Story,
    /// What lies where at the peak, on firebox's pool.
    pub pages: Vec<Page>,
    /// What would need less.
    pub advice: Vec<Advice>,
}
