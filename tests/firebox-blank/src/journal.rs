//! What the driver did, in order: one line for each allocation, free, fault and misuse.
//!
//! Every line is written immediately, so the journal survives a crash.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Entry {
    /// Device memory was allocated.
    Allocated {
        /// Number of the device.
        device: usize,
        /// Address of the allocation.
        address: u64,
        /// The bytes asked for.
        bytes: u64,
        /// The stream of a stream-ordered allocation. `None` for an allocation without a stream.
        stream: Option<u64>,
    },
    /// Device memory was freed.
    Freed {
        /// Number of the device.
        device: usize,
        /// Address of the allocation.
        address: u64,
        /// Size of the allocation in bytes.
        bytes: u64,
    },
    /// An allocation of device memory was refused.
    Refused {
        /// Number of the device.
        device: usize,
        /// The bytes asked for.
        bytes: u64,
    },
    /// A fault from the settings happened to a call.
    Fault {
        /// The function called, or `allocation`.
        function: String,
        /// Number of the call, counted from 1.
        call: u64,
        /// The result returned; 0 for success.
        error: u32,
    },
    /// The program misused the driver.
    Misuse {
        /// What happened, in words.
        what_happened: String,
    },
    /// The process ended normally. Lists what was still allocated.
    Ended {
        /// Number of live device allocations.
        allocations: u64,
        /// Their total bytes.
        bytes: u64,
    },
}

/// The journal of one process, open for writing.
#[derive(Debug)]
pub struct Journal(Option<File>);

impl Journal {
    /// Opens the journal of the process with this number.
    pub(crate) fn create(folder: &Path, process: u32) -> Self {
        let file = File::options().create(true).append(true).open(path(folder, process));
        if let Err(error) = &file {
            eprintln!("blank driver: the journal cannot be written: {error}");
        }
        Self(file.ok())
    }

    /// Appends a line.
    pub(crate) fn write(&mut self, entry: &Entry) {
        let Some(file) = &mut self.0 else { return };
        let mut line = serde_json::to_string(entry).expect("entries are plain data");
        line.push('\n');
        // A single write, so a process that is killed leaves only whole lines.
        if let Err(error) = file.write_all(line.as_bytes()) {
            eprintln!("blank driver: the journal cannot be written: {error}");
            self.0 = None;
        }
    }
}

fn path(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("journal.{process}"))
}

/// Why a journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read.
    #[error("the journal of process {process} cannot be read: {cause}; did it load the driver?")]
    Unreadable {
        /// Number of the process.
        process: u32,
        /// The cause.
        cause: std::io::Error,
    },
    /// A line was not written by the driver.
    #[error("line {line} of the journal of process {process} is not one: {cause}")]
    Malformed {
        /// Number of the process.
        process: u32,
        /// Number of the line, counted from 1.
        line: usize,
        /// The cause.
        cause: serde_json::Error,
    },
}

/// Reads the journal a process left in the folder of a [`Blank`](crate::Blank).
///
/// # Errors
/// The file cannot be read, or a line is not an [`Entry`].
pub fn read_journal(folder: &Path, process: u32) -> Result<Vec<Entry>, JournalError> {
    let text = std::fs::read_to_string(path(folder, process))
        .map_err(|cause| JournalError::Unreadable { process, cause })?;
    let lines = text.lines().enumerate();
    lines
        .map(|(at, line)| {
            serde_json::from_str(line).map_err(|cause| JournalError::Malformed {
                process,
                line: at + 1,
                cause,
            })
        })
        .collect()
}
