//! Picks the micro-steps that a rehearsal runs to represent all.

use std::ops::Range;

use firebox_plan::{Run, Split};

/// From this many micro-steps of one size on, each repeats the previous one.
const REPEATING: usize = 3;

/// Up to so many micro-steps, all are rehearsed where pages count and their outputs are joined:
/// each finds more outputs on the page than the one before it. Outputs of more are not joined,
/// unless the user asks for it.
pub(crate) const JOINED: usize = 16;

/// From this many batches on, each finds the same state as the previous one: micro-steps of all
/// sizes have run in a row.
const BATCHES: usize = 2;

/// A micro-step that is rehearsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its items in the rehearsed batch.
    pub(crate) range: Range<usize>,
    /// How many more like it follow that are not rehearsed.
    pub(crate) more: usize,
}

impl Piece {
    /// How many more like it follow, as a mark says it. A mark counts no further than 32 bits.
    pub(crate) fn more_to_mark(&self) -> u32 {
        u32::try_from(self.more).unwrap_or(u32::MAX)
    }
}

/// The micro-steps that represent those of `batches` batches in a row. Of consecutive equal ones,
/// the first three are kept. Where pages do not count, one smaller micro-step represents all
/// smaller ones: the largest ones decide, and one is enough to see what they leave.
pub(crate) fn representative(split: Split, batches: usize, pages: bool) -> Vec<Piece> {
    let largest = split.largest().get();
    let most = |items: usize| if pages || items == largest { REPEATING } else { 1 };
    let first = split.first();
    let mut one = of_run(0, first, most(first.size));
    if let Some(rest) = split.rest() {
        one.extend(of_run(first.count * first.size, rest, most(rest.size)));
    }
    // The smaller micro-steps of a batch are not equal to the larger ones of the next.
    let listed = batches.min(if split.is_uneven() { BATCHES } else { REPEATING });
    let mut pieces = shortened(&mut (0..listed).flat_map(|_| one.iter().cloned()), most);
    if let Some(last) = pieces.last_mut().filter(|_| !split.is_uneven()) {
        // The batches that are not listed repeat the last.
        let more = split.len().saturating_mul(batches - listed);
        last.more = last.more.saturating_add(more);
    }
    pieces
}

/// As [`representative`], for outputs that are joined where pages count: all micro-steps of a
/// batch, if they are at most [`JOINED`].
pub(crate) fn of_joined(split: Split, batches: usize) -> Vec<Piece> {
    if split.len() > JOINED {
        return representative(split, batches, true);
    }
    let of_batch = || split.ranges().map(|range| Piece { range, more: 0 });
    (0..batches.min(BATCHES)).flat_map(|_| of_batch()).collect()
}

/// The first `most` micro-steps of a run that begins at item `begin`.
fn of_run(begin: usize, run: Run, most: usize) -> Vec<Piece> {
    let listed = run.count.min(most);
    let begins = (0..listed).map(|at| begin + at * run.size);
    let single = |begin| Piece { range: begin..begin + run.size, more: 0 };
    let mut pieces: Vec<Piece> = begins.map(single).collect();
    if let Some(last) = pieces.last_mut() {
        last.more = run.count - listed;
    }
    pieces
}

/// Keeps the first `most` of consecutive pieces of equal length.
fn shortened(pieces: &mut dyn Iterator<Item = Piece>, most: impl Fn(usize) -> usize) -> Vec<Piece> {
    let mut kept: Vec<Piece> = Vec::new();
    let mut equal = 0;
    for piece in pieces {
        match kept.last_mut().filter(|last| last.range.len() == piece.range.len()) {
            Some(last) if equal >= most(piece.range.len()) => {
                last.more = last.more.saturating_add(piece.more).saturating_add(1);
            }
            Some(_) => {
                equal += 1;
                kept.push(piece);
            }
            None => {
                equal = 1;
                kept.push(piece);
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use firebox_plan::{Need, PlanOptions, Sizing, plan};
    use firebox_trace::{Bytes, Items};

    use super::*;

    /// Checks the sizes that represent `batches` batches of `items` items, cut into micro-batches
    /// of `size`.
    #[track_caller]
    fn check(items: usize, size: usize, batches: usize, expected: &[usize]) {
        let options = PlanOptions::new().sizing(Sizing::Fixed(Items::new(size)));
        let free = |_| Ok::<_, Infallible>(Need::exact(Bytes::ZERO));
        let plan = plan(Items::new(items), Bytes::new(1), &options, free).expect("it is free");
        let pieces = representative(plan.split(), batches, true);
        assert_eq!(pieces.iter().map(|piece| piece.range.len()).collect::<Vec<_>>(), expected);
        assert!(pieces.iter().all(|piece| piece.range.end <= items));
    }

    #[test]
    fn three_of_each_size_stand_for_all() {
        check(10, 10, 1, &[10]);
        check(20, 10, 1, &[10, 10]);
        check(90, 10, 1, &[10, 10, 10]);
        check(95, 10, 1, &[10, 10, 10, 5]);
        check(15, 10, 1, &[10, 5]);
    }

    #[test]
    fn without_pages_one_smaller_micro_step_is_enough() {
        let free = |_| Ok::<_, Infallible>(Need::exact(Bytes::ZERO));
        let fits = |split: Split| {
            let fits = split.largest().get() <= 3;
            Ok::<_, Infallible>(Need::exact(Bytes::new(if fits { 1 } else { 2 })))
        };
        let plan_of = |items| plan(Items::new(items), Bytes::new(1), &PlanOptions::new(), fits);
        let uneven = plan_of(13).expect("three items fit");
        assert_eq!(uneven.to_string(), "13 = 3 x 3 + 2 x 2");
        let sizes = |pages| {
            let pieces = representative(uneven.split(), 1, pages);
            pieces.iter().map(|piece| piece.range.len()).collect::<Vec<_>>()
        };
        assert_eq!((sizes(true), sizes(false)), (vec![3, 3, 3, 2, 2], vec![3, 3, 3, 2]));
        let whole = plan(Items::new(9), Bytes::new(1), &PlanOptions::new(), free);
        let whole = whole.expect("it is free").split();
        let piece = |more| Piece { range: 0..9, more };
        assert_eq!(representative(whole, 8, false), [piece(0), piece(0), piece(5)]);
    }

    #[test]
    fn what_follows_the_smaller_size_is_rehearsed_where_batches_are_summed_up() {
        check(10, 10, 2, &[10, 10]);
        check(10, 10, 8, &[10, 10, 10]);
        check(20, 10, 8, &[10, 10, 10]);
        check(95, 10, 8, &[10, 10, 10, 5, 10, 10, 10, 5]);
    }

    #[test]
    fn any_number_of_batches_is_represented_at_once() {
        let whole = representative(Split::whole(9), usize::MAX, true);
        let more: Vec<usize> = whole.iter().map(|piece| piece.more).collect();
        assert_eq!(more, [0, 0, usize::MAX - 3]);
        assert_eq!(whole[2].more_to_mark(), u32::MAX);
        let many = representative(Split::even(usize::MAX - 1, usize::MAX / 2), usize::MAX, false);
        assert_eq!((many.len(), many[2].more), (3, usize::MAX));
        let uneven = representative(Split::chunks(95, 10), usize::MAX, true);
        assert_eq!(uneven, representative(Split::chunks(95, 10), 2, true));
    }

    #[test]
    fn all_of_a_few_outputs_that_are_joined_are_rehearsed() {
        let sizes = |split, batches| -> Vec<usize> {
            of_joined(split, batches).iter().map(|piece| piece.range.len()).collect()
        };
        assert_eq!(sizes(Split::chunks(40, 8), 1), [8; 5]);
        assert_eq!(sizes(Split::chunks(11, 4), 7), [4, 4, 3, 4, 4, 3]);
        assert_eq!(sizes(Split::chunks(170, 10), 1), [10; 3]);
    }

    #[test]
    fn what_is_left_out_is_counted() {
        let more = |items: usize, size: usize, batches: usize| {
            let options = PlanOptions::new().sizing(Sizing::Fixed(Items::new(size)));
            let free = |_| Ok::<_, Infallible>(Need::exact(Bytes::ZERO));
            let plan = plan(Items::new(items), Bytes::new(1), &options, free).expect("it is free");
            let pieces = representative(plan.split(), batches, true);
            pieces.into_iter().map(|piece| piece.more).collect::<Vec<_>>()
        };
        assert_eq!(more(20, 10, 1), [0, 0]);
        assert_eq!(more(90, 10, 1), [0, 0, 6]);
        assert_eq!(more(95, 10, 2), [0, 0, 6, 0, 0, 0, 6, 0]);
        assert_eq!(more(20, 10, 8), [0, 0, 13]);
    }
}
