//! The planner: turns a batch, a budget and a function that computes footprints into a plan.
//!
//! Every sizing asks the same question: how far down a ladder of splits, each with more steps than
//! the one before, do the micro-batches fit? The search halves the ladder as if footprints grew
//! with size. It then verifies the rung it found and moves on if that rung's footprint breaks the
//! pattern.

use std::ops::Range;

use firebox_trace::{Bytes, Items};

use crate::answers::Answers;
use crate::checker::judge;
use crate::error::{DoesNotFit, FixedDoesNotFit, PlanError};
use crate::ladder::Ladder;
use crate::need::{Accumulating, Need, Role};
use crate::options::{PlanOptions, Probing, Sizing};
use crate::outcome::{Answer, Plan};
use crate::split::Split;

/// How many rungs after the one found are tried one by one if that one does not fit.
const NEIGHBOURS: usize = 4;

/// How many times the search guesses the first fitting rung before it divides the ladder into
/// parts.
const GUESSES: usize = 3;

/// How many guesses may fail before the fewest items are asked for.
const GUESSES_BEFORE_LEAST: usize = 2;

/// Plans with more micro-batches than this are not judged: the checker looks at each.
const MOST_JUDGED: usize = 1 << 20;

/// Decides how many micro-batches to split `batch` into so that each fits `budget`.
///
/// `footprint_of` returns what an iteration over the given split needs. It is called at most once
/// for each [`Split`]. A split fits if its peak is not above the budget. Where the largest
/// micro-batch decides, as on a heap without pages, return the footprint of [`Split::largest`].
///
/// # What is guaranteed
/// For any footprints:
/// - The plan covers the batch exactly once, in order, and follows the sizing.
/// - The footprint of the plan was asked for and fits.
/// - [`PlanError::DoesNotFit`] means that one item was asked for and does not fit. So there is a
///   plan whenever one item fits, unless the size is fixed.
///
/// For footprints that grow with size (and are larger when accumulating):
/// - A batch that fits whole is not split.
/// - No plan with fewer steps fits under the same sizing.
///
/// Exceptions:
/// - If a larger size may need less memory, a plan with fewer steps may exist. If one item does not
///   fit, only a few of the next larger sizes are tried.
/// - [`Probing::FromOne`] tries nothing above the first size that does not fit.
///
/// # How often it asks
/// For footprints that grow with size and a batch of `n` items: at most `log2(n) / 2 + 4` times
/// from the whole batch downwards (10 for 5,000 items), and `1.5 * log2(n) + 6` times from one item
/// upwards. For any other footprints, and if nothing fits: at most `3 * log2(n) + 16` times.
///
/// # Errors
/// - The batch has no items, the budget is zero, or the fixed size is zero.
/// - One item, the fixed size, or the batch that is not to be split, exceeds the budget.
/// - `footprint_of` failed.
///
/// ```
/// use firebox_plan::{Need, PlanOptions, Sizing, Split, plan};
/// use firebox_trace::{Bytes, Items};
///
/// let footprint = |split: Split| {
///     let activations = Bytes::mib(1) * split.largest().get() as u64;
///     Ok::<_, std::convert::Infallible>(Need::exact(Bytes::mib(20) + activations))
/// };
/// let batch = Items::new(100);
/// let even = plan(batch, Bytes::mib(60), &PlanOptions::new(), footprint)?;
/// assert_eq!(even.to_string(), "100 = 1 x 34 + 2 x 33");
///
/// let options = PlanOptions::new().sizing(Sizing::PowersOfTwo);
/// assert_eq!(
///     plan(batch, Bytes::mib(60), &options, footprint)?.to_string(),
///     "100 = 3 x 32 + 1 x 4"
/// );
///
/// let error = plan(Items::new(1), Bytes::mib(16), &options, footprint).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "one item needs 21.00 MiB, 5.00 MiB more than the budget of 16.00 MiB: \
///      raise the budget, make each item smaller, or take a smaller model",
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn plan<E>(
    batch: Items,
    budget: Bytes,
    options: &PlanOptions,
    mut footprint_of: impl FnMut(Split) -> Result<Need, E>,
) -> Result<Plan, PlanError<E>> {
    // One split per call: after a failure, the remaining questions would be needless.
    let options = options.at_once(1);
    plan_at_once(batch, budget, &options, |splits| {
        splits.iter().map(|split| footprint_of(*split)).collect()
    })
}

/// Plans as [`plan`] does, but asks for up to [`PlanOptions::at_once`] splits in one call.
///
/// `footprints_of` may compute the footprints in parallel. It returns one answer for each split, in
/// the same order.
///
/// With more than one split per call, the search first guesses two neighbouring rungs from what the
/// whole batch [holds](Need::holding). While neither fits, it guesses again, at most twice, from
/// how the misfits differ, and asks for the rung halfway between the first open one and that guess
/// as well. It then divides the remaining rungs into as many parts as it may ask for, instead of
/// halves. This asks for more splits overall, in fewer calls. [`Probing::FromOne`] always asks for
/// one split per call.
///
/// # Errors
/// The same as [`plan`].
///
/// # Panics
/// If `footprints_of` returns the wrong number of answers.
///
/// ```
/// use firebox_plan::{Need, PlanOptions, Split, plan_at_once};
/// use firebox_trace::{Bytes, Items};
///
/// let mut calls = 0;
/// let footprints = |splits: &[Split]| {
///     calls += 1;
///     let need = |items: Items| Need::exact(Bytes::mib(20) + Bytes::mib(1) * items.get() as u64);
///     splits
///         .iter()
///         .map(|split| Ok::<_, std::convert::Infallible>(need(split.largest())))
///         .collect()
/// };
/// let options = PlanOptions::new().at_once(4);
/// let plan = plan_at_once(Items::new(5000), Bytes::mib(60), &options, footprints)?;
/// assert_eq!(plan.to_string(), "5000 = 125 x 40");
/// assert!(calls <= 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn plan_at_once<E>(
    batch: Items,
    budget: Bytes,
    options: &PlanOptions,
    footprints_of: impl FnMut(&[Split]) -> Vec<Result<Need, E>>,
) -> Result<Plan, PlanError<E>> {
    if batch.get() == 0 {
        return Err(PlanError::EmptyBatch);
    }
    if budget == Bytes::ZERO {
        return Err(PlanError::ZeroBudget);
    }
    let mut search = Search {
        batch: batch.get(),
        budget,
        probing: options.probing,
        // From one item upwards, each size depends on the answer for the previous one.
        at_once: if options.probing == Probing::FromOne { 1 } else { options.at_once.max(1) },
        answers: Answers::new(footprints_of),
    };
    let split = match options.sizing {
        Sizing::Even => search.fewest_steps(&Ladder::even(batch.get()))?,
        Sizing::PowersOfTwo => search.fewest_steps(&Ladder::powers_of_two(batch.get()))?,
        Sizing::Fixed(size) => search.fixed(size.get())?,
        Sizing::Whole => search.whole()?,
    };
    let plan = Plan::new(batch, budget, split, search.answers.into_known());
    if cfg!(debug_assertions) && plan.len() <= MOST_JUDGED {
        assert_eq!(judge(&plan, options.sizing), Ok(()), "the planner made a wrong plan: {plan}");
    }
    Ok(plan)
}

/// One search: its goal, and the footprints known so far.
struct Search<F> {
    batch: usize,
    budget: Bytes,
    probing: Probing,
    at_once: usize,
    answers: Answers<F>,
}

impl<F, E> Search<F>
where
    F: FnMut(&[Split]) -> Vec<Result<Need, E>>,
{
    /// The whole batch if it fits; otherwise the first rung of the ladder that fits.
    fn fewest_steps(&mut self, ladder: &Ladder) -> Result<Split, PlanError<E>> {
        let whole = Split::whole(self.batch);
        let Some(open) = self.approach(whole, ladder)? else { return Ok(whole) };
        let found = self.first_that_fits(ladder, open.clone())?;
        for rung in rungs_to_settle(open, found) {
            let split = ladder.split(rung);
            if self.fits(split)? {
                return Ok(split);
            }
        }
        Err(PlanError::DoesNotFit(self.one_item_does_not_fit().into()))
    }

    /// Micro-batches of `size` items, if they fit.
    fn fixed(&mut self, size: usize) -> Result<Split, PlanError<E>> {
        if size == 0 {
            return Err(PlanError::ZeroFixedSize);
        }
        let split = Split::chunks(self.batch, size);
        let smaller = Ladder::powers_of_two_below(self.batch, split.first.size);
        let Some(open) = self.approach(split, &smaller)? else { return Ok(split) };
        let misfit = self.answers.misfits(self.budget).next_back().cloned();
        let found = self.first_that_fits(&smaller, open.clone())?;
        match misfit {
            Some(misfit) if found < open.end => {
                Err(PlanError::FixedDoesNotFit(Box::new(FixedDoesNotFit {
                    size: split.largest(),
                    misfit,
                    budget: self.budget,
                    fitting: Some(Items::new(smaller.size(found))),
                })))
            }
            _ => Err(PlanError::DoesNotFit(self.one_item_does_not_fit().into())),
        }
    }

    /// The whole batch, if it fits.
    fn whole(&mut self) -> Result<Split, PlanError<E>> {
        let split = Split::whole(self.batch);
        let smaller = Ladder::powers_of_two_below(self.batch, self.batch);
        if self.approach(split, &smaller)?.is_none() {
            return Ok(split);
        }
        let misfit = self.answers.misfits(self.budget).next_back().cloned();
        let misfit = misfit.expect("the search has stopped at one");
        if misfit.split.largest() == Items::new(1) {
            return Err(PlanError::DoesNotFit(self.one_item_does_not_fit().into()));
        }
        Err(PlanError::FixedDoesNotFit(Box::new(FixedDoesNotFit {
            size: Items::new(self.batch),
            misfit,
            budget: self.budget,
            fitting: None,
        })))
    }

    /// Tries `goal` in the order of the probing. If it does not fit, returns the rungs below it
    /// that may still fit.
    fn approach(
        &mut self,
        goal: Split,
        ladder: &Ladder,
    ) -> Result<Option<Range<usize>>, PlanError<E>> {
        if self.probing == Probing::FromOne
            && let Some(stopped) = self.grow(goal.accumulating(), ladder)?
        {
            return Ok(Some(stopped + 1..ladder.len()));
        }
        let fits = self.fits(goal)?;
        Ok((!fits).then_some(0..ladder.len()))
    }

    /// Climbs the ladder from one item to the first rung, at most doubling the size at each step.
    /// Returns the first rung that does not fit.
    ///
    /// If the goal is not split, each size is asked for as a whole batch.
    fn grow(
        &mut self,
        accumulating: Accumulating,
        ladder: &Ladder,
    ) -> Result<Option<usize>, PlanError<E>> {
        let mut next = ladder.len().checked_sub(1);
        while let Some(rung) = next {
            let size = ladder.size(rung);
            let split = match accumulating {
                Accumulating::No => Split::whole(size),
                Accumulating::Yes => ladder.split(rung),
            };
            if !self.fits(split)? {
                return Ok(Some(rung));
            }
            next = (rung > 0).then(|| ladder.at_most(size.saturating_mul(2)));
        }
        Ok(None)
    }

    /// The first of the `open` rungs that fits, or the end of `open` if none was found.
    ///
    /// Divides the rungs into halves, or into more parts if several splits may be asked for at
    /// once.
    fn first_that_fits(
        &mut self,
        ladder: &Ladder,
        open: Range<usize>,
    ) -> Result<usize, PlanError<E>> {
        let Range { mut start, mut end } = open;
        let mut open_end = end;
        let mut guesses = 0;
        while start < end {
            // Where the fewest items need least of all, and too much, nothing fits. A step that
            // fails with them may still do with more.
            if guesses == GUESSES_BEFORE_LEAST && end == open_end && end - start > 1 {
                match self.fits(ladder.split(end - 1)) {
                    Ok(true) => {
                        end -= 1;
                        open_end = end;
                    }
                    Ok(false) if self.least_is_that_of(ladder.split(end - 1)) => return Ok(end),
                    Ok(false) | Err(_) => {}
                }
            }
            // While nothing fits, misfits are a better guide than the middle.
            let is_open = end == open_end && guesses < GUESSES;
            let guess = if is_open { self.guess(ladder, start..end) } else { None };
            guesses += 1;
            let rungs = match guess {
                // The first guess knows one misfit, and its micro-batch is mostly too large.
                Some(guess) if guesses == 1 || guess == start => (guess..end).take(2).collect(),
                Some(guess) => vec![start + (guess - start) / 2, guess],
                None => parts(start..end, self.at_once),
            };
            let splits: Vec<Split> = rungs.iter().map(|rung| ladder.split(*rung)).collect();
            self.answers.ask(&splits)?;
            for (rung, split) in rungs.into_iter().zip(splits) {
                if self.fits(split)? {
                    end = rung;
                    break;
                }
                start = rung + 1;
            }
        }
        Ok(start)
    }

    /// Whether this misfit needs the least of all.
    fn least_is_that_of(&self, split: Split) -> bool {
        let misfits = || self.answers.misfits(self.budget);
        let least = misfits().map(|answer| answer.need.peak).min();
        misfits().any(|answer| answer.split == split && Some(answer.need.peak) == least)
    }

    /// Estimates the first rung that fits. `None` without any basis, or if only one split may be
    /// asked for at once.
    ///
    /// Draws a line through two misfits, the one with the least peak and the one with the most
    /// items, and follows it down to the budget. If that line does not grow, scales the latest
    /// misfit instead: its peak except [`Role::State`] grows with the number of items.
    fn guess(&self, ladder: &Ladder, open: Range<usize>) -> Option<usize> {
        let known = |answer: &&Answer| answer.need.peak != Bytes::MAX;
        let misfits = || self.answers.misfits(self.budget).filter(known);
        let items = |answer: &Answer| answer.split.largest().get() as f64;
        let peak = |answer: &Answer| answer.need.peak.get() as f64;
        let least = misfits().min_by_key(|answer| (answer.need.peak, answer.split.largest()))?;
        let largest = misfits().max_by_key(|answer| answer.split.largest())?;
        let growth = (peak(largest) - peak(least)) / (items(largest) - items(least));
        let (from, growth) = if growth > 0.0 && growth.is_finite() {
            (least, growth)
        } else {
            let latest = misfits().next_back()?;
            let state = latest.need.held_by(Role::State).get() as f64;
            if state == 0.0 {
                return None;
            }
            (latest, (peak(latest) - state) / items(latest))
        };
        let fitting = items(from) - (peak(from) - self.budget.get() as f64) / growth;
        let may_guess = self.at_once > 1 && !open.is_empty() && fitting > 0.0;
        may_guess.then(|| ladder.at_most(fitting.max(1.0) as usize).clamp(open.start, open.end - 1))
    }

    fn fits(&mut self, split: Split) -> Result<bool, PlanError<E>> {
        self.answers.fits(split, self.budget)
    }

    /// The error of a search that ended at one item.
    fn one_item_does_not_fit(&self) -> DoesNotFit {
        let one = self.answers.single_item_misfit(self.budget);
        let Answer { split, need } =
            one.expect("every search asks for one item before it gives up");
        DoesNotFit {
            batch: Items::new(self.batch),
            budget: self.budget,
            accumulating: split.accumulating(),
            need: need.clone(),
        }
    }
}

/// Up to `count` of the `open` rungs, in order, that divide them evenly. With a count of one, the
/// middle.
fn parts(open: Range<usize>, count: usize) -> Vec<usize> {
    let length = open.end - open.start;
    let cut =
        |part: usize| open.start + (length as u128 * part as u128 / (count as u128 + 1)) as usize;
    let mut rungs: Vec<usize> = (1..=count).map(cut).collect();
    rungs.dedup();
    rungs
}

/// The rungs to verify, in order, after the search of the `open` rungs has led to `found`.
///
/// First `found` and its neighbours, then rungs at growing distances, finally the rung with single
/// items. If not even that rung fits (`found` is the end of `open`): the rung itself, then its
/// neighbours with a few more items.
fn rungs_to_settle(open: Range<usize>, found: usize) -> Vec<usize> {
    let Range { start, end } = open;
    if found >= end {
        let first = end.saturating_sub(1 + NEIGHBOURS).max(start);
        return (first..end).rev().collect();
    }
    let near = found..=found + NEIGHBOURS;
    let far = (1..usize::BITS).map(|power| found.saturating_add(NEIGHBOURS << power));
    near.chain(far).take_while(|rung| *rung < end - 1).chain([end - 1]).collect()
}
