//! An independent check of a plan. It shares no code with the planner and sees a plan only as
//! ranges of items.
//!
//! Debug builds of [`plan`](crate::plan) and the property tests call it on every plan. Modelled on
//! the checker of regalloc2, which verifies an allocation without knowing how it was computed.

use std::ops::Range;

use firebox_trace::{Bytes, Items};

use crate::options::Sizing;

/// Checks that the micro-batches `ranges` are a valid way to run `batch` within `budget`.
///
/// `footprint` returns the peak of an iteration over micro-batches of the given sizes, or `None` if
/// it is unknown. The peak of `ranges` must be known.
///
/// Detects:
/// - an item left out, run twice or run out of order
/// - an empty micro-batch
/// - a peak above the budget
/// - sizes that break the rule of the sizing
/// - a split of a batch that fits whole, unless the user fixed the size. Skipped if the peak of the
///   whole batch is unknown.
///
/// Does not look for splits with fewer steps.
///
/// # Errors
/// The first violation found.
///
/// ```
/// use firebox_plan::{Sizing, Violation, check};
/// use firebox_trace::{Bytes, Items};
///
/// let footprint = |sizes: &[Items]| sizes.iter().max().map(|most| Bytes::mib(most.get() as u64));
/// let (batch, budget) = (Items::new(10), Bytes::mib(4));
/// assert_eq!(check(batch, budget, Sizing::Even, &[0..4, 4..7, 7..10], footprint), Ok(()));
/// assert_eq!(
///     check(batch, budget, Sizing::Even, &[0..4, 4..8, 8..10], footprint),
///     Err(Violation::Uneven { smallest: Items::new(2), largest: Items::new(4) }),
/// );
/// ```
pub fn check(
    batch: Items,
    budget: Bytes,
    sizing: Sizing,
    ranges: &[Range<usize>],
    mut footprint: impl FnMut(&[Items]) -> Option<Bytes>,
) -> Result<(), Violation> {
    check_coverage(batch, ranges)?;
    let sizes: Vec<usize> = ranges.iter().map(|range| range.end - range.start).collect();
    check_sizes(sizing, &sizes)?;
    let items: Vec<Items> = sizes.iter().copied().map(Items::new).collect();
    let largest = items.iter().copied().max().unwrap_or(Items::new(0));
    let peak = footprint(&items).ok_or(Violation::Unknown { items: largest })?;
    if peak > budget {
        return Err(Violation::OverBudget { items: largest, peak, budget });
    }
    let split_by_choice = matches!(sizing, Sizing::Fixed(_));
    if sizes.len() > 1 && !split_by_choice {
        match footprint(&[batch]) {
            Some(peak) if peak <= budget => return Err(Violation::NeedlessSplit { peak, budget }),
            _ => {}
        }
    }
    Ok(())
}

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A micro-batch does not begin where the previous one ended.
    #[error(
        "micro-batch {index} begins at item {begin} and not at item {expected}: do not run this plan"
    )]
    OutOfOrder {
        /// Index of the micro-batch, from zero.
        index: usize,
        /// The item it begins at.
        begin: usize,
        /// The item it must begin at.
        expected: usize,
    },
    /// A micro-batch has no items.
    #[error("micro-batch {index} has no items: do not run this plan")]
    Empty {
        /// Index of the micro-batch, from zero.
        index: usize,
    },
    /// The last micro-batch does not end where the batch ends.
    #[error("the plan covers {covered} items and the batch has {batch}: do not run this plan")]
    WrongEnd {
        /// The items that the plan covers.
        covered: Items,
        /// The items of the batch.
        batch: Items,
    },
    /// The footprint of the plan is unknown.
    #[error("nothing is known of {items} items: find their footprint before running this plan")]
    Unknown {
        /// The largest micro-batch.
        items: Items,
    },
    /// The plan exceeds the budget.
    #[error("{items} items need {peak} and the budget is {budget}: do not run this plan")]
    OverBudget {
        /// The largest micro-batch.
        items: Items,
        /// The peak of the plan.
        peak: Bytes,
        /// The budget it exceeds.
        budget: Bytes,
    },
    /// Sizes of an even split differ by more than one item.
    #[error("sizes from {smallest} to {largest} are not even: plan this batch again")]
    Uneven {
        /// The smallest micro-batch.
        smallest: Items,
        /// The largest micro-batch.
        largest: Items,
    },
    /// A size breaks the rule of [`Sizing::PowersOfTwo`], [`Sizing::Fixed`] or [`Sizing::Whole`].
    #[error("micro-batch {index} of {items} items breaks the sizing: plan this batch again")]
    AgainstSizing {
        /// Index of the micro-batch, from zero.
        index: usize,
        /// Its size.
        items: Items,
    },
    /// The batch fits whole but is split.
    #[error(
        "the whole batch needs {peak} of a budget of {budget} and is split: plan this batch again"
    )]
    NeedlessSplit {
        /// The peak of the whole batch.
        peak: Bytes,
        /// The budget it stays within.
        budget: Bytes,
    },
}

/// Checks that every item runs exactly once, in order, and that no micro-batch is empty.
fn check_coverage(batch: Items, ranges: &[Range<usize>]) -> Result<(), Violation> {
    let mut expected = 0;
    for (index, range) in ranges.iter().enumerate() {
        if range.start != expected {
            return Err(Violation::OutOfOrder { index, begin: range.start, expected });
        }
        if range.end <= range.start {
            return Err(Violation::Empty { index });
        }
        expected = range.end;
    }
    if expected != batch.get() {
        return Err(Violation::WrongEnd { covered: Items::new(expected), batch });
    }
    Ok(())
}

/// Checks the rule of the sizing. A batch in one piece passes, except under a smaller fixed size.
fn check_sizes(sizing: Sizing, sizes: &[usize]) -> Result<(), Violation> {
    let against =
        |index: usize| Violation::AgainstSizing { index, items: Items::new(sizes[index]) };
    let last = sizes.len().saturating_sub(1);
    match sizing {
        Sizing::Even => {
            let smallest = Items::new(sizes.iter().copied().min().unwrap_or(0));
            let largest = Items::new(sizes.iter().copied().max().unwrap_or(0));
            if largest.get() - smallest.get() > 1 {
                return Err(Violation::Uneven { smallest, largest });
            }
        }
        Sizing::PowersOfTwo if last > 0 => {
            for (index, size) in sizes.iter().enumerate() {
                let right = match index {
                    0 => size.is_power_of_two(),
                    _ if index < last => *size == sizes[0],
                    _ => *size <= sizes[0],
                };
                if !right {
                    return Err(against(index));
                }
            }
        }
        Sizing::Whole if last > 0 => return Err(against(0)),
        Sizing::PowersOfTwo | Sizing::Whole => {}
        Sizing::Fixed(fixed) => {
            for (index, size) in sizes.iter().enumerate() {
                let right = if index < last { *size == fixed.get() } else { *size <= fixed.get() };
                if !right {
                    return Err(against(index));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One MiB for each item, one MiB for the gradient sum of a split batch. Sizes above 90 items
    /// are unknown.
    #[track_caller]
    fn check_plan(sizing: Sizing, ranges: &[Range<usize>], expected: Result<(), &str>) {
        let found = check(Items::new(100), Bytes::mib(40), sizing, ranges, |sizes| {
            let extra = if sizes.len() > 1 { 1 } else { 0 };
            let items = sizes.iter().max()?.get();
            (items <= 90).then(|| Bytes::mib(items as u64 + extra))
        });
        assert_eq!(found.map_err(|violation| violation.to_string()), expected.map_err(Into::into));
    }

    #[test]
    fn right_plans_pass() {
        check_plan(Sizing::Even, &[0..34, 34..67, 67..100], Ok(()));
        check_plan(Sizing::Even, &[0..33, 33..66, 66..100], Ok(()));
        check_plan(Sizing::PowersOfTwo, &[0..32, 32..64, 64..96, 96..100], Ok(()));
        check_plan(Sizing::Fixed(Items::new(39)), &[0..39, 39..78, 78..100], Ok(()));
    }

    #[test]
    fn items_left_out_or_run_twice_are_found() {
        let wrong = |ranges: &[Range<usize>], expected| {
            check_plan(Sizing::Even, ranges, Err(expected));
        };
        wrong(&[], "the plan covers 0 items and the batch has 100: do not run this plan");
        wrong(
            &[0..50, 50..99],
            "the plan covers 99 items and the batch has 100: do not run this plan",
        );
        wrong(
            &[0..50, 50..101],
            "the plan covers 101 items and the batch has 100: do not run this plan",
        );
        wrong(
            &[0..50, 51..100],
            "micro-batch 1 begins at item 51 and not at item 50: do not run this plan",
        );
        wrong(
            &[0..50, 49..100],
            "micro-batch 1 begins at item 49 and not at item 50: do not run this plan",
        );
        wrong(
            &[50..100, 0..50],
            "micro-batch 0 begins at item 50 and not at item 0: do not run this plan",
        );
        wrong(&[0..50, 50..50, 50..100], "micro-batch 1 has no items: do not run this plan");
    }

    #[test]
    fn sizes_against_the_rule_are_found() {
        let uneven = "sizes from 30 to 35 are not even: plan this batch again";
        check_plan(Sizing::Even, &[0..35, 35..70, 70..100], Err(uneven));
        let first = "micro-batch 0 of 25 items breaks the sizing: plan this batch again";
        check_plan(Sizing::PowersOfTwo, &[0..25, 25..50, 50..75, 75..100], Err(first));
        let second = "micro-batch 1 of 16 items breaks the sizing: plan this batch again";
        check_plan(Sizing::PowersOfTwo, &[0..32, 32..48, 48..100], Err(second));
        let last = "micro-batch 2 of 36 items breaks the sizing: plan this batch again";
        check_plan(Sizing::PowersOfTwo, &[0..32, 32..64, 64..100], Err(last));
        check_plan(Sizing::Fixed(Items::new(32)), &[0..32, 32..64, 64..100], Err(last));
        let first = "micro-batch 0 of 50 items breaks the sizing: plan this batch again";
        check_plan(Sizing::Whole, &[0..50, 50..100], Err(first));
    }

    #[test]
    fn sizes_that_do_not_fit_are_found() {
        let over = "40 items need 41.00 MiB and the budget is 40.00 MiB: do not run this plan";
        check_plan(Sizing::Fixed(Items::new(40)), &[0..40, 40..80, 80..100], Err(over));
        let unknown =
            "nothing is known of 100 items: find their footprint before running this plan";
        check_plan(Sizing::Even, &[Range { start: 0, end: 100 }], Err(unknown));
    }

    #[test]
    fn a_needless_split_is_found_unless_the_user_asked_for_it() {
        let halves = [0..20, 20..40];
        let judge = |sizing| {
            let footprint = |sizes: &[Items]| Some(Bytes::mib(sizes[0].get() as u64));
            check(Items::new(40), Bytes::mib(40), sizing, &halves, footprint)
        };
        let needless = Violation::NeedlessSplit { peak: Bytes::mib(40), budget: Bytes::mib(40) };
        assert_eq!(judge(Sizing::Even), Err(needless));
        assert_eq!(judge(Sizing::Fixed(Items::new(20))), Ok(()));
    }
}
