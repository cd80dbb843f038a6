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

/// What to do where a slightly larger micro-batch needs far more memory, as on a GPU when it opens another page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cliffs {
    /// Take the fewest micro-batches that fit. The default.
    #[default]
    Ignore,
    /// Take a split with more steps if its largest micro-batch is at most a tenth smaller and needs at least a fifth less:
    /// the rest of the memory stays free for others. The bounds are rough: below them the time that more steps cost
    /// outweighs what is saved. Does not concern a batch that fits whole, nor [`Sizing::Fixed`].
    Avoid,
}

impl Cliffs {
    /// The largest part of a size that may be given up.
    pub(crate) const SLIGHTLY: f64 = 0.1;
    /// The least part of its memory that must be saved for that.
    pub(crate) const FAR_LESS: f64 = 0.2;
}

/// How to plan. Default: [`Sizing::Even`], [`Probing::FromWhole`], [`Cliffs::Ignore`], one size at a time.
///
/// ```
/// use firebox_plan::{PlanOptions, Probing, Sizing};
/// use firebox_trace::Items;
///
/// let options = PlanOptions::new().sizing(Sizing::Fixed(Items::new(16))).probing(Probing::FromOne);
/// assert_eq!(options.sizing, Sizing::Fixed(Items::new(16)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// Which micro-batch sizes a plan may use.
    pub sizing: Sizing,
    /// In what order sizes are tried.
    pub probing: Probing,
    /// What to do where a slightly larger micro-batch needs far more memory.
    pub cliffs: Cliffs,
    /// How many splits may be asked for at once, see [`plan_at_once`](crate::plan_at_once).
    pub at_once: usize,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl PlanOptions {
    /// The defaults.
    pub const fn new() -> Self {
        Self {
            sizing: Sizing::Even,
            probing: Probing::FromWhole,
            cliffs: Cliffs::Ignore,
            at_once: 1,
        }
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

    /// Sets what to do where a slightly larger micro-batch needs far more memory.
    pub const fn cliffs(mut self, cliffs: Cliffs) -> Self {
        self.cliffs = cliffs;
        self
    }

    /// Sets how many splits may be asked for at once; at least one.
    pub const fn at_once(mut self, splits: usize) -> Self {
        self.at_once = if splits == 0 { 1 } else { splits };
        self
    }
}
