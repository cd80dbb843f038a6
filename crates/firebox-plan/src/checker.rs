//! An independent check of a plan. It shares no code with the planner and sees a plan only as
//! ranges of items.
//!
//! Modelled on the checker of regalloc2, which verifies an allocation without knowing how it was
//! computed.

use std::ops::Range;

use firebox_trace::{Bytes, Items};

use crate::{Answer, Plan, Sizing};

/// Checks a plan by the footprints that the planner asked for.
///
/// # Errors
///
/// What is wrong, see [`check`].
pub fn judge(plan: &Plan, sizing: Sizing) -> Result<(), String> {
    let ranges: Vec<_> = plan.ranges().collect();
    check(plan.batch(), plan.budget(), sizing, &ranges, |sizes| {
        let is_asked = |answer: &&Answer| answer.split.sizes().eq(sizes.iter().copied());
        plan.asked().iter().find(is_asked).map(|answer| answer.need.peak)
    })
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
        }
    };
    let wrong = (0..sizes.len()).find(|index| !is_right(*index));
    wrong.map_or(Ok(()), |index| Err(format!("micro-batch {index} breaks the sizing")))
}
