//! The result of planning: the micro-batches of one batch and the footprints used to choose them.

use std::fmt;
use std::ops::Range;

use firebox_trace::{Bytes, Estimate, Items};

use crate::need::{Accumulating, Need};
use crate::split::Split;

/// One footprint the planner asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The micro-batches of the iteration.
    pub split: Split,
    /// The memory they need.
    pub need: Need,
}

/// How a batch is run: micro-batches that cover it exactly once, in order, each within the budget.
///
/// Displays as count and size: `100 = 4 x 25`, `10 = 1 x 4 + 2 x 3`. A whole batch displays as
/// `64 = 1 x 64`.
///
/// ```
/// use firebox_plan::{Need, PlanOptions, plan};
/// use firebox_trace::{Bytes, Items};
///
/// let plan = plan(Items::new(10), Bytes::mib(45), &PlanOptions::new(), |split| {
///     Ok::<_, std::convert::Infallible>(Need::exact(
///         Bytes::mib(10) * split.largest().get() as u64
///     ))
/// })?;
/// assert_eq!(plan.to_string(), "10 = 1 x 4 + 2 x 3");
/// assert_eq!(plan.len(), 3);
/// assert_eq!(plan.sizes().map(Items::get).collect::<Vec<_>>(), [4, 3, 3]);
/// assert_eq!(plan.ranges().collect::<Vec<_>>(), [0..4, 4..7, 7..10]);
/// assert!(!plan.is_whole());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    batch: Items,
    budget: Bytes,
    split: Split,
    peak: Bytes,
    estimate: Estimate,
    asked: Vec<Answer>,
}

impl Plan {
    /// The plan that runs `batch` as `split`. The split must be among the answers.
    pub(crate) fn new(batch: Items, budget: Bytes, split: Split, asked: Vec<Answer>) -> Self {
        let answer = asked.iter().find(|answer| answer.split == split);
        let Need { peak, estimate, .. } =
            answer.expect("the planner asks for the split that it takes").need;
        Self { batch, budget, split, peak, estimate, asked }
    }

    /// The same micro-batches with another need, for something that was left out of what was asked.
    /// `None` if they do not fit so.
    ///
    /// ```
    /// use firebox_plan::{Need, PlanOptions, plan};
    /// use firebox_trace::{Bytes, Items};
    ///
    /// let plan = plan(Items::new(10), Bytes::mib(45), &PlanOptions::new(), |split| {
    ///     Ok::<_, std::convert::Infallible>(Need::exact(
    ///         Bytes::mib(10) * split.largest().get() as u64
    ///     ))
    /// })?;
    /// let more = plan.needing(Need::exact(Bytes::mib(44))).expect("it fits");
    /// assert_eq!((more.split(), more.peak()), (plan.split(), Bytes::mib(44)));
    /// assert_eq!(plan.needing(Need::exact(Bytes::mib(46))), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn needing(&self, need: Need) -> Option<Self> {
        let mut asked = self.asked.clone();
        asked.iter_mut().find(|answer| answer.split == self.split)?.need = need;
        Self::fitting(self.budget, self.split, asked)
    }

    /// The plan that runs a batch as `split`, which is not searched for. `None` if its `need` is
    /// above the budget.
    pub fn of_split(budget: Bytes, split: Split, need: Need) -> Option<Self> {
        Self::fitting(budget, split, vec![Answer { split, need }])
    }

    fn fitting(budget: Bytes, split: Split, asked: Vec<Answer>) -> Option<Self> {
        let plan = Self::new(split.batch(), budget, split, asked);
        let own = plan.asked.iter().find(|answer| answer.split == split)?;
        (plan.peak <= budget && own.need.oversized.is_none()).then_some(plan)
    }

    /// The items of the batch, over all micro-batches.
    pub fn batch(&self) -> Items {
        self.batch
    }

    /// The budget the plan was made for.
    pub fn budget(&self) -> Bytes {
        self.budget
    }

    /// The number of micro-batches: at least one, at most one for each item.
    #[expect(clippy::len_without_is_empty, reason = "a plan has at least one micro-batch")]
    pub fn len(&self) -> usize {
        self.split.len()
    }

    /// Whether the batch runs as one micro-batch.
    pub fn is_whole(&self) -> bool {
        self.len() == 1
    }

    /// Whether gradients are summed over micro-batches: `Yes` unless the plan is whole.
    pub fn accumulating(&self) -> Accumulating {
        self.split.accumulating()
    }

    /// The micro-batches as one [`Split`].
    pub fn split(&self) -> Split {
        self.split
    }

    /// The micro-batch sizes, in execution order.
    pub fn sizes(&self) -> impl ExactSizeIterator<Item = Items> + use<> {
        self.split.sizes()
    }

    /// The item range of each micro-batch, counted from zero, in execution order.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        self.split.ranges()
    }

    /// The size of the largest micro-batch.
    pub fn largest(&self) -> Items {
        self.split.largest()
    }

    /// The predicted peak in bytes. Never above the budget.
    pub fn peak(&self) -> Bytes {
        self.peak
    }

    /// How certain [`peak`](Self::peak) is.
    pub fn estimate(&self) -> Estimate {
        self.estimate
    }

    /// Every footprint asked for while making this plan, in the order asked. Includes the plan's
    /// own.
    pub fn asked(&self) -> &[Answer] {
        &self.asked
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{} = {}", self.batch, self.split))
    }
}
