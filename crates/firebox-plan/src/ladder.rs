//! The splits worth trying, ordered from the largest micro-batch down. The search in `planner.rs`
//! walks this ladder.
//!
//! A batch of `n` items has `n - 1` even splits, but only about `2 * sqrt(n)` distinct largest
//! sizes. Each rung is the split with the fewest steps for one largest size. Powers of two make
//! `log2(n)` rungs. A rung is computed from its number and never stored, so a long ladder costs
//! nothing.

use crate::split::Split;

/// The ways to split one batch into two or more micro-batches.
///
/// Each rung has more steps and a smaller largest size than the rung before it. The last rung has
/// micro-batches of one item. A batch of one item has no rungs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ladder {
    batch: usize,
    rule: Rule,
}

#[derive(Clone, Copy, Debug)]
enum Rule {
    /// Up to `few_steps` steps, every number of steps has a largest size of its own. Above that,
    /// every largest size has a fewest number of steps of its own.
    Even {
        few_steps: usize,
    },
    PowersOfTwo {
        below: usize,
    },
}

impl Ladder {
    /// The ladder of even splits.
    pub fn even(batch: usize) -> Self {
        // The largest of `k` even pieces is (batch - 1) / k + 1. That quotient is distinct for each
        // k up to the square root.
        Self { batch, rule: Rule::Even { few_steps: (batch - 1).isqrt() } }
    }

    /// The ladder of powers of two below the batch, with the remainder last.
    pub fn powers_of_two(batch: usize) -> Self {
        Self::powers_of_two_below(batch, batch)
    }

    /// The ladder of powers of two below `below` items, with the remainder last. `below` is at most
    /// `batch`.
    pub fn powers_of_two_below(batch: usize, below: usize) -> Self {
        Self { batch, rule: Rule::PowersOfTwo { below } }
    }

    /// The number of rungs.
    pub fn len(&self) -> usize {
        match self.rule {
            // One rung for each small number of steps from two on, and one for each remaining size.
            Rule::Even { few_steps: 0 } => 0,
            Rule::Even { few_steps } => few_steps - 1 + self.sizes_left(few_steps),
            Rule::PowersOfTwo { below } => (usize::BITS - (below - 1).leading_zeros()) as usize,
        }
    }

    /// The size of a rung's largest micro-batch, in items.
    pub fn size(&self, rung: usize) -> usize {
        self.split(rung).first.size
    }

    /// The split of a rung.
    pub fn split(&self, rung: usize) -> Split {
        match self.rule {
            Rule::Even { few_steps } if rung + 2 <= few_steps => Split::even(self.batch, rung + 2),
            Rule::Even { .. } => {
                let size = self.len() - rung;
                Split::even(self.batch, self.batch.div_ceil(size))
            }
            Rule::PowersOfTwo { .. } => Split::chunks(self.batch, 1 << (self.len() - 1 - rung)),
        }
    }

    /// The first rung whose largest micro-batch has at most `size` items. `size` is at least one.
    pub fn at_most(&self, size: usize) -> usize {
        match self.rule {
            Rule::Even { few_steps } => {
                let steps = self.batch.div_ceil(size).max(2);
                if steps <= few_steps {
                    return steps - 2;
                }
                self.len() - self.batch.div_ceil(steps)
            }
            Rule::PowersOfTwo { .. } => (self.len() - 1).saturating_sub(size.ilog2() as usize),
        }
    }

    /// The number of distinct largest sizes among even splits with more than `few_steps` steps.
    /// These sizes are all the numbers from one up to it.
    fn sizes_left(&self, few_steps: usize) -> usize {
        (self.batch - 1) / (few_steps + 1) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_rungs_are_all_largest_sizes_with_the_fewest_steps_of_each() {
        for batch in 1..600 {
            let mut wanted: Vec<Split> = (2..=batch).map(|k| Split::even(batch, k)).collect();
            wanted.dedup_by_key(|split| split.first.size);
            let ladder = Ladder::even(batch);
            let rungs: Vec<Split> = (0..ladder.len()).map(|rung| ladder.split(rung)).collect();
            assert_eq!(rungs, wanted, "batch of {batch}");
        }
    }

    #[test]
    fn powers_of_two_are_those_below_the_batch() {
        let sizes = |batch| {
            let ladder = Ladder::powers_of_two(batch);
            (0..ladder.len()).map(|rung| ladder.size(rung)).collect::<Vec<_>>()
        };
        assert!(sizes(1).is_empty());
        assert_eq!(sizes(2), [1]);
        assert_eq!(sizes(64), [32, 16, 8, 4, 2, 1]);
        assert_eq!(sizes(65), [64, 32, 16, 8, 4, 2, 1]);
        let below = Ladder::powers_of_two_below(100, 33);
        assert_eq!((below.len(), below.split(0)), (6, Split::chunks(100, 32)));
    }

    #[test]
    fn at_most_finds_the_first_rung_that_is_small_enough() {
        for batch in 2..300 {
            for ladder in [Ladder::even(batch), Ladder::powers_of_two(batch)] {
                for size in 1..batch {
                    let wanted = (0..ladder.len()).find(|rung| ladder.size(*rung) <= size);
                    assert_eq!(Some(ladder.at_most(size)), wanted, "{ladder:?} at most {size}");
                }
                assert_eq!(ladder.at_most(2 * batch), 0);
            }
        }
    }

    #[test]
    fn a_ladder_of_any_length_costs_nothing() {
        let ladder = Ladder::even(usize::MAX);
        assert!(ladder.len() < 1 << 33);
        assert_eq!(ladder.size(ladder.len() - 1), 1);
        assert_eq!(ladder.split(0).len(), 2);
    }
}
