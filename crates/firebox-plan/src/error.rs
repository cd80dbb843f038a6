//! Why there is no plan: by how much it misses, who holds the memory, and what would help.

use std::fmt;

use firebox_trace::{Bytes, Estimate, Items};

use crate::need::{Accumulating, Holding, Need, Oversized, Role};
use crate::outcome::Answer;

/// There is no plan. `E` is the error of the function that knows footprints.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError<E> {
    /// The batch has no items.
    #[error("the batch has no items: leave it out, or look for the reason in the data loader")]
    EmptyBatch,
    /// The budget is zero bytes.
    #[error(
        "the budget is zero bytes: give one that holds the model, its optimizer state and one item"
    )]
    ZeroBudget,
    /// [`Sizing::Fixed`](crate::Sizing::Fixed) of zero items.
    #[error(
        "the fixed micro-batch size is zero items: give one or more, or leave the size out to have it found"
    )]
    ZeroFixedSize,
    /// One item exceeds the budget.
    #[error("{0}")]
    DoesNotFit(DoesNotFit),
    /// The user's own micro-batch size exceeds the budget, and one item does not.
    #[error("{0}")]
    FixedDoesNotFit(Box<FixedDoesNotFit>),
    /// The function that knows footprints failed. Its message is part of this one, so it is not the
    /// [`source`](std::error::Error::source) as well.
    #[error("cannot plan without the footprint of {items} items: {cause}")]
    Footprint {
        /// The largest micro-batch that was asked for.
        items: Items,
        /// What the function said.
        cause: E,
    },
}

/// One item exceeds the budget, so no split of the batch can help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit {
    /// The batch that was to be planned.
    pub batch: Items,
    /// The bytes there are.
    pub budget: Bytes,
    /// What one item needs.
    pub need: Need,
    /// Whether `need` includes the gradients of other micro-batches.
    pub accumulating: Accumulating,
}

impl DoesNotFit {
    /// The bytes by which one item exceeds the budget.
    pub fn missing(&self) -> Bytes {
        self.need.peak - self.budget
    }

    /// Who holds the most, if that is known.
    pub fn largest(&self) -> Option<&Holding> {
        self.need.largest()
    }

    /// What would help.
    pub fn remedy(&self) -> Remedy {
        Remedy::of(&self.need)
    }
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (need, budget, accumulating) = (&self.need, self.budget, self.accumulating);
        let excess = Excess { need, budget, accumulating };
        write!(f, "one item needs {excess}")?;
        if need.oversized.is_some() {
            return write!(f, ": {}", Remedy::SmallerBuffers);
        }
        if let Some(Holding { label, bytes, .. }) = self.largest() {
            write!(f, ", and the largest part is {label} with {bytes}")?;
        }
        write!(f, ": {}", self.remedy())
    }
}

/// The user's own micro-batch size exceeds the budget, and a smaller one does not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FixedDoesNotFit {
    /// The size that the user chose, or the batch if that is smaller.
    pub size: Items,
    /// The footprint that exceeds the budget: of micro-batches of `size` items, or of a smaller size tried on the way with
    /// [`Probing::FromOne`](crate::Probing::FromOne).
    pub misfit: Answer,
    /// The bytes there are.
    pub budget: Bytes,
    /// The largest power of two below `size` that was found to fit.
    pub fitting: Items,
}

impl FixedDoesNotFit {
    /// The bytes by which the misfit exceeds the budget.
    pub fn missing(&self) -> Bytes {
        self.misfit.need.peak - self.budget
    }
}

impl fmt::Display for FixedDoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Answer { split, ref need } = self.misfit;
        let (size, budget, fitting) = (self.size, self.budget, self.fitting);
        let (items, accumulating) = (split.largest(), split.accumulating());
        let excess = Excess { need, budget, accumulating };
        write!(f, "a micro-batch of {size} items does not fit: ")?;
        if items == size {
            write!(f, "it needs {excess}")?;
        } else {
            write!(f, "already {items} items need {excess}")?;
        }
        write!(f, "; leave the size out to have it found, or set it to {fitting}, which fits")
    }
}

/// What would help when one item does not fit: chosen by the role that holds the most. Displays as advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// The model and its optimizer hold the most.
    LessState,
    /// The activations hold the most.
    FewerActivations,
    /// The batch itself holds the most.
    SmallerInputs,
    /// A buffer is larger than any that the device can hold.
    SmallerBuffers,
    /// Something else holds the most, or it is not known what does.
    MoreMemory,
}

impl Remedy {
    /// The remedy for a need that is too large.
    pub fn of(need: &Need) -> Self {
        if need.oversized.is_some() {
            return Self::SmallerBuffers;
        }
        let roles = [
            (Role::State, Self::LessState),
            (Role::Activations, Self::FewerActivations),
            (Role::Inputs, Self::SmallerInputs),
            (Role::Other, Self::MoreMemory),
        ];
        roles
            .into_iter()
            .map(|(role, remedy)| (need.held_by(role), remedy))
            .filter(|(held, _)| *held > Bytes::ZERO)
            .reduce(|most, other| if other.0 > most.0 { other } else { most })
            .map_or(Self::MoreMemory, |(_, remedy)| remedy)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LessState => {
                "take a smaller model, an optimizer with less state, or a card with more memory"
            }
            Self::FewerActivations => {
                "compute activations again with `Autodiff<_, BalancedCheckpointing>`, or make each item smaller"
            }
            Self::SmallerInputs => "set a smaller batch size in the data loader",
            Self::SmallerBuffers => {
                "make each item smaller, or take a card with more memory, of which one buffer can be a part"
            }
            Self::MoreMemory => {
                "raise the budget, make each item smaller, or take a smaller model"
            }
        })
    }
}

/// A need above the budget, in words.
struct Excess<'a> {
    need: &'a Need,
    budget: Bytes,
    accumulating: Accumulating,
}

impl fmt::Display for Excess<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Need { peak, estimate, oversized, .. } = self.need;
        if let Some(Oversized { buffer, limit }) = oversized {
            return write!(f, "a buffer of {buffer}, and the device can hold none above {limit}");
        }
        let quality = match estimate {
            Estimate::Exact => "",
            Estimate::UpperBound => "at most ",
            Estimate::Heuristic => "about ",
        };
        let held = match self.accumulating {
            Accumulating::Yes => " with the gradients of the batch held",
            Accumulating::No => "",
        };
        let (excess, budget) = (*peak - self.budget, self.budget);
        write!(f, "{quality}{peak}{held}, {excess} more than the budget of {budget}")
    }
}
