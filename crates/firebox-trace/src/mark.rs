//! Marks: moments of the recorded program, set by whoever records it and read by memory models.

use serde::{Deserialize, Serialize};

/// A moment of the recorded program that memory models account for, or a note for readers.
///
/// ```
/// use firebox_trace::{Mark, Step};
///
/// let step = Step::Mark("epoch 1".into());
/// assert!(step.is_mark(&Mark::Note("epoch 1".into())));
/// // A note never stands for one of the other marks.
/// assert!(!Step::Mark("drain".into()).is_mark(&Mark::Drain));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// The program waits until the backend's queue of operations is empty. Operations before the
    /// mark are not fused with those after it. The device may not have taken them yet.
    Drain,
    /// The program waits until the device has taken everything issued so far.
    Settle,
    /// A micro-step begins.
    MicroStep,
    /// A micro-step ends. This many more like it follow in the program, and are left out.
    MicroStepEnd(u32),
    /// The optimizer step begins. It ends at [`IterationEnd`](Self::IterationEnd). What it makes
    /// outlives the iteration.
    OptimizerStep,
    /// An iteration ends.
    IterationEnd,
    /// At the start of a trace: the optimizer has stepped before in this process, so parameters and
    /// state have the layout that steps give them.
    SteppedBefore,
    /// A text that changes nothing.
    Note(Box<str>),
}

impl From<&str> for Mark {
    fn from(note: &str) -> Self {
        Self::Note(note.into())
    }
}

impl From<String> for Mark {
    fn from(note: String) -> Self {
        Self::Note(note.into())
    }
}
