//! The wishes a plan has to meet: which sizes are allowed, and in what order sizes may be tried.

use firebox_trace::Items;

/// Which micro-batch sizes a plan may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sizing {
    /// As few micro-batches as fit, as even as they can be: 100 becomes 4 x 25, and 10 in three steps becomes
    /// 4 + 3 + 3. The default.
    #[default]
    Even,
    /// The largest power of two that fits, and the remainder last: 100 becomes 3 x 32 + 4. A batch that fits whole is
    /// not split, whatever its size.
    PowersOfTwo,
    /// The given number of items, and the remainder last. A size of the batch or above means the whole batch. The
    /// size is not searched for, only verified; a batch that would fit whole is split all the same.
    Fixed(Items),
}

/// In what order sizes are tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Probing {
    /// The whole batch first, then a binary search. The default, and right wherever finding a footprint costs no
    /// memory.
    #[default]
    FromWhole,
    /// From one item upwards, never more than twice a size that is known to fit. For models that read values while
    /// they are recorded: there, finding a footprint takes the memory that it measures. Asks about twice as often.
    FromOne,
}

/// How to plan. Default: [`Sizing::Even`], [`Probing::FromWhole`].
///
/// ```
/// use firebox_plan::{PlanOptions, Probing, Sizing};
/// use firebox_trace::Items;
///
/// let options = PlanOptions::new().sizing(Sizing::Fixed(Items::new(16))).probing(Probing::FromOne);
/// assert_eq!(options.sizing, Sizing::Fixed(Items::new(16)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Which micro-batch sizes a plan may use.
    pub sizing: Sizing,
    /// In what order sizes are tried.
    pub probing: Probing,
}

impl PlanOptions {
    /// The defaults.
    pub const fn new() -> Self {
        Self { sizing: Sizing::Even, probing: Probing::FromWhole }
    }

    /// Sets which micro-batch sizes a plan may use.
    pub const fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = sizing;
        self
    }

    /// Sets in what order sizes are tried.
    pub const fn probing(mut self, probing: Probing) -> Self {
        self.probing = probing;
        self
    }
}
