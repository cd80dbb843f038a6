//! What the planner is told about a split: its peak, how sure that is, and who holds the memory.
//!
//! The planner decides by the peak alone. Who holds the memory only serves the words of an error; the names come in as
//! data, so that this crate need not know modules, parameters or backends.

use std::borrow::Cow;

use firebox_trace::{Bytes, Estimate};

/// Whether a micro-batch is one of several, so that a sum of gradients is live while it runs.
///
/// The first micro-batch of several runs before that sum exists; it counts as `Yes` all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulating {
    /// The micro-batch is the whole batch: its gradients go to the optimizer at once.
    No,
    /// The micro-batch is one of several: the gradients of the others are held beside it.
    Yes,
}

/// What held memory is there for. It decides which remedy an error names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Parameters, gradients, optimizer state: a smaller micro-batch does not shrink them.
    State,
    /// What the forward pass keeps for the backward pass.
    Activations,
    /// The batch itself, as the loader put it on the device.
    Inputs,
    /// Batches that loader threads have prepared, beside the one that is worked on.
    Loaders,
    /// What a checkpoint is being written from, where training has replaced it.
    Checkpoint,
    /// Anything else, such as the workspace of a kernel.
    Other,
}

/// Memory that is held under one name at the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The name that a person sees, as in `activations of encoder`.
    pub label: Cow<'static, str>,
    /// What the memory is there for.
    pub role: Role,
    /// How much of the peak it is.
    pub bytes: Bytes,
}

/// The memory that an iteration needs.
///
/// ```
/// use firebox_plan::{Estimate, Need, Role};
/// use firebox_trace::Bytes;
///
/// let need = Need::upper_bound(Bytes::mib(700))
///     .holding("parameters", Role::State, Bytes::mib(100))
///     .holding("activations of encoder", Role::Activations, Bytes::mib(550));
/// assert_eq!(need.estimate, Estimate::UpperBound);
/// assert_eq!(need.largest().unwrap().label, "activations of encoder");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The bytes at the peak: all that the device must provide, the model and the gradient sum included.
    pub peak: Bytes,
    /// How sure `peak` is.
    pub estimate: Estimate,
    /// Who holds the memory at the peak. May be empty, and need not add up to `peak`.
    pub holdings: Vec<Holding>,
    /// A buffer that the device can never hold, however much of it is free.
    pub oversized: Option<Oversized>,
}

/// A buffer that is larger than any that a device can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oversized {
    /// The size of the buffer.
    pub buffer: Bytes,
    /// The largest that there can be, such as a quarter of a CUDA device.
    pub limit: Bytes,
}

impl Need {
    /// A peak that is the very number that the device will see; nobody holds anything yet.
    pub fn exact(peak: Bytes) -> Self {
        Self::new(peak, Estimate::Exact)
    }

    /// A peak that the device will not exceed; nobody holds anything yet.
    pub fn upper_bound(peak: Bytes) -> Self {
        Self::new(peak, Estimate::UpperBound)
    }

    /// A peak that is only near what the device will see; nobody holds anything yet.
    pub fn heuristic(peak: Bytes) -> Self {
        Self::new(peak, Estimate::Heuristic)
    }

    /// A peak of the given quality; nobody holds anything yet.
    pub fn new(peak: Bytes, estimate: Estimate) -> Self {
        Self { peak, estimate, holdings: Vec::new(), oversized: None }
    }

    /// The same need, with `bytes` of its peak held under the name `label`.
    pub fn holding(
        mut self,
        label: impl Into<Cow<'static, str>>,
        role: Role,
        bytes: Bytes,
    ) -> Self {
        self.holdings.push(Holding { label: label.into(), role, bytes });
        self
    }

    /// The same need, which nothing can meet: it takes a `buffer` above the `limit` of the device.
    pub fn oversized(mut self, buffer: Bytes, limit: Bytes) -> Self {
        self.peak = Bytes::MAX;
        self.oversized = Some(Oversized { buffer, limit });
        self
    }

    /// The largest holding; none if nothing is held.
    pub fn largest(&self) -> Option<&Holding> {
        self.holdings
            .iter()
            .filter(|holding| holding.bytes > Bytes::ZERO)
            .max_by_key(|holding| holding.bytes)
    }

    /// The bytes of all holdings of one role.
    pub fn held_by(&self, role: Role) -> Bytes {
        self.holdings
            .iter()
            .filter(|holding| holding.role == role)
            .map(|holding| holding.bytes)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_holding_is_not_an_empty_one() {
        let need = Need::exact(Bytes::mib(1)).holding("inputs", Role::Inputs, Bytes::ZERO);
        assert_eq!(need.largest(), None);
    }

    #[test]
    fn roles_add_up_over_holdings() {
        let need = Need::heuristic(Bytes::mib(9))
            .holding("parameters", Role::State, Bytes::mib(1))
            .holding("activations", Role::Activations, Bytes::mib(5))
            .holding("optimizer state", Role::State, Bytes::mib(2));
        assert_eq!(need.held_by(Role::State), Bytes::mib(3));
        assert_eq!(need.held_by(Role::Other), Bytes::ZERO);
    }

    #[test]
    fn the_least_sure_estimate_is_the_largest() {
        assert!(Estimate::Exact < Estimate::UpperBound);
        assert!(Estimate::UpperBound < Estimate::Heuristic);
        assert_eq!(Estimate::UpperBound.to_string(), "upper bound");
    }
}
