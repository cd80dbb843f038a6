//! How a batch is cut: at most two runs of equal micro-batches, the larger size first.
//!
//! The planner asks for footprints of these, and every plan holds one. A plan of a million
//! micro-batches is therefore as small as a plan of two.

use std::fmt;
use std::ops::Range;

use firebox_trace::Items;
use serde::{Deserialize, Serialize};

use crate::need::Accumulating;

/// Consecutive micro-batches of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// Number of micro-batches, at least one.
    pub count: usize,
    /// Items in each, at least one.
    pub size: usize,
}

/// The micro-batches of one batch: a run of one size, then possibly a run of a smaller size.
///
/// The planner asks for the footprint of a whole split. On a GPU the two sizes cannot be measured
/// separately: buffers of one size leave gaps that buffers of the other do not fit.
///
/// Displays as count and size: `4 x 25`, `1 x 4 + 2 x 3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Split {
    /// The micro-batches that run first.
    pub(crate) first: Run,
    /// The remaining micro-batches, each smaller than those of `first`.
    pub(crate) rest: Option<Run>,
}

impl Split {
    /// The micro-batches of `first`, then those of `rest`.
    ///
    /// ```
    /// use firebox_plan::{Run, Split};
    ///
    /// let split = Split::new(Run { count: 2, size: 5 }, Some(Run { count: 1, size: 3 }));
    /// assert_eq!(split.to_string(), "2 x 5 + 1 x 3");
    /// assert_eq!(split.batch().get(), 13);
    /// ```
    ///
    /// # Panics
    ///
    /// If a run is empty, or those of `rest` are not smaller.
    pub fn new(first: Run, rest: Option<Run>) -> Self {
        let split = Self { first, rest };
        assert!(split.runs().all(|run| run.count > 0 && run.size > 0), "a run is not empty");
        assert!(rest.is_none_or(|rest| rest.size < first.size), "the larger size comes first");
        split
    }

    /// The micro-batches that run first.
    pub fn first(&self) -> Run {
        self.first
    }

    /// The remaining micro-batches, each smaller than those of [`first`](Self::first).
    pub fn rest(&self) -> Option<Run> {
        self.rest
    }

    /// The number of items in all micro-batches.
    pub fn batch(&self) -> Items {
        Items::new(self.runs().map(|run| run.count * run.size).sum())
    }

    /// The whole batch as one micro-batch.
    pub fn whole(batch: usize) -> Self {
        Self { first: Run { count: 1, size: batch }, rest: None }
    }

    /// `steps` micro-batches whose sizes differ by at most one.
    ///
    /// # Panics
    ///
    /// If `steps` is zero.
    pub fn even(batch: usize, steps: usize) -> Self {
        let (size, larger) = (batch / steps, batch % steps);
        if larger == 0 {
            return Self { first: Run { count: steps, size }, rest: None };
        }
        Self {
            first: Run { count: larger, size: size + 1 },
            rest: Some(Run { count: steps - larger, size }),
        }
    }

    /// Micro-batches of `size` items, then one with the remainder.
    ///
    /// # Panics
    ///
    /// If `size` is zero.
    pub fn chunks(batch: usize, size: usize) -> Self {
        if size >= batch {
            return Self::whole(batch);
        }
        let (count, remainder) = (batch / size, batch % size);
        let rest = (remainder > 0).then_some(Run { count: 1, size: remainder });
        Self { first: Run { count, size }, rest }
    }

    /// The number of micro-batches.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one micro-batch")]
    pub fn len(&self) -> usize {
        self.runs().map(|run| run.count).sum()
    }

    /// The items of the last micro-batch of each size.
    pub fn last_of_sizes(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let last = self.runs().map(|run| {
            end += run.count * run.size;
            end - run.size..end
        });
        last.collect()
    }

    /// Whether the micro-batches have two different sizes.
    pub fn is_uneven(&self) -> bool {
        self.rest.is_some()
    }

    /// The size of the largest micro-batch, which runs first.
    pub fn largest(&self) -> Items {
        Items::new(self.first.size)
    }

    /// The micro-batch sizes, in execution order.
    pub fn sizes(&self) -> impl ExactSizeIterator<Item = Items> + use<> {
        self.ranges().map(|range| Items::new(range.len()))
    }

    /// The item range of each micro-batch, counted from zero, in execution order.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let split = *self;
        (0..split.len()).map(move |step| {
            let (begin, size) = split.piece(step);
            begin..begin + size
        })
    }

    /// Whether gradients are summed over micro-batches: `Yes` if there is more than one.
    pub fn accumulating(&self) -> Accumulating {
        match self.len() {
            1 => Accumulating::No,
            _ => Accumulating::Yes,
        }
    }

    /// The one or two runs, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        [Some(self.first), self.rest].into_iter().flatten()
    }

    /// The first item of micro-batch `step` and its number of items.
    fn piece(&self, step: usize) -> (usize, usize) {
        let Run { count, size } = self.first;
        match self.rest {
            Some(rest) if step >= count => (count * size + (step - count) * rest.size, rest.size),
            _ => (step * size, size),
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.runs().map(|run| format!("{} x {}", run.count, run.size));
        f.pad(&runs.collect::<Vec<_>>().join(" + "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(split: Split, sizes: &[usize]) {
        assert_eq!(split.sizes().map(Items::get).collect::<Vec<_>>(), sizes);
        let mut begin = 0;
        for range in split.ranges() {
            assert_eq!(range.start, begin);
            begin = range.end;
        }
    }

    #[test]
    fn pieces_follow_each_other() {
        check(Split::whole(7), &[7]);
        check(Split::even(100, 4), &[25, 25, 25, 25]);
        check(Split::even(10, 3), &[4, 3, 3]);
        check(Split::even(11, 3), &[4, 4, 3]);
        check(Split::even(3, 3), &[1, 1, 1]);
        check(Split::chunks(100, 32), &[32, 32, 32, 4]);
        check(Split::chunks(64, 32), &[32, 32]);
        check(Split::chunks(5, 8), &[5]);
    }
}
