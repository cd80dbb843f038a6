//! What each optimizer step used: a line of JSON.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use firebox_trace::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// What one optimizer step used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepUse {
    /// The epoch, from one. `None` in a [custom loop](crate::StepPlanner).
    pub epoch: Option<usize>,
    /// The number of the loader's latest batch in the epoch, from one. In a custom loop, the
    /// number of the step.
    pub iteration: usize,
    /// The items that the step learned from.
    pub items: usize,
    /// The micro-batches that they ran in.
    pub micro_batches: usize,
    /// The time since the step before it, loading and planning included.
    pub seconds: f64,
    /// Items in a second of this time.
    pub items_per_second: f64,
    /// The memory that training may use, in bytes.
    pub budget: Bytes,
    /// The most memory predicted for the run so far, in bytes.
    pub predicted: Bytes,
    /// The most that training took in the step, in bytes: on a GPU the pages of its pools.
    pub measured: Bytes,
}

/// Takes down what steps use.
#[derive(Debug)]
pub(crate) struct StepLog {
    file: Option<(PathBuf, File)>,
    since: Instant,
    use_so_far: StepUse,
}

impl StepLog {
    /// A log that appends to the file at `path`, if there is one.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, TrainError> {
        let open = |path: &Path| {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.map(|file| (path.to_owned(), file)).map_err(|cause| not_written(path, cause))
        };
        let file = path.map(open).transpose()?;
        Ok(Self { file, since: Instant::now(), use_so_far: StepUse::default() })
    }

    /// Adds a batch to the step.
    pub(crate) fn add(&mut self, items: usize, micro_batches: usize, measured: Bytes) {
        self.use_so_far.items += items;
        self.use_so_far.micro_batches += micro_batches;
        self.use_so_far.measured = self.use_so_far.measured.max(measured);
    }

    /// Ends a step. `at` has where it is, the budget and the prediction.
    pub(crate) fn end(&mut self, at: StepUse) -> Result<(), TrainError> {
        let seconds = std::mem::replace(&mut self.since, Instant::now()).elapsed().as_secs_f64();
        let StepUse { items, micro_batches, measured, .. } = std::mem::take(&mut self.use_so_far);
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let items_per_second = items as f64 / seconds.max(f64::MIN_POSITIVE);
        let used = StepUse { items, micro_batches, seconds, items_per_second, measured, ..at };
        let mut line = serde_json::to_string(&used).expect("it is plain data");
        line.push('\n');
        // One write, so that a process that is killed leaves whole lines.
        file.write_all(line.as_bytes()).map_err(|cause| not_written(path, cause))
    }
}

fn not_written(path: &Path, cause: std::io::Error) -> TrainError {
    TrainError::LogNotWritten { path: path.to_owned(), cause }
}
