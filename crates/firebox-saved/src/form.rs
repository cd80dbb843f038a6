//! Forms: splits whose traces differ in numbers alone, and the splits that are recorded to find how
//! these numbers follow from sizes.

use firebox_plan::{Run, Split};
use serde::{Deserialize, Serialize};

use crate::rule::{Sizes, rank};

/// From this many micro-batches of one size on, further ones repeat the last.
pub(crate) const REPEATING: usize = 3;

/// Splits are sampled with up to this many micro-batches of one size.
const MOST_COUNT: usize = REPEATING + 2;

/// Micro-batches of samples have at most this many items.
const MOST_SIZE: usize = 7;

/// The items of a batch of which every form can be recorded. More are not looked at.
pub const ENOUGH: usize = 24;

/// The form of a split: how many micro-batches of each size are recorded, and whether they are of
/// one item. Automatic differentiation sums gradients over dimensions that were broadcast, and a
/// dimension of one is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Form {
    first: Part,
    rest: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
struct Part {
    recorded: u8,
    is_of_one: bool,
}

impl Part {
    fn of(run: Run) -> Self {
        Self { recorded: run.count.min(REPEATING) as u8, is_of_one: run.size == 1 }
    }
}

impl Form {
    pub(crate) fn of(split: &Split) -> Self {
        Self { first: Part::of(split.first()), rest: split.rest().map(Part::of) }
    }
}

/// The splits to record for every form that batches of up to `items` items have: as few as
/// determine all rules, and one more of each form to verify them.
pub(crate) fn samples(items: usize) -> Vec<Vec<Split>> {
    let mut forms: Vec<(Form, Vec<Split>)> = Vec::new();
    for split in candidates(items) {
        let form = Form::of(&split);
        match forms.iter_mut().find(|(of, _)| *of == form) {
            Some((_, splits)) => splits.push(split),
            None => forms.push((form, vec![split])),
        }
    }
    forms.into_iter().map(|(_, splits)| chosen(splits)).collect()
}

/// All small splits, the smallest batches first.
fn candidates(items: usize) -> Vec<Split> {
    let runs =
        || (1..=MOST_COUNT).flat_map(|count| (1..=MOST_SIZE).map(move |size| Run { count, size }));
    let mut splits = Vec::new();
    for first in runs() {
        splits.push(Split::new(first, None));
        let smaller = runs().filter(|rest| rest.size < first.size);
        splits.extend(smaller.map(|rest| Split::new(first, Some(rest))));
    }
    splits.retain(|split| split.batch().get() <= items);
    splits.sort_by_key(Split::batch);
    splits
}

/// Large splits of a batch of `items` items, against which rules are verified that were found with
/// small ones: the whole batch, and two uneven parts.
pub(crate) fn verified(items: usize) -> Vec<Split> {
    let mut splits = vec![Split::whole(items)];
    let (larger, smaller) = (items - items / 3, items / 3);
    if smaller > 0 && smaller < larger {
        let run = |size| Run { count: 1, size };
        splits.push(Split::new(run(larger), Some(run(smaller))));
    }
    splits
}

/// Of splits of one form, those that raise the rank, and the largest of the others, which verifies
/// the rules. Without one, only the first: it then tells about itself.
fn chosen(splits: Vec<Split>) -> Vec<Split> {
    let sizes = |splits: &[Split]| splits.iter().filter_map(Sizes::of).collect::<Vec<_>>();
    let mut chosen: Vec<Split> = Vec::new();
    let mut others = Vec::new();
    for split in splits {
        chosen.push(split);
        if rank(&sizes(&chosen)) < chosen.len() {
            others.extend(chosen.pop());
        }
    }
    match others.pop() {
        Some(other) => chosen.push(other),
        None => chosen.truncate(1),
    }
    chosen
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn samples_of_a_large_batch_cover_every_form() {
        let samples = samples(64);
        let forms: BTreeSet<Form> = samples.iter().map(|splits| Form::of(&splits[0])).collect();
        for batch in 1..40 {
            for steps in 1..=batch {
                assert!(
                    forms.contains(&Form::of(&Split::even(batch, steps))),
                    "{batch} in {steps}"
                );
            }
            for size in 1..=batch {
                assert!(
                    forms.contains(&Form::of(&Split::chunks(batch, size))),
                    "{batch} by {size}"
                );
            }
        }
        for splits in &samples {
            assert!(splits.iter().all(|split| Form::of(split) == Form::of(&splits[0])));
        }
    }

    #[test]
    fn enough_items_determine_every_form() {
        let rank_of =
            |splits: &Vec<Split>| rank(&splits.iter().filter_map(Sizes::of).collect::<Vec<_>>());
        let ranks = |items: usize| samples(items).iter().map(rank_of).sum::<usize>();
        assert_eq!(ranks(ENOUGH), ranks(60));
        assert!(ranks(ENOUGH - 1) < ranks(60), "fewer items are enough");
        let recordings = samples(ENOUGH).concat().len();
        assert!(recordings < 130, "{recordings}");
        for splits in samples(ENOUGH) {
            // Whole batches of one item are all the same.
            let is_one = splits.len() == 1 && splits[0].batch().get() <= 2;
            assert!(is_one || rank_of(&splits) < splits.len(), "{} has no verifier", splits[0]);
        }
    }

    #[test]
    fn a_small_batch_has_samples_of_its_own_size_or_less() {
        assert!(samples(0).is_empty());
        for items in 1..20 {
            let splits = samples(items).concat();
            assert!(splits.iter().all(|split| split.batch().get() <= items));
            assert!(splits.iter().any(|split| split.len() == 1));
        }
    }
}
