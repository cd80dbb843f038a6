//! Properties that hold for every batch, budget and footprint. Thousands of random cases are judged
//! by the independent checker and by brute force.

mod checker;

use std::collections::HashSet;
use std::convert::Infallible;

use firebox_plan::checker::check;
use firebox_plan::{
    Accumulating, Need, Plan, PlanError, PlanOptions, Probing, Role, Sizing, Split, plan,
    plan_at_once,
};
use firebox_trace::{Bytes, Items};
use proptest::prelude::*;

use crate::checker::judged;

/// A footprint in bytes.
#[derive(Clone, Debug)]
enum Footprint {
    /// Never smaller for more items, and never smaller when accumulating.
    Growing {
        fixed: u64,
        item: u64,
        /// Rounds up to whole pages, so neighbouring sizes need the same.
        page: u64,
        /// Each adds bytes from a number of items upwards.
        jumps: Vec<(usize, u64)>,
        sum: u64,
    },
    /// A random number for each size, added to a slope that may be flat.
    Ragged { seed: u64, item: u64, noise: u64, sum: u64 },
}

impl Footprint {
    fn peak(&self, items: usize, accumulating: Accumulating) -> Bytes {
        let held = |sum: u64| {
            if accumulating == Accumulating::Yes { sum } else { 0 }
        };
        Bytes::new(match self {
            Self::Growing { fixed, item, page, jumps, sum } => {
                let jumped = jumps.iter().filter(|(from, _)| *from <= items).map(|(_, more)| more);
                let bytes = fixed + item * items as u64 + jumped.sum::<u64>();
                bytes.next_multiple_of(*page) + held(*sum)
            }
            Self::Ragged { seed, item, noise, sum } => {
                item * items as u64 + scramble(*seed ^ items as u64) % noise + held(*sum)
            }
        })
    }
}

impl Footprint {
    /// The peak of an iteration over micro-batches of these sizes: the largest single peak. A
    /// ragged footprint adds noise for each pair of different sizes.
    fn of(&self, sizes: impl IntoIterator<Item = Items>) -> Bytes {
        let sizes: Vec<usize> = sizes.into_iter().map(Items::get).collect();
        let mode = if sizes.len() > 1 { Accumulating::Yes } else { Accumulating::No };
        let (first, last) = (sizes[0], sizes[sizes.len() - 1]);
        let mixed = match self {
            Self::Ragged { seed, noise, .. } if first != last => {
                Bytes::new(scramble(*seed ^ (first * last) as u64) % noise)
            }
            _ => Bytes::ZERO,
        };
        self.peak(first, mode).max(self.peak(last, mode)) + mixed
    }
}

/// The finalizer of SplitMix64. Maps neighbouring numbers to unrelated ones.
fn scramble(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn growing() -> impl Strategy<Value = Footprint> {
    let jumps = prop::collection::vec((1..5000usize, 0..200_000u64), 0..5);
    (0..50_000u64, 0..200u64, prop_oneof![Just(1u64), 1..20_000u64], jumps, 0..20_000u64).prop_map(
        |(fixed, item, page, jumps, sum)| Footprint::Growing { fixed, item, page, jumps, sum },
    )
}

fn ragged() -> impl Strategy<Value = Footprint> {
    (any::<u64>(), 0..200u64, 1..100_000u64, 0..20_000u64)
        .prop_map(|(seed, item, noise, sum)| Footprint::Ragged { seed, item, noise, sum })
}

/// A batch of 1 to 5,000 items. Half of the batches have fewer than 40.
fn batch() -> impl Strategy<Value = usize> {
    prop_oneof![1..40usize, 1..5000usize]
}

fn options() -> impl Strategy<Value = PlanOptions> {
    let sizing = prop_oneof![
        3 => Just(Sizing::Even),
        1 => Just(Sizing::PowersOfTwo),
        1 => Just(Sizing::Whole),
        1 => (1..5000usize).prop_map(|size| Sizing::Fixed(Items::new(size))),
        1 => (1..40usize).prop_map(|size| Sizing::Fixed(Items::new(size))),
    ];
    let probing = prop_oneof![Just(Probing::FromWhole), Just(Probing::FromOne)];
    let at_once = prop_oneof![1 => Just(1usize), 1 => 2..6usize];
    (sizing, probing, at_once).prop_map(|(sizing, probing, at_once)| {
        PlanOptions::new().sizing(sizing).probing(probing).at_once(at_once)
    })
}

/// One planning problem and the planner's result.
struct Case {
    batch: usize,
    budget: Bytes,
    options: PlanOptions,
    footprint: Footprint,
    asked: Vec<Split>,
    calls: usize,
    found: Result<Plan, PlanError<Infallible>>,
}

impl Case {
    /// `share` places the budget between the footprints of one item and of the whole batch, or
    /// slightly outside.
    fn new(batch: usize, share: f64, options: PlanOptions, footprint: Footprint) -> Self {
        let one = footprint.peak(1, Accumulating::Yes);
        let whole = footprint.peak(batch, Accumulating::No);
        let (low, high) = (one.min(whole), one.max(whole));
        let budget = (low + (high - low).scale(share)).scale(0.9 + 0.2 * share) + Bytes::new(1);
        let (mut asked, mut calls) = (Vec::new(), 0);
        // Half of what one item needs counts as state, so the first guess is sometimes wrong.
        let state = one.scale(0.5);
        let found = plan_at_once(Items::new(batch), budget, &options, |questions| {
            asked.extend(questions);
            calls += 1;
            assert!((1..=options.at_once).contains(&questions.len()));
            let needs = questions.iter().map(|split| {
                let peak = footprint.of(split.sizes());
                Ok(Need::exact(peak).holding("state", Role::State, state))
            });
            needs.collect()
        });
        Self { batch, budget, options, footprint, asked, calls, found }
    }

    fn fits(&self, items: usize, accumulating: Accumulating) -> bool {
        self.footprint.peak(items, accumulating) <= self.budget
    }

    /// The checker's verdict, based on the planner's own questions or on all footprints.
    fn verdict(&self, plan: &Plan, all_known: bool) -> Result<(), String> {
        let ranges: Vec<_> = plan.ranges().collect();
        let (batch, sizing) = (Items::new(self.batch), self.options.sizing);
        check(batch, self.budget, sizing, &ranges, |sizes| {
            let sizes = || sizes.iter().copied();
            let known = all_known || self.asked.iter().any(|split| split.sizes().eq(sizes()));
            known.then(|| self.footprint.of(sizes()))
        })
    }

    /// The fewest steps under the sizing, by brute force. `None` if nothing fits.
    fn fewest_steps(&self) -> Option<usize> {
        use Accumulating::{No, Yes};
        let batch = self.batch;
        match self.options.sizing {
            Sizing::Fixed(size) if size.get() < batch => {
                let rest = batch % size.get();
                let fits = self.fits(size.get(), Yes) && (rest == 0 || self.fits(rest, Yes));
                fits.then(|| batch.div_ceil(size.get()))
            }
            _ if self.fits(batch, No) => Some(1),
            Sizing::Whole => None,
            Sizing::Even => (2..=batch).find(|steps| {
                self.fits(batch.div_ceil(*steps), Yes) && self.fits(batch / steps, Yes)
            }),
            Sizing::PowersOfTwo => (0..usize::BITS)
                .map(|power| 1 << power)
                .take_while(|size| *size < batch && self.fits(*size, Yes))
                .last()
                .map(|size: usize| batch.div_ceil(size)),
            _ => None,
        }
    }

    /// Checks what must hold for any footprints.
    fn check_always(&self) -> Result<(), TestCaseError> {
        let distinct: HashSet<Split> = self.asked.iter().copied().collect();
        prop_assert_eq!(distinct.len(), self.asked.len(), "asked twice");
        let log = (self.batch as f64).log2();
        prop_assert!(self.calls as f64 <= 3.0 * log + 16.0, "asked {:?}", self.asked);
        if self.options.probing == Probing::FromOne {
            self.check_small_steps()?;
        }
        match &self.found {
            Ok(plan) => {
                let all_known = self.options.probing == Probing::FromWhole;
                prop_assert_eq!(self.verdict(plan, all_known), Ok(()));
                prop_assert_eq!(plan.peak(), self.footprint.of(plan.sizes()));
                let told: Vec<_> = plan.asked().iter().map(|answer| answer.split).collect();
                prop_assert_eq!(&told, &self.asked);
            }
            Err(PlanError::DoesNotFit(error)) => {
                prop_assert!(!self.fits(1, error.accumulating));
                prop_assert_eq!(error.need.peak, self.footprint.peak(1, error.accumulating));
            }
            Err(PlanError::FixedDoesNotFit(error)) => {
                prop_assert!(self.footprint.of(error.misfit.split.sizes()) > self.budget);
                prop_assert!(error.misfit.split.largest() <= error.size);
                prop_assert_eq!(error.fitting.is_none(), self.options.sizing == Sizing::Whole);
                if let Some(fitting) = error.fitting {
                    let is_fitting = |split: &&Split| split.largest() == fitting;
                    let asked = self.asked.iter().find(is_fitting).map(|split| split.sizes());
                    let fits = |sizes| self.footprint.of(sizes) <= self.budget;
                    prop_assert!(asked.is_some_and(fits));
                    prop_assert!(fitting < error.size);
                }
            }
            Err(error) => prop_assert!(false, "unexpected: {error}"),
        }
        Ok(())
    }

    /// Checks that no size is more than twice the largest known to fit. One item is always allowed.
    fn check_small_steps(&self) -> Result<(), TestCaseError> {
        let mut fitting = 0;
        for split in &self.asked {
            let items = split.largest().get();
            prop_assert!(items <= (2 * fitting).max(1), "{items} asked after {fitting}");
            if self.footprint.of(split.sizes()) <= self.budget {
                fitting = fitting.max(items);
            }
        }
        Ok(())
    }

    /// Checks what must hold in addition if footprints grow with size.
    fn check_growing(&self) -> Result<(), TestCaseError> {
        let steps = self.found.as_ref().ok().map(Plan::len);
        prop_assert_eq!(steps, self.fewest_steps());
        let Ok(plan) = &self.found else { return Ok(()) };
        prop_assert_eq!(self.verdict(plan, true), Ok(()));
        let log = (self.batch as f64).log2();
        let most = match self.options.probing {
            Probing::FromOne => 1.5 * log + 6.0,
            // The first three calls may be spent on wrong guesses.
            _ if self.options.at_once > 1 => 0.5 * log + 7.0,
            _ => 0.5 * log + 4.0,
        };
        prop_assert!(self.calls as f64 <= most, "asked {:?}", self.asked);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn growing_footprints_give_the_fewest_steps(
        batch in batch(), share in 0.0..1.1f64, options in options(), footprint in growing(),
    ) {
        let case = Case::new(batch, share, options, footprint);
        case.check_always()?;
        case.check_growing()?;
    }

    #[test]
    fn ragged_footprints_give_valid_plans(
        batch in batch(), share in 0.0..1.1f64, options in options(), footprint in ragged(),
    ) {
        Case::new(batch, share, options, footprint).check_always()?;
    }
}

/// There is a plan whenever one item fits, however ragged the footprints are.
#[test]
fn single_items_are_the_last_resort() {
    for batch in 2..200 {
        let footprint = |split: Split| {
            let is_one = split.largest().get() == 1;
            Ok::<_, Infallible>(Need::exact(Bytes::new(if is_one { 1 } else { 2 })))
        };
        let plan = plan(Items::new(batch), Bytes::new(1), &PlanOptions::new(), footprint);
        assert_eq!(plan.map(|plan| judged(plan, Sizing::Even).len()), Ok(batch));
    }
}

/// The number of questions stays within the documented bound, for every batch and every largest
/// size that fits.
#[test]
fn the_number_of_questions_is_bounded() {
    for batch in (1..300).chain([511, 512, 513, 4095, 4096, 5000]) {
        for largest in (1..=batch).step_by(1 + batch / 300) {
            for (probing, factor, constant) in
                [(Probing::FromWhole, 0.5, 4.0), (Probing::FromOne, 1.5, 6.0)]
            {
                let mut asked = 0;
                let options = PlanOptions::new().probing(probing);
                let budget = Bytes::new(largest as u64);
                let plan = plan(Items::new(batch), budget, &options, |split| {
                    asked += 1;
                    Ok::<_, Infallible>(Need::exact(Bytes::new(split.largest().get() as u64)))
                });
                let steps = plan.map(|plan| judged(plan, Sizing::Even).len());
                assert_eq!(steps, Ok(batch.div_ceil(largest)));
                let most = factor * (batch as f64).log2() + constant;
                assert!(f64::from(asked) <= most, "{asked} of {most} for {largest} of {batch}");
            }
        }
    }
}
