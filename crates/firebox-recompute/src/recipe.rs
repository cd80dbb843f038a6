//! What a rewrite is: edits of a trace, and the trace that they give.

use burn_std::DType;
use firebox_trace::{OpIndex, Step, TensorIndex, Trace};

/// A place in a trace: before a step that is no end of a tensor, by its number among those.
///
/// Where tensors end differs between recordings of the same program; what is called does not. The
/// number after the last step is the end of the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Anchor(pub u32);

/// A tensor that a step makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// The step.
    pub by: Anchor,
    /// Which of its results it is, from zero.
    pub result: u32,
}

/// One edit of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    /// Frees a tensor and all views of its buffer before a recorded step. A view ends alone.
    Drop {
        /// The step.
        before: Anchor,
        /// The tensor that owns the buffer, or the view.
        buffer: Made,
    },
    /// Keeps a mask in a byte for each element, from before a recorded step on.
    Pack {
        /// The step.
        before: Anchor,
        /// The mask.
        mask: Made,
        /// The type of the bytes: booleans.
        dtype: DType,
    },
    /// Makes a mask of its bytes again before a recorded step.
    Unpack {
        /// The step.
        before: Anchor,
        /// The mask.
        mask: Made,
    },
    /// Repeats a recorded call before a later recorded step. Results of which there still is one
    /// end at once.
    Redo {
        /// The step.
        before: Anchor,
        /// The call.
        call: Anchor,
    },
}

impl Edit {
    /// The recorded step before which the edit takes place.
    pub fn before(self) -> Anchor {
        match self {
            Self::Drop { before, .. }
            | Self::Pack { before, .. }
            | Self::Unpack { before, .. }
            | Self::Redo { before, .. } => before,
        }
    }

    /// The edit in a trace that has `steps` more steps in front.
    fn behind(self, steps: u32) -> Self {
        let behind = |at: Anchor| Anchor(at.0 + steps);
        let made = |Made { by, result }: Made| Made { by: behind(by), result };
        match self {
            Self::Drop { before, buffer } => {
                Self::Drop { before: behind(before), buffer: made(buffer) }
            }
            Self::Pack { before, mask, dtype } => {
                Self::Pack { before: behind(before), mask: made(mask), dtype }
            }
            Self::Unpack { before, mask } => {
                Self::Unpack { before: behind(before), mask: made(mask) }
            }
            Self::Redo { before, call } => {
                Self::Redo { before: behind(before), call: behind(call) }
            }
        }
    }
}

/// The edits of a rewrite, in the order of the steps that they are before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// The edits.
    pub edits: Vec<Edit>,
    /// Whether the queue of a fusing backend is emptied after repeats, before anything else is
    /// called or dropped.
    ///
    /// burn's fusion takes a tensor that ends in the block that makes it for one that need not be
    /// written, and fails in some blocks with such a tensor. As recorded, these tensors are kept
    /// for the backward pass.
    pub drains: bool,
}

impl Recipe {
    /// The recipe for a trace in which `steps` steps that are no ends of tensors come before those
    /// that it is for.
    pub fn behind(&self, steps: u32) -> Self {
        let edits = self.edits.iter().map(|edit| edit.behind(steps)).collect();
        Self { edits, drains: self.drains }
    }
}

/// The places of a trace: its steps that are no ends of tensors.
pub(crate) struct Anchors(Vec<OpIndex>);

impl Anchors {
    pub(crate) fn of(trace: &Trace) -> Self {
        let steps = trace.iter().filter(|(_, step)| !matches!(step, Step::Free(_)));
        Self(steps.map(|(at, _)| at).collect())
    }

    /// The step that an anchor stands for.
    pub(crate) fn step(&self, anchor: Anchor) -> Option<OpIndex> {
        self.0.get(anchor.0 as usize).copied()
    }

    /// The place before the first step at or after a step that is no end of a tensor.
    pub(crate) fn from(&self, step: OpIndex) -> Anchor {
        Anchor(self.0.partition_point(|at| *at < step) as u32)
    }
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
    /// It packs a mask: each element becomes whether it is greater than a half.
    Packed,
    /// It makes a mask of its bytes again.
    Unpacked,
    /// It empties the queue of a fusing backend.
    Drained,
}

impl StepOrigin {
    /// Whether it is a call that the recorded trace does not have.
    pub(crate) fn is_new(self) -> bool {
        matches!(self, Self::Repeated(_) | Self::Packed | Self::Unpacked)
    }
}

/// A rewritten trace.
#[derive(Clone, Debug)]
pub struct Rewritten {
    /// The trace. Its first tensors are those of the recorded one, further ones are repeats.
    pub trace: Trace,
    /// Where each of its steps comes from.
    pub origins: Vec<StepOrigin>,
}

impl Rewritten {
    /// How many calls are repeated.
    pub fn repeats(&self) -> usize {
        let repeated = |origin: &&StepOrigin| matches!(origin, StepOrigin::Repeated(_));
        self.origins.iter().filter(repeated).count()
    }

    /// How many masks are packed.
    pub fn packed(&self) -> usize {
        self.origins.iter().filter(|origin| **origin == StepOrigin::Packed).count()
    }

    /// The result of a step, if the step of the trace is that of a recorded tensor.
    pub(crate) fn made(trace: &Trace, anchors: &Anchors, made: Made) -> Option<TensorIndex> {
        match &trace.steps[anchors.step(made.by)?.0 as usize] {
            Step::Call(call) => call.outputs.get(made.result as usize).copied(),
            Step::Upload { output, .. } => (made.result == 0).then_some(*output),
            _ => None,
        }
    }
}
