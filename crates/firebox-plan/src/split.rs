//! A way to cut a batch: at most two runs of equal micro-batches, the larger size first.
//!
//! Every plan has this shape, so a plan of a million micro-batches is as small as one of two.

use crate::need::Accumulating;

/// Some micro-batches of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// How many, at least one.
    pub count: usize,
    /// Items in each, at least one.
    pub size: usize,
}

/// A whole batch, cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// The micro-batches that come first.
    pub first: Run,
    /// Those that follow; each smaller than one of `first`.
    pub rest: Option<Run>,
}

impl Split {
    /// The batch in one piece.
    pub fn whole(batch: usize) -> Self {
        Self { first: Run { count: 1, size: batch }, rest: None }
    }

    /// `steps` micro-batches whose sizes differ by one at most.
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

    /// Micro-batches of `size` items, and one of what remains.
    pub fn chunks(batch: usize, size: usize) -> Self {
        if size >= batch {
            return Self::whole(batch);
        }
        let (count, remainder) = (batch / size, batch % size);
        let rest = (remainder > 0).then_some(Run { count: 1, size: remainder });
        Self { first: Run { count, size }, rest }
    }

    /// The one or two runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        [Some(self.first), self.rest].into_iter().flatten()
    }

    /// The number of micro-batches.
    pub fn steps(&self) -> usize {
        self.runs().map(|run| run.count).sum()
    }

    /// Whether gradients are summed over micro-batches.
    pub fn accumulating(&self) -> Accumulating {
        match self.steps() {
            1 => Accumulating::No,
            _ => Accumulating::Yes,
        }
    }

    /// The items of micro-batch `step`: where they begin and how many they are.
    pub fn piece(&self, step: usize) -> (usize, usize) {
        let Run { count, size } = self.first;
        match self.rest {
            Some(rest) if step >= count => (count * size + (step - count) * rest.size, rest.size),
            _ => (step * size, size),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(split: Split, sizes: &[usize]) {
        let pieces: Vec<_> = (0..split.steps()).map(|step| split.piece(step)).collect();
        assert_eq!(pieces.iter().map(|piece| piece.1).collect::<Vec<_>>(), sizes);
        let mut begin = 0;
        for piece in pieces {
            assert_eq!(piece.0, begin);
            begin += piece.1;
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
