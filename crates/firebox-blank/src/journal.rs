//! What the driver did, in order: a line for each allocation, free and fault, written at once, so that it is there after a
//! crash.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Entry {
    /// Device memory was given out.
    Allocated {
        /// The device's number.
        device: usize,
        /// The address.
        address: u64,
        /// The bytes asked for.
        bytes: u64,
        /// The stream, or none for memory that is asked for without one.
        stream: Option<u64>,
    },
    /// Device memory was given back.
    Freed {
        /// The device's number.
        device: usize,
        /// The address.
        address: u64,
        /// The bytes.
        bytes: u64,
    },
    /// Device memory was refused.
    Refused {
        /// The device's number.
        device: usize,
        /// The bytes asked for.
        bytes: u64,
    },
    /// A fault of the settings happened to a call.
    Fault {
        /// The function.
        function: String,
        /// The number of the call.
        call: u64,
        /// What it answered.
        error: u32,
    },
    /// The program did what it must not.
    Misuse {
        /// What, in words.
        what_happened: String,
    },
    /// The process ended in order; what is alive then.
    Ended {
        /// The allocations of device memory that are alive.
        allocations: u64,
        /// Their bytes.
        bytes: u64,
    },
}

/// The journal of one process, while it is written.
#[derive(Debug)]
pub struct Journal(Option<File>);

impl Journal {
    /// Begins the journal of the process with this number.
    pub(crate) fn create(folder: &Path, process: u32) -> Self {
        let file = File::options().create(true).append(true).open(path(folder, process));
        if let Err(error) = &file {
            eprintln!("blank driver: the journal cannot be written: {error}");
        }
        Self(file.ok())
    }

    /// Adds a line.
    pub(crate) fn write(&mut self, entry: &Entry) {
        let Some(file) = &mut self.0 else { return };
        let mut line = serde_json::to_string(entry).expect("entries are plain data");
        line.push('\n');
        // One call, so that a process that is killed leaves whole lines.
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
        /// The process.
        process: u32,
        /// Why.
        cause: std::io::Error,
    },
    /// A line is none of the driver's.
    #[error("line {line} of the journal of process {process} is not one: {cause}")]
    Malformed {
        /// The process.
        process: u32,
        /// The number of the line, from 1.
        line: usize,
        /// Why.
        cause: serde_json::Error,
    },
}

/// Reads the journal that a process left in the folder of a [`Blank`](crate::Blank).
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
