//! How batches were split, epoch by epoch, in a file beside the checkpoints. A resumed run splits
//! them in the same way. What is planned anew may come out otherwise, because a plan counts what
//! earlier batches have left.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::durable::replace;
use crate::error::TrainError;
use crate::planner::Splits;
use crate::run::checkpoints::CHECKPOINTS;

/// The splits of a run, in the order of its epochs.
#[derive(Debug)]
pub(crate) struct SplitsFile {
    path: PathBuf,
    epochs: Vec<AfterEpoch>,
}

/// The splits from the end of an epoch on.
#[derive(Debug, Serialize, Deserialize)]
struct AfterEpoch {
    epoch: usize,
    splits: Splits,
}

impl SplitsFile {
    /// The file of a rank, in the directory of a training.
    pub(crate) fn new(directory: &Path, rank: usize) -> Self {
        let path = directory.join(CHECKPOINTS).join(format!("splits-of-rank-{rank}.json"));
        Self { path, epochs: Vec::new() }
    }

    /// Reads the splits of the epochs before `first`.
    ///
    /// # Errors
    ///
    /// Why they are not known.
    pub(crate) fn read(&mut self, first: usize) -> Result<Option<&Splits>, String> {
        let not_read = |error: &dyn std::fmt::Display| {
            format!("{} cannot be read: {error}", self.path.display())
        };
        let content = std::fs::read(&self.path).map_err(|error| not_read(&error))?;
        self.epochs = serde_json::from_slice(&content).map_err(|error| not_read(&error))?;
        self.epochs.retain(|after| after.epoch < first);
        Ok(self.last())
    }

    /// Takes down the splits at the end of an epoch, before its checkpoint is written.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn add(&mut self, epoch: usize, splits: Splits) -> Result<(), TrainError> {
        if self.last() == Some(&splits) {
            return Ok(());
        }
        self.epochs.push(AfterEpoch { epoch, splits });
        let content = serde_json::to_vec(&self.epochs).expect("it is plain data");
        replace(&self.path, &content).map_err(|error| TrainError::Checkpoint {
            message: format!("{}: {error}", self.path.display()),
        })
    }

    fn last(&self) -> Option<&Splits> {
        self.epochs.last().map(|after| &after.splits)
    }
}
