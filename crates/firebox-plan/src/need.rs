//! What the planner is told about a split: its peak, how certain the peak is, and what holds the
//! memory.
//!
//! The planner decides by the peak alone. The holdings serve only the text of errors. They come in
//! as data, so this crate knows no modules, parameters or backends.

use std::borrow::Cow;

use firebox_trace::{Bytes, Estimate};
use serde::{Deserialize, Serialize};

/// Whether a micro-batch is one of several, so that a gradient sum is held while it runs.
///
/// The first of several micro-batches runs before that sum exists. It still counts as `Yes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulating {
    /// The micro-batch is the whole batch. Its gradients go straight to the optimizer.
    No,
    /// The micro-batch is one of several. The gradients of the others are held while it runs.
    Yes,
}

/// What held memory is used for. Decides which remedy an error names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Parameters, gradients and optimizer state. A smaller micro-batch does not shrink them.
    State,
    /// Values the forward pass keeps for the backward pass.
    Activations,
    /// The batch itself, as the loader put it on the device.
    Inputs,
    /// Batches that loader threads have prepared in addition to the current one.
    Loaders,
    /// Data a checkpoint is still being written from, already replaced by training.
    Checkpoint,
    /// Anything else, such as the workspace of a kernel.
    Other,
}

/// Memory held at the peak under one label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The label shown to a person, such as `activations of encoder`.
    pub label: Cow<'static, str>,
    /// What the memory is used for.
    pub role: Role,
    /// Its share of the peak, in bytes.
    pub bytes: Bytes,
}

/// The memory one iteration over a batch needs.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// Peak in bytes: everything the device must provide, including the model and the gradient sum.
    pub peak: Bytes,
    /// How certain `peak` is.
    pub estimate: Estimate,
    /// What holds the memory at the peak. May be empty, and need not add up to `peak`.
    pub holdings: Vec<Holding>,
    /// A buffer the device can never hold, however much memory is free. `None` if there is none.
    pub oversized: Option<Oversized>,
    /// The least that was found by computing tensors again, if that was tried and is too much.
    pub recomputed: Option<RecomputedNeed>,
    /// What is needed if the optimizer's state is parked between steps, if that was tried.
    pub parked: Option<ParkedNeed>,
}

/// What is needed if tensors are recomputed instead of kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecomputedNeed {
    /// Peak in bytes.
    pub peak: Bytes,
    /// The additional time, in percent of the time of forward and backward passes.
    pub percent: u32,
}

/// What is needed if the optimizer's state is outside of the device between optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParkedNeed {
    /// Peak in bytes.
    pub peak: Bytes,
    /// Whether host memory is no place for it, because the device computes there.
    pub on_host: bool,
}

/// A buffer above the largest size a device can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oversized {
    /// The size of the buffer.
    pub buffer: Bytes,
    /// The largest buffer the device can hold, such as a quarter of a CUDA device's memory.
    pub limit: Bytes,
}

impl Need {
    /// A peak the device will reach to the byte, without holdings.
    pub fn exact(peak: Bytes) -> Self {
        Self::new(peak, Estimate::Exact)
    }

    /// A peak the device will not exceed, without holdings.
    pub fn upper_bound(peak: Bytes) -> Self {
        Self::new(peak, Estimate::UpperBound)
    }

    /// A peak that only approximates what the device will use, without holdings.
    pub fn heuristic(peak: Bytes) -> Self {
        Self::new(peak, Estimate::Heuristic)
    }

    /// A peak the device will reach or exceed, without holdings.
    pub fn lower_bound(peak: Bytes) -> Self {
        Self::new(peak, Estimate::LowerBound)
    }

    /// A peak of the given certainty, without holdings.
    pub fn new(peak: Bytes, estimate: Estimate) -> Self {
        Self {
            peak,
            estimate,
            holdings: Vec::new(),
            oversized: None,
            recomputed: None,
            parked: None,
        }
    }

    /// Adds a holding: `bytes` of the peak under the name `label`.
    pub fn holding(
        mut self,
        label: impl Into<Cow<'static, str>>,
        role: Role,
        bytes: Bytes,
    ) -> Self {
        self.holdings.push(Holding { label: label.into(), role, bytes });
        self
    }

    /// Marks the need as impossible to meet: it includes a `buffer` above the device's `limit`.
    /// Sets `peak` to [`Bytes::MAX`].
    pub fn oversized(mut self, buffer: Bytes, limit: Bytes) -> Self {
        self.peak = Bytes::MAX;
        self.oversized = Some(Oversized { buffer, limit });
        self
    }

    /// The largest holding, or `None` if nothing is held.
    pub fn largest(&self) -> Option<&Holding> {
        self.holdings
            .iter()
            .filter(|holding| holding.bytes > Bytes::ZERO)
            .max_by_key(|holding| holding.bytes)
    }

    /// The total bytes of all holdings with this role.
    pub fn held_by(&self, role: Role) -> Bytes {
        self.holdings
            .iter()
            .filter(|holding| holding.role == role)
            .map(|holding| holding.bytes)
            .sum()
    }
}
