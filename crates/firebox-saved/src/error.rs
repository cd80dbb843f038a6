//! Why a step cannot be saved, or a file cannot be used.

use std::io;
use std::path::PathBuf;

use firebox_plan::Split;
use firebox_trace::TraceError;

use crate::form::ENOUGH;

/// Why recordings of several batch sizes make no saved trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError<E> {
    /// A recording failed.
    #[error("the step could not be recorded on a batch of {split}")]
    Recording {
        /// The split that was recorded.
        split: Split,
        /// Why.
        #[source]
        cause: E,
    },
    /// There are no items to record.
    #[error("the batch has no items")]
    EmptyBatch,
    /// The step is another program for other batch sizes, so it cannot be known for all of them.
    #[error(
        "{what} differs between batches of {} and {} in a way that follows from neither the batch nor the \
         micro-batches, so the step cannot be saved for all sizes: {why}", splits[0], splits[1]
    )]
    Irregular {
        /// The operation or the tensor.
        what: String,
        /// Two splits that were recorded, the smallest batch and the largest.
        splits: Box<[Split; 2]>,
        /// How they differ.
        why: Irregular,
    },
}

/// How recordings of several batch sizes differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Irregular {
    /// They have other operations, or other numbers of them.
    #[error("other operations are recorded")]
    Structure,
    /// A number follows no rule.
    #[error("a number is {0:?} in the recordings")]
    Number(Vec<i64>),
}

/// Why a file is no saved trace that this version of firebox can use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// The file is something else.
    #[error(
        "this is no trace of firebox; save one with `Learner::trace` or `LearnerBuilder::save_trace`"
    )]
    Foreign,
    /// The file was written by another version.
    #[error(
        "the trace has format {found}, and this version of firebox reads format {known}; save it again with this \
         version, or use the one that wrote it"
    )]
    OtherFormat {
        /// The format of the file.
        found: u32,
        /// The format that this version writes and reads.
        known: u32,
    },
    /// The file ends too early.
    #[error("the trace is incomplete: {found} of {expected} bytes")]
    Truncated {
        /// The bytes that are there.
        found: u64,
        /// The bytes that it had when it was written.
        expected: u64,
    },
    /// The file was changed after it was written.
    #[error("the trace is damaged: its hash is another than when it was written")]
    Damaged,
    /// The hash is right and the content is not: the file was made by something else.
    #[error("the trace contradicts itself: {0}")]
    Contradiction(String),
}

/// Why a saved trace says nothing about a split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InstantiateError {
    /// The batch that was recorded had too few items to record such a split.
    #[error(
        "the trace was recorded on a batch of {items} items, which is too small to tell about a batch of {split}; \
         record it on a batch of {ENOUGH} items or more"
    )]
    NotRecorded {
        /// The split.
        split: Split,
        /// The items of the recorded batch.
        items: usize,
    },
    /// No memory holds such a batch.
    #[error("a batch of {0} is larger than any memory")]
    TooLarge(Split),
    /// The file has content that firebox does not write.
    #[error("the trace contradicts itself: {0}")]
    Contradiction(String),
}

impl From<TraceError> for InstantiateError {
    fn from(error: TraceError) -> Self {
        Self::Contradiction(error.to_string())
    }
}
