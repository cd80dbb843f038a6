//! What each optimizer step used: a line of JSON.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use firebox_trace::Bytes;
use serde::{Deserialize, Serialize};

/// What one optimizer step used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepUse {
    /// The epoch, from one. `None` in a loop of the user's own.
    pub epoch: Option<usize>,
    /// The number of the loader's latest batch in the epoch, from one. In a loop of
    /// the user's own, the number of the step.
    pub iteration: usize,
    /// The items that the step learned from.
    pub items: usize,
    /// The micro-batches that they ran in. In a loop of the user's own, those
    /// of the pass that has the most.
    pub micro_batches: usize,
    /// The time since the step before it, loading and planning included.
    pub seconds: f64,
    /// Items in a second of this time.
    pub items_per_second: f64,
    /// The learning rate. `None` in a loop of the user's own, and with burn 0.22.
    pub lr: Option<f64>,
    /// The scale of losses that the next step begins with. `None` unless
    /// training is in half floats.
    pub loss_scale: Option<f64>,
    /// Whether the optimizer did not step, because a gradient was not finite.
    pub left_out: bool,
    /// The memory that training may use, in bytes.
    pub budget: Bytes,
    /// The most memory predicted for the run so far, in bytes.
    pub predicted: Bytes,
    /// What the device's allocator holds for training after the step, in bytes. On the CPU, what
    /// the process has grown by. `None` where the system does not tell, and with burn 0.22.
    pub reserved: Option<Bytes>,
    /// What lies in it, in bytes. `None` on the CPU, and with burn 0.22.
    pub in_use: Option<Bytes>,
    /// The most that training took in the step, in bytes: on a GPU the pages of its pools. `None`
    /// where steps are not measured.
    pub measured: Option<Bytes>,
}

/// A log of steps cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("the log of steps cannot be written to {}: {cause}", path.display())]
pub struct LogNotWritten {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub cause: io::Error,
}

/// Takes down what steps use.
#[derive(Debug)]
pub struct StepLog {
    file: Option<(PathBuf, File)>,
    since: Instant,
    so_far: StepUse,
}

impl Default for StepLog {
    fn default() -> Self {
        Self { file: None, since: Instant::now(), so_far: StepUse::default() }
    }
}

impl StepLog {
    /// A log that appends to the file at `path`, if there is one.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened.
    pub fn open(path: Option<&Path>) -> Result<Self, LogNotWritten> {
        let open = |path: &Path| {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.map(|file| (path.to_owned(), file)).map_err(|cause| not_written(path, cause))
        };
        Ok(Self { file: path.map(open).transpose()?, ..Self::default() })
    }

    /// Adds a batch that ran in so many micro-batches to the step, and what was measured of it.
    pub fn add(&mut self, items: usize, micro_batches: usize, measured: Option<Bytes>) {
        self.so_far.items += items;
        self.so_far.micro_batches += micro_batches;
        self.so_far.measured = self.so_far.measured.max(measured);
    }

    /// Ends a step. `used` has the rest, and is called if there is a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn end(&mut self, used: impl FnOnce() -> StepUse) -> Result<(), LogNotWritten> {
        let seconds = std::mem::replace(&mut self.since, Instant::now()).elapsed().as_secs_f64();
        let StepUse { items, micro_batches, measured, .. } = std::mem::take(&mut self.so_far);
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let items_per_second = items as f64 / seconds.max(f64::MIN_POSITIVE);
        let used = StepUse { items, micro_batches, seconds, items_per_second, measured, ..used() };
        let mut line = serde_json::to_string(&used).expect("it is plain data");
        line.push('\n');
        // One write, so that a process that is killed leaves whole lines.
        file.write_all(line.as_bytes()).map_err(|cause| not_written(path, cause))
    }
}

fn not_written(path: &Path, cause: io::Error) -> LogNotWritten {
    LogNotWritten { path: path.to_owned(), cause }
}
