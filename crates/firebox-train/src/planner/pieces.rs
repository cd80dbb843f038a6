//! Picks the micro-steps that a rehearsal runs to represent all.

use std::ops::Range;

use firebox_plan::Split;

/// From this many micro-steps of one size on, each repeats the previous one.
const REPEATING: usize = 3;

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

/// The micro-steps that represent those of `batches` batches in a row. Of consecutive equal ones,
/// the first three are kept. Where pages do not count, one smaller micro-step represents all
/// smaller ones: the largest ones decide, and one is enough to see what they leave.
pub(crate) fn representative(split: Split, batches: usize, pages: bool) -> Vec<Piece> {
    let largest = split.largest().get();
    let most = |items: usize| if pages || items == largest { REPEATING } else { 1 };
    let single = |range| Piece { range, more: 0 };
    let one = shortened(&mut split.ranges().map(single), most);
    // The smaller micro-steps of a batch are not equal to the larger ones of the next.
    let batches = if split.is_uneven() { batches.min(BATCHES) } else { batches };
    shortened(&mut (0..batches).flat_map(|_| one.iter().cloned()), most)
}

/// Keeps the first `most` of consecutive pieces of equal length.
fn shortened(pieces: &mut dyn Iterator<Item = Piece>, most: impl Fn(usize) -> usize) -> Vec<Piece> {
    let mut kept: Vec<Piece> = Vec::new();
    let mut equal = 0;
    for piece in pieces {
        match kept.last_mut().filter(|last| last.range.len() == piece.range.len()) {
            Some(last) if equal >= most(piece.range.len()) => last.more += 1 + piece.more,
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
