//! What the caller asks of a plan: the sizes it may use and the order in which they are tried.
//!
//! The planner reads these options; it never sets them.

use firebox_trace::Items;

/// Which micro-batch sizes a plan may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sizing {
    /// As few micro-batches as fit, with sizes that differ by at most one item. The default.
    ///
    /// 100 becomes 4 x 25. 10 in three steps becomes 4, 3 and 3.
    #[default]
    Even,
    /// The largest power of two that fits, with the remainder last: 100 becomes 3 x 32 + 4.
    ///
    /// A batch that fits whole is not split, whatever its size.
    PowersOfTwo,
    /// The given number of items, with the remainder last.
    ///
    /// A size equal to or above the batch means the whole batch. The size is verified, not searched
    /// for. A batch larger than this size is split even if it would fit whole.
    Fixed(Items),
    /// The whole batch. It is not split, whatever it needs.
    Whole,
}

/// The order in which sizes are tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Probing {
    /// The whole batch first, then a binary search. The default.
    ///
    /// Suitable whenever computing a footprint takes no memory.
    #[default]
    FromWhole,
    /// From one item upwards, never more than twice a size known to fit.
    ///
    /// For models that read values while they are recorded: computing their footprint takes the
    /// memory it measures. Asks for about twice as many footprints.
    FromOne,
}

/// How to plan.
///
/// Defaults: [`Sizing::Even`], [`Probing::FromWhole`], one split per call.
///
/// ```
/// use firebox_plan::{PlanOptions, Probing, Sizing};
/// use firebox_trace::Items;
///
/// let options =
///     PlanOptions::new().sizing(Sizing::Fixed(Items::new(16))).probing(Probing::FromOne);
/// assert_eq!(options.sizing, Sizing::Fixed(Items::new(16)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Which micro-batch sizes a plan may use.
    pub sizing: Sizing,
    /// The order in which sizes are tried.
    pub probing: Probing,
    /// How many splits one call may ask for, at least one. Default: one. See
    /// [`plan_at_once`](crate::plan_at_once).
    pub at_once: usize,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl PlanOptions {
    /// Returns the defaults listed on the type.
    pub const fn new() -> Self {
        Self { sizing: Sizing::Even, probing: Probing::FromWhole, at_once: 1 }
    }

    /// Sets which micro-batch sizes a plan may use.
    pub const fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = sizing;
        self
    }

    /// Sets the order in which sizes are tried.
    pub const fn probing(mut self, probing: Probing) -> Self {
        self.probing = probing;
        self
    }

    /// Sets how many splits one call may ask for. Zero counts as one.
    pub const fn at_once(mut self, splits: usize) -> Self {
        self.at_once = if splits == 0 { 1 } else { splits };
        self
    }
}
