//! Tracks whether burn's tuner has chosen the kernels that a plan's batches run on. The planner
//! replans a batch once it has.

/// How many batches run before the tuner has chosen. burn's fusion runs the second batch
/// differently from the first, with kernels of its own.
const TUNING_BATCHES: usize = 2;

/// Whether the kernels of a plan are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tuning {
    /// All were chosen when the plan was made, or are treated as chosen.
    Chosen,
    /// Some were not chosen, and the candidates that need the most memory were counted. `ran`
    /// batches have run since.
    Open {
        ran: usize,
        /// Whether a batch has begun.
        begun: bool,
    },
}

impl Tuning {
    /// The state when a plan is made.
    pub(super) fn new(tunes: bool) -> Self {
        if tunes { Self::Open { ran: 0, begun: false } } else { Self::Chosen }
    }

    /// Notes that a batch begins.
    pub(super) fn begin(&mut self) {
        if let Self::Open { begun, .. } = self {
            *begun = true;
        }
    }

    /// Notes that the batch that began has run to its end.
    pub(super) fn has_run(&mut self) {
        if let Self::Open { ran, begun } = self {
            *ran += usize::from(std::mem::take(begun));
        }
    }

    /// Whether a batch may fit in fewer micro-batches than planned, because all kernels are chosen
    /// by now.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Open { ran, .. } if ran >= TUNING_BATCHES)
    }
}
