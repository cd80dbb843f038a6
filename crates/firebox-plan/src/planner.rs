//! The planner: from a batch, a budget and a function that knows footprints to a plan.
//!
//! The question is the same for every sizing: how far down a ladder of splits, each with more steps than the one
//! before, must one go until the micro-batches fit? The search halves the ladder as if footprints grew with size, and
//! then makes sure of the rung that it found, walking on where a footprint is out of line.

use std::ops::Range;

use firebox_trace::{Bytes, Items};

use crate::answers::Answers;
use crate::checker;
use crate::error::{DoesNotFit, FixedDoesNotFit, PlanError};
use crate::ladder::Ladder;
use crate::need::{Accumulating, Need, Role};
use crate::options::{Cliffs, PlanOptions, Probing, Sizing};
use crate::outcome::{Answer, Plan};
use crate::split::Split;

/// How many rungs next to the one that the search found are tried one by one when it fails.
const NEIGHBOURS: usize = 4;

/// How many times the rung is guessed from which on micro-batches fit, before the search is by parts.
const GUESSES: usize = 3;

/// Decides in how many pieces `batch` is run so that each fits `budget`.
///
/// `footprint_of` tells what an iteration needs that is cut like this; it is asked at most once for each [`Split`]. A split
/// fits if its peak is not above the budget. Where the largest micro-batch decides, as on a heap that is not paged, that of
/// [`Split::largest`] is the answer.
///
/// # What is guaranteed
/// For any footprints: the plan covers the batch exactly once and in order, follows the sizing, and was asked for and fits. [`PlanError::DoesNotFit`] means that one item was asked for and does not fit; so there is a
/// plan whenever one item fits, unless the size is fixed.
///
/// For footprints that grow with size (and are larger when accumulating): a batch that fits whole is not split, and no
/// plan with fewer steps fits under the same sizing.
///
/// For footprints where a larger size may need less, fewer steps than those found may be possible, and where one item
/// does not fit, only a few of the next larger sizes are tried. With [`Cliffs::Avoid`] there may be more steps than the
/// fewest: splits down to a tenth below the one that was found are asked for, until one needs a fifth less. With
/// [`Probing::FromOne`] nothing above the first size that does not fit is tried.
///
/// # How often it asks
/// With footprints that grow with size, for a batch of `n` items: at most `log2(n) / 2 + 4` times from the whole
/// downwards (10 for 5,000 items) and `1.5 * log2(n) + 6` times from one item upwards. With any footprints, and when
/// nothing fits: at most `3 * log2(n) + 16` times.
///
/// # Errors
/// A batch without items, a budget of zero, a fixed size of zero; one item, or the fixed size, exceeds the budget;
/// `footprint_of` failed, other than at a size that only [`Cliffs::Avoid`] asks for.
///
/// # Panics
/// In debug builds, if the independent checker finds the plan wrong, which would be a bug of the planner.
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
/// assert_eq!(plan(batch, Bytes::mib(60), &options, footprint)?.to_string(), "100 = 3 x 32 + 1 x 4");
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
    // A later question may be needless once an earlier one has failed.
    let options = options.at_once(1);
    plan_at_once(batch, budget, &options, |splits| {
        splits.iter().map(|split| footprint_of(*split)).collect()
    })
}

/// Plans as [`plan`] does, with up to [`PlanOptions::at_once`] splits asked for by one call, which may find out about them in
/// parallel. `footprints_of` answers all questions, in their order.
///
/// With more than one at once two next to each other are asked for first, guessed from what the whole batch
/// [holds](Need::holding), and guessed again twice at the most while neither fits, from how misfits differ; then the search is
/// not by halves but by as many parts. More splits are asked for in all, by fewer calls.
///
/// # Errors
/// As [`plan`].
///
/// # Panics
/// As [`plan`], and if an answer is missing.
///
/// ```
/// use firebox_plan::{Need, PlanOptions, Split, plan_at_once};
/// use firebox_trace::{Bytes, Items};
///
/// let mut calls = 0;
/// let footprints = |splits: &[Split]| {
///     calls += 1;
///     let need = |items: Items| Need::exact(Bytes::mib(20) + Bytes::mib(1) * items.get() as u64);
///     splits.iter().map(|split| Ok::<_, std::convert::Infallible>(need(split.largest()))).collect()
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
        cliffs: options.cliffs,
        // From one item upwards each size follows from the one before.
        at_once: if options.probing == Probing::FromOne { 1 } else { options.at_once.max(1) },
        answers: Answers::new(footprints_of),
    };
    let split = match options.sizing {
        Sizing::Even => search.fewest_steps(&Ladder::even(batch.get()))?,
        Sizing::PowersOfTwo => search.fewest_steps(&Ladder::powers_of_two(batch.get()))?,
        Sizing::Fixed(size) => search.fixed(size.get())?,
    };
    let plan = Plan::new(batch, budget, split, search.answers.into_known());
    if cfg!(debug_assertions) {
        verify(&plan, options.sizing);
    }
    Ok(plan)
}

/// One search: what it looks for, and what it knows so far.
struct Search<F> {
    batch: usize,
    budget: Bytes,
    probing: Probing,
    cliffs: Cliffs,
    at_once: usize,
    answers: Answers<F>,
}

impl<F, E> Search<F>
where
    F: FnMut(&[Split]) -> Vec<Result<Need, E>>,
{
    /// The whole batch if it fits, or the first rung of the ladder that does.
    fn fewest_steps(&mut self, ladder: &Ladder) -> Result<Split, PlanError<E>> {
        let whole = Split::whole(self.batch);
        let Some(open) = self.approach(whole, ladder)? else { return Ok(whole) };
        let found = self.first_that_fits(ladder, open.clone())?;
        for rung in rungs_to_settle(open, found) {
            let split = ladder.split(rung);
            if self.fits(split)? {
                return match self.cliffs {
                    Cliffs::Ignore => Ok(split),
                    Cliffs::Avoid => Ok(self.below_cliff(ladder, rung)),
                };
            }
        }
        Err(PlanError::DoesNotFit(self.one_item_does_not_fit()))
    }

    /// The split of a rung that fits, or the first below it that is slightly smaller and needs far less.
    fn below_cliff(&mut self, ladder: &Ladder, rung: usize) -> Split {
        let (size, peak) = (ladder.size(rung), self.peak(ladder.split(rung)));
        let least = (size as f64 * (1.0 - Cliffs::SLIGHTLY)).ceil() as usize;
        let enough = peak.scale(1.0 - Cliffs::FAR_LESS);
        let slightly = (rung + 1..ladder.len()).take_while(|lower| ladder.size(*lower) >= least);
        let splits: Vec<Split> = slightly.map(|lower| ladder.split(lower)).collect();
        for splits in splits.chunks(self.at_once) {
            // What goes wrong at a size that nobody needs is no reason to give up the one that fits.
            if self.at_once > 1 {
                let _ = self.answers.ask(splits);
            }
            for split in splits {
                if self.fits(*split).unwrap_or(false) && self.peak(*split) <= enough {
                    return *split;
                }
            }
        }
        ladder.split(rung)
    }

    /// What a split needs that has been asked for.
    fn peak(&self, split: Split) -> Bytes {
        self.answers.known(split).map_or(Bytes::ZERO, |answer| answer.need.peak)
    }

    /// Micro-batches of `size` items, verified.
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
                    fitting: Items::new(smaller.size(found)),
                })))
            }
            _ => Err(PlanError::DoesNotFit(self.one_item_does_not_fit())),
        }
    }

    /// Tries whether `goal` fits, in the order that the probing asks for. If it does not, returns the rungs of the ladder below
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

    /// Climbs from one item to the first rung, each size at most twice the one before. Returns the rung whose size
    /// did not fit. Where the goal is not split, sizes are asked for as batches of their own.
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

    /// The first of the `open` rungs that fits, found by halving, or by as many parts as may be asked for at once; the end of
    /// `open` if that found none.
    fn first_that_fits(
        &mut self,
        ladder: &Ladder,
        open: Range<usize>,
    ) -> Result<usize, PlanError<E>> {
        let Range { mut start, mut end } = open;
        let open_end = end;
        let mut guesses = 0;
        while start < end {
            // As long as nothing fits, misfits tell more than the middle.
            let is_open = end == open_end && guesses < GUESSES;
            let guess = if is_open { self.guess(ladder, start..end) } else { None };
            guesses += 1;
            let rungs = match guess {
                Some(guess) => (guess..end).take(2).collect(),
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

    /// The rung at which footprints would reach the budget, where several sizes can be asked for at once and something is known:
    /// on a line through the misfit of the least peak and that of the most items, or, if that tells nothing, where all but the
    /// state of the latest one would have grown with the items.
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

/// Up to `count` of the `open` rungs, in order, that cut them into even parts. With one it is the middle.
fn parts(open: Range<usize>, count: usize) -> Vec<usize> {
    let length = open.end - open.start;
    let cut =
        |part: usize| open.start + (length as u128 * part as u128 / (count as u128 + 1)) as usize;
    let mut rungs: Vec<usize> = (1..=count).map(cut).collect();
    rungs.dedup();
    rungs
}

/// The rungs to make sure of, in order, when halving the `open` ones has led to `found`.
///
/// First the one found and its neighbours, then ever farther ones, last of all the one with single items. When even
/// that one does not fit, its neighbours with a few items more.
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

/// Has the checker look at a plan, by the footprints that are already known.
fn verify(plan: &Plan, sizing: Sizing) {
    let ranges: Vec<_> = plan.ranges().collect();
    let verdict = checker::check(plan.batch(), plan.budget(), sizing, &ranges, |sizes| {
        let is_asked = |answer: &&Answer| answer.split.sizes().eq(sizes.iter().copied());
        plan.asked().iter().find(is_asked).map(|answer| answer.need.peak)
    });
    if let Err(violation) = verdict {
        panic!("the planner made a wrong plan, {plan}: {violation}");
    }
}
