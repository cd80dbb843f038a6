//! What a rewrite is: edits of a trace, and the trace that they give.

use firebox_trace::{OpIndex, TensorIndex, Trace};

/// One edit of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    /// Frees a tensor and all views of its buffer before a recorded step.
    Drop {
        /// The step.
        before: OpIndex,
        /// The tensor that owns the buffer.
        buffer: TensorIndex,
    },
    /// Repeats a recorded call before a later recorded step. Results of which there still is one
    /// end at once.
    Redo {
        /// The step.
        before: OpIndex,
        /// The call.
        call: OpIndex,
    },
}

impl Edit {
    /// The recorded step before which the edit takes place.
    pub fn before(self) -> OpIndex {
        match self {
            Self::Drop { before, .. } | Self::Redo { before, .. } => before,
        }
    }
}

/// The edits of a rewrite, in the order of the steps that they are before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// The edits.
    pub edits: Vec<Edit>,
}

/// Where a step of a rewritten trace comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOrigin {
    /// It is a recorded step.
    Recorded(OpIndex),
    /// It repeats a recorded call.
    Repeated(OpIndex),
    /// It frees what was dropped.
    Dropped,
}

/// A rewritten trace.
#[derive(Clone, Debug)]
pub struct Rewritten {
    /// The trace. Its first tensors are those of the recorded one, further ones are repeats.
    pub trace: Trace,
    /// Where each of its steps comes from.
    pub origins: Vec<StepOrigin>,
}
