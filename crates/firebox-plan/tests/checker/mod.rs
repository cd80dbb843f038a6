//! An independent check of a plan. It shares no code with the planner and sees a plan only as
//! ranges of items.
//!
//! Modelled on the checker of regalloc2, which verifies an allocation without knowing how it was
//! computed.

use std::ops::Range;

use firebox_plan::{Answer, Plan, Sizing};
use firebox_trace::{Bytes, Items};

/// The plan, if it is right by the footprints that the planner asked for.
#[track_caller]
pub fn judged(plan: Plan, sizing: Sizing) -> Plan {
    let ranges: Vec<_> = plan.ranges().collect();
    let verdict = check(plan.batch(), plan.budget(), sizing, &ranges, |sizes| {
        let is_asked = |answer: &&Answer| answer.split.sizes().eq(sizes.iter().copied());
        plan.asked().iter().find(is_asked).map(|answer| answer.need.peak)
    });
    assert_eq!(verdict, Ok(()), "{plan}");
    plan
}

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
pub fn check(
    batch: Items,
    budget: Bytes,
    sizing: Sizing,
    ranges: &[Range<usize>],
    footprint: impl Fn(&[Items]) -> Option<Bytes>,
) -> Result<(), String> {
    check_coverage(batch, ranges)?;
    let sizes: Vec<usize> = ranges.iter().map(|range| range.end - range.start).collect();
    check_sizes(sizing, &sizes)?;
    let items: Vec<Items> = sizes.iter().copied().map(Items::new).collect();
    let peak = footprint(&items).ok_or_else(|| format!("nothing is known of {sizes:?}"))?;
    if peak > budget {
        return Err(format!("{sizes:?} need {peak} of a budget of {budget}"));
    }
    let fits_whole = || footprint(&[batch]).is_some_and(|peak| peak <= budget);
    if sizes.len() > 1 && !matches!(sizing, Sizing::Fixed(_)) && fits_whole() {
        return Err("the whole batch fits and is split".to_owned());
    }
    Ok(())
}

/// Checks that every item runs exactly once, in order, and that no micro-batch is empty.
fn check_coverage(batch: Items, ranges: &[Range<usize>]) -> Result<(), String> {
    let mut expected = 0;
    for (index, range) in ranges.iter().enumerate() {
        if range.start != expected {
            return Err(format!("micro-batch {index} does not begin at item {expected}"));
        }
        if range.end <= range.start {
            return Err(format!("micro-batch {index} has no items"));
        }
        expected = range.end;
    }
    if expected != batch.get() {
        return Err(format!("the plan covers {expected} items and the batch has {batch}"));
    }
    Ok(())
}

/// Checks the rule of the sizing. A batch in one piece passes, except under a smaller fixed size.
fn check_sizes(sizing: Sizing, sizes: &[usize]) -> Result<(), String> {
    let last = sizes.len() - 1;
    let is_even = sizes.iter().max().zip(sizes.iter().min()).is_some_and(|(a, b)| a - b <= 1);
    let is_right = |index: usize| {
        let (size, is_last) = (sizes[index], index == last);
        match sizing {
            Sizing::Even => is_even,
            Sizing::PowersOfTwo if last == 0 => true,
            Sizing::PowersOfTwo if index == 0 => size.is_power_of_two(),
            Sizing::PowersOfTwo => size == sizes[0] || (is_last && size < sizes[0]),
            Sizing::Fixed(fixed) => size == fixed.get() || (is_last && size < fixed.get()),
            Sizing::Whole => last == 0,
            sizing => panic!("{sizing:?} has no rule here"),
        }
    };
    let wrong = (0..sizes.len()).find(|index| !is_right(*index));
    wrong.map_or(Ok(()), |index| Err(format!("micro-batch {index} breaks the sizing")))
}

/// One MiB for each item, one MiB for the gradient sum of a split batch. Sizes above 90 items are
/// unknown.
#[track_caller]
fn check_plan(sizing: Sizing, ranges: &[Range<usize>], expected: Result<(), &str>) {
    let found = check(Items::new(100), Bytes::mib(40), sizing, ranges, |sizes| {
        let extra = if sizes.len() > 1 { 1 } else { 0 };
        let items = sizes.iter().max()?.get();
        (items <= 90).then(|| Bytes::mib(items as u64 + extra))
    });
    assert_eq!(found, expected.map_err(Into::into));
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
    let wrong = |ranges: &[Range<usize>], expected| check_plan(Sizing::Even, ranges, Err(expected));
    wrong(&[], "the plan covers 0 items and the batch has 100");
    wrong(&[0..50, 50..99], "the plan covers 99 items and the batch has 100");
    wrong(&[0..50, 50..101], "the plan covers 101 items and the batch has 100");
    wrong(&[0..50, 51..100], "micro-batch 1 does not begin at item 50");
    wrong(&[0..50, 49..100], "micro-batch 1 does not begin at item 50");
    wrong(&[50..100, 0..50], "micro-batch 0 does not begin at item 0");
    wrong(&[0..50, 50..50, 50..100], "micro-batch 1 has no items");
}

#[test]
fn sizes_against_the_rule_are_found() {
    let [first, second, last] =
        [0, 1, 2].map(|index| format!("micro-batch {index} breaks the sizing"));
    check_plan(Sizing::Even, &[0..35, 35..70, 70..100], Err(&first));
    check_plan(Sizing::PowersOfTwo, &[0..25, 25..50, 50..75, 75..100], Err(&first));
    check_plan(Sizing::PowersOfTwo, &[0..32, 32..48, 48..100], Err(&second));
    check_plan(Sizing::PowersOfTwo, &[0..32, 32..64, 64..100], Err(&last));
    check_plan(Sizing::Fixed(Items::new(32)), &[0..32, 32..64, 64..100], Err(&last));
    check_plan(Sizing::Whole, &[0..50, 50..100], Err(&first));
}

#[test]
fn sizes_that_do_not_fit_are_found() {
    let over = "[40, 40, 20] need 41.00 MiB of a budget of 40.00 MiB";
    check_plan(Sizing::Fixed(Items::new(40)), &[0..40, 40..80, 80..100], Err(over));
    let unknown = "nothing is known of [100]";
    check_plan(Sizing::Even, &[Range { start: 0, end: 100 }], Err(unknown));
}

#[test]
fn a_needless_split_is_found_unless_the_user_asked_for_it() {
    let judge = |sizing| {
        let footprint = |sizes: &[Items]| Some(Bytes::mib(sizes[0].get() as u64));
        check(Items::new(40), Bytes::mib(40), sizing, &[0..20, 20..40], footprint)
    };
    assert_eq!(judge(Sizing::Even), Err("the whole batch fits and is split".to_owned()));
    assert_eq!(judge(Sizing::Fixed(Items::new(20))), Ok(()));
}
