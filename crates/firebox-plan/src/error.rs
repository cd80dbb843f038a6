//! Why there is no plan: by how much the budget is exceeded, what holds the memory, and what would
//! help.
//!
//! The planner returns these errors to the Learner.

use std::fmt;

use firebox_trace::{Bytes, Estimate, Items};

use crate::need::{Accumulating, Holding, Need, Oversized, ParkedNeed, RecomputedNeed, Role};
use crate::outcome::Answer;

/// Why there is no plan. `E` is the error of the function that computes footprints.
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
    /// One item exceeds the budget. No split can help.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
    /// The micro-batch size the user fixed exceeds the budget, but a smaller one fits. Or the batch
    /// does, and must not be split.
    #[error("{0}")]
    FixedDoesNotFit(Box<FixedDoesNotFit>),
    /// The function that computes footprints failed. Its message is part of this one and therefore
    /// not the [`source`](std::error::Error::source).
    #[error("cannot plan without the footprint of {items} items: {cause}")]
    Footprint {
        /// The largest micro-batch of the split that was asked for.
        items: Items,
        /// The error of the function.
        cause: E,
    },
}

/// One item exceeds the budget, so no split of the batch can help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit {
    /// The batch to be planned.
    pub batch: Items,
    /// The budget that is exceeded.
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

    /// The holding with the most bytes, if any is known.
    pub fn largest(&self) -> Option<&Holding> {
        self.need.largest()
    }

    /// What would help: to drop the queued batches of loader threads or the checkpoint, if either
    /// alone is enough; otherwise less of whatever holds the most.
    pub fn remedy(&self) -> Remedy {
        self.beside().map_or_else(|| Remedy::of(&self.need), |(_, remedy)| remedy)
    }

    /// The two things that would help most, each with the bytes that it can save at most: what the
    /// peak holds for it. The first is [`remedy`](Self::remedy), and the only one if that is
    /// [`MoreMemory`](Remedy::MoreMemory).
    pub fn remedies(&self) -> Vec<(Remedy, Bytes)> {
        if self.need.oversized.is_some() {
            return vec![(Remedy::SmallerBuffers, self.missing())];
        }
        let mut remedies = Remedy::all_of(&self.need);
        let first = self.remedy();
        // Stable: those that hold as much stay in the order of roles.
        remedies.sort_by_key(|(remedy, bytes)| (*remedy != first, std::cmp::Reverse(*bytes)));
        // More memory saves nothing, and its advice names what the others would.
        remedies.retain(|(remedy, _)| *remedy == first || *remedy != Remedy::MoreMemory);
        remedies.truncate(if first == Remedy::MoreMemory { 1 } else { 2 });
        remedies
    }

    /// The first holding of loader threads or of a checkpoint that is large enough to make up for
    /// what is missing.
    fn beside(&self) -> Option<(&Holding, Remedy)> {
        let enough = self.need.holdings.iter().filter(|held| held.bytes >= self.missing());
        let mut enough = enough.filter_map(|held| match held.role {
            Role::Loaders => Some((held, Remedy::FewerWorkers)),
            Role::Checkpoint => Some((held, Remedy::NoCheckpoints)),
            _ => None,
        });
        enough.next()
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
        let beside = self.beside().map(|(held, _)| held);
        if let Some(Holding { label, bytes, .. }) = beside.filter(|_| beside != self.largest()) {
            write!(f, ", with {bytes} for {label}")?;
        }
        let remedies = self.remedies();
        let saves = |(remedy, bytes): &(Remedy, Bytes)| match remedy {
            Remedy::MoreMemory => remedy.to_string(),
            _ => format!("{remedy} (up to {bytes} less)"),
        };
        match remedies.is_empty() {
            true => write!(f, ": {}", self.remedy())?,
            false => {
                let remedies: Vec<String> = remedies.iter().map(saves).collect();
                write!(f, ": {}", remedies.join("; or "))?;
            }
        }
        Again(need.recomputed, self.budget).fmt(f)?;
        Elsewhere(need.parked, self.budget).fmt(f)
    }
}

/// The micro-batch size the user fixed exceeds the budget, but a smaller one fits. Or the batch
/// does, and must not be split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FixedDoesNotFit {
    /// The size the user chose, or the batch if that is smaller.
    pub size: Items,
    /// The footprint that exceeds the budget. Its micro-batches have `size` items, or fewer if
    /// [`Probing::FromOne`](crate::Probing::FromOne) hit a smaller size first.
    pub misfit: Answer,
    /// The budget that is exceeded.
    pub budget: Bytes,
    /// The largest power of two below `size` that was found to fit. `None` if the batch must not be
    /// split.
    pub fitting: Option<Items>,
}

impl FixedDoesNotFit {
    /// The bytes by which `misfit` exceeds the budget.
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
        match fitting {
            Some(_) => write!(f, "a micro-batch of {size} items does not fit: ")?,
            None => write!(f, "a batch of {size} items does not fit, and is not split: ")?,
        }
        if items == size {
            write!(f, "it needs {excess}")?;
        } else {
            write!(f, "already {items} items need {excess}")?;
        }
        if let Some(fitting) = fitting {
            write!(f, "; leave the size out to have it found, or set it to {fitting}, which fits")?;
        }
        Again(need.recomputed, budget).fmt(f)?;
        Elsewhere(need.parked, budget).fmt(f)
    }
}

/// What would help if one item does not fit.
///
/// Chosen by the role that holds the most. Displays as advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// The model and its optimizer hold the most.
    LessState,
    /// The activations hold the most.
    FewerActivations,
    /// The batch itself holds the most.
    SmallerInputs,
    /// Dropping the batches that loader threads have prepared would be enough, or they hold the
    /// most.
    FewerWorkers,
    /// Dropping the checkpoint being written would be enough, or it holds the most.
    NoCheckpoints,
    /// A buffer is larger than any that the device can hold.
    SmallerBuffers,
    /// Something else holds the most, or nothing is known about the holdings.
    MoreMemory,
}

impl Remedy {
    /// The remedy for a need above the budget.
    pub fn of(need: &Need) -> Self {
        if need.oversized.is_some() {
            return Self::SmallerBuffers;
        }
        let most = |most: (Self, Bytes), other: (Self, Bytes)| match other.1 > most.1 {
            true => other,
            false => most,
        };
        let all = Self::all_of(need).into_iter();
        all.reduce(most).map_or(Self::MoreMemory, |(remedy, _)| remedy)
    }

    /// The remedies for all roles that hold anything, with the bytes that they hold, in a fixed
    /// order.
    fn all_of(need: &Need) -> Vec<(Self, Bytes)> {
        let roles = [
            (Role::State, Self::LessState),
            (Role::Activations, Self::FewerActivations),
            (Role::Inputs, Self::SmallerInputs),
            (Role::Loaders, Self::FewerWorkers),
            (Role::Checkpoint, Self::NoCheckpoints),
            (Role::Other, Self::MoreMemory),
        ];
        let held = roles.into_iter().map(|(role, remedy)| (remedy, need.held_by(role)));
        held.filter(|(_, bytes)| *bytes > Bytes::ZERO).collect()
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LessState => {
                "take a smaller model, an optimizer with less state, or a card with more memory"
            }
            Self::FewerActivations => {
                "make each item smaller, such as shorter sequences or smaller images"
            }
            Self::SmallerInputs => "set a smaller batch size in the data loader",
            Self::FewerWorkers => {
                "let the data loader prepare less ahead, with fewer threads or `num_workers(0)`"
            }
            Self::NoCheckpoints => {
                "train without a checkpointer, which holds a copy of parameters and optimizer state while it writes, and save the \
                 trained model"
            }
            Self::SmallerBuffers => {
                "make each item smaller, or take a card with more memory, of which one buffer can be a part"
            }
            Self::MoreMemory => {
                "raise the budget, make each item smaller, or take a smaller model"
            }
        })
    }
}

/// What was tried by computing tensors again, formatted for errors.
struct Again(Option<RecomputedNeed>, Bytes);

impl fmt::Display for Again {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Some(RecomputedNeed { peak, percent }), budget) = self else { return Ok(()) };
        write!(f, ". Computing tensors again was tried: ")?;
        match peak <= budget {
            true => write!(f, "it fits for {percent} % more time, which is more than is allowed"),
            false => write!(f, "the least that was found is {peak}, for {percent} % more time"),
        }
    }
}

/// What parked optimizer state would save, formatted for errors.
struct Elsewhere(Option<ParkedNeed>, Bytes);

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Some(ParkedNeed { peak, on_host }), budget) = self else { return Ok(()) };
        let place = if *on_host { "Park::Disk(folder)" } else { "Park::Host" };
        write!(f, ". With `.park_optimizer({place})` ")?;
        match peak <= budget {
            true => write!(f, "it fits: it needs {peak}"),
            false => write!(f, "it needs {peak}"),
        }
    }
}

/// A need above the budget, formatted for errors.
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
        if *peak == Bytes::MAX {
            return write!(f, "more memory than any device has");
        }
        let quality = match estimate {
            Estimate::Exact => "",
            Estimate::UpperBound => "at most ",
            Estimate::Heuristic => "about ",
            Estimate::LowerBound => "at least ",
        };
        let held = match self.accumulating {
            Accumulating::Yes => " with the gradients of the batch held",
            Accumulating::No => "",
        };
        let (excess, budget) = (*peak - self.budget, self.budget);
        write!(f, "{quality}{peak}{held}, {excess} more than the budget of {budget}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::Split;

    fn error(budget: Bytes) -> DoesNotFit {
        let need = Need::exact(Bytes::mib(100))
            .holding("activations", Role::Activations, Bytes::mib(60))
            .holding("batches of loader threads", Role::Loaders, Bytes::mib(25))
            .holding("a checkpoint being written", Role::Checkpoint, Bytes::mib(15));
        DoesNotFit { batch: Items::new(9), budget, need, accumulating: Accumulating::Yes }
    }

    #[test]
    fn a_lower_bound_is_told_as_one() {
        let need = Need::lower_bound(Bytes::mib(100));
        let error = DoesNotFit { need, ..error(Bytes::mib(80)) };
        assert!(error.to_string().starts_with("one item needs at least 100.00 MiB"), "{error}");
        let (split, need) = (Split::whole(9), Need::lower_bound(Bytes::MAX));
        let (size, budget) = (Items::new(9), Bytes::mib(80));
        let misfit = Answer { split, need };
        assert_eq!(
            FixedDoesNotFit { size, misfit, budget, fitting: None }.to_string(),
            "a batch of 9 items does not fit, and is not split: it needs more memory than any device has"
        );
    }

    #[test]
    fn what_was_tried_by_computing_again_is_told() {
        let mut error = error(Bytes::mib(80));
        error.need.recomputed = Some(RecomputedNeed { peak: Bytes::mib(85), percent: 40 });
        let text = error.to_string();
        assert!(
            text.ends_with("the least that was found is 85.00 MiB, for 40 % more time"),
            "{text}"
        );
        error.need.parked = Some(ParkedNeed { peak: Bytes::mib(81), on_host: false });
        let text = error.to_string();
        let parked = ". With `.park_optimizer(Park::Host)` it needs 81.00 MiB";
        assert!(text.ends_with(parked), "{text}");
        error.need.parked = Some(ParkedNeed { peak: Bytes::mib(80), on_host: true });
        let text = error.to_string();
        let parked = "`.park_optimizer(Park::Disk(folder))` it fits: it needs 80.00 MiB";
        assert!(text.ends_with(parked), "{text}");
        error.need.parked = None;
        error.need.recomputed = Some(RecomputedNeed { peak: Bytes::mib(70), percent: 40 });
        let text = error.to_string();
        assert!(
            text.ends_with("it fits for 40 % more time, which is more than is allowed"),
            "{text}"
        );
    }

    #[test]
    fn what_lives_beside_the_step_is_named_where_it_is_enough_to_do_without() {
        let remedies = [80, 90, 70].map(|budget| error(Bytes::mib(budget)).remedy());
        assert_eq!(
            remedies,
            [Remedy::FewerWorkers, Remedy::FewerWorkers, Remedy::FewerActivations]
        );
        let text = error(Bytes::mib(80)).to_string();
        assert!(text.contains("the largest part is activations with 60.00 MiB, with 25.00 MiB for batches of loader threads"), "{text}");
        assert!(text.contains("`num_workers(0)` (up to 25.00 MiB less); or make"), "{text}");
        assert!(text.ends_with("(up to 60.00 MiB less)"), "{text}");
        let mut small_queue = error(Bytes::mib(90));
        small_queue.need.holdings[1].bytes = Bytes::mib(5);
        assert_eq!(small_queue.remedy(), Remedy::NoCheckpoints);
    }
}
