//! Judges the plans of the tests by the independent checker, and tests that checker.

use std::ops::Range;

use firebox_plan::checker::{check, judge};
use firebox_plan::{Plan, Sizing};
use firebox_trace::{Bytes, Items};

/// The plan, if it is right by the footprints that the planner asked for.
#[track_caller]
pub fn judged(plan: Plan, sizing: Sizing) -> Plan {
    assert_eq!(judge(&plan, sizing), Ok(()), "{plan}");
    plan
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
