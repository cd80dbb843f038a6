//! Plans batches: which split fits, by a rule through the needs of a few small steps.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::train::{Learner, LearnerModel, TrainStep};
use firebox_batch::MicroBatch;
use firebox_plan::{Need, Plan, PlanOptions, Role, Split, plan};
use firebox_trace::{Bytes, Items};

use crate::error::TrainError;
use crate::gauge::Gauge;
use crate::rehearsal::{Update, micro_steps, update};

/// The smallest size of micro-batches that is rehearsed, and how much larger the next one is. What
/// few items need is hidden by what does not depend on them.
const SMALLEST: usize = 2;
const GROWTH: usize = 4;

/// A plan, and how it was made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanReport {
    /// The split, and the predicted peak.
    pub plan: Plan,
    /// What training may take.
    pub budget: Bytes,
    /// What is held next to a step: parameters, the batch, and from the second step on the
    /// optimizer's state.
    pub held: Bytes,
    /// The numbers of items for which small steps were taken.
    pub rehearsed: Vec<usize>,
    /// How long planning took.
    pub time: Duration,
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, budget, rehearsed, time, .. } = self;
        write!(
            f,
            "{plan}: {} of {budget} predicted, by small steps on {rehearsed:?} items in {time:.1?}",
            plan.peak()
        )
    }
}

/// The needs of iterations, and the plans made of them.
pub(crate) struct Planner {
    gauge: Gauge,
    budget: Bytes,
    /// What was held when training began, and what of it belongs to training: the parameters.
    before: Bytes,
    parameters: Bytes,
    /// What micro-steps on so many items added, measured.
    measured: BTreeMap<usize, Bytes>,
    /// What updates add. The optimizer's state is part of what is held once one has run.
    update: Update,
    has_run: bool,
    plans: BTreeMap<usize, Plan>,
    /// The most that was predicted, and that a step was measured to take.
    pub(crate) predicted: Bytes,
    pub(crate) peak: Bytes,
}

impl Planner {
    pub(crate) fn new(gauge: Gauge, budget: Bytes, parameters: Bytes) -> Self {
        Self {
            gauge,
            budget,
            before: gauge.live(),
            parameters,
            measured: BTreeMap::new(),
            update: Update::default(),
            has_run: false,
            plans: BTreeMap::new(),
            predicted: Bytes::ZERO,
            peak: Bytes::ZERO,
        }
    }

    pub(crate) fn gauge(&self) -> Gauge {
        self.gauge
    }

    /// What training holds now.
    fn held(&self) -> Bytes {
        self.parameters + (self.gauge.live() - self.before)
    }

    /// The plan for a batch of `items` items, with a report if it is new.
    ///
    /// # Errors
    ///
    /// If one item does not fit.
    pub(crate) fn plan<M>(
        &mut self,
        learner: &Learner<M>,
        batch: &<M as TrainStep>::Input,
        items: usize,
    ) -> Result<(Plan, Option<PlanReport>), TrainError>
    where
        M: LearnerModel,
        <M as TrainStep>::Input: MicroBatch,
    {
        if let Some(plan) = self.plans.get(&items) {
            return Ok((plan.clone(), None));
        }
        let begin = Instant::now();
        let mut rehearsed = Vec::new();
        let halves = |size: usize| -> Vec<Range<usize>> {
            let parts = [0..size, size..(2 * size).min(items)];
            parts.into_iter().filter(|part| !part.is_empty()).collect()
        };
        if self.measured.is_empty() {
            let smallest = SMALLEST.min(items);
            // Threads start, and keep buffers, in the first step of a process.
            micro_steps(learner, batch, &halves(smallest), self.gauge);
            self.update = update(learner, batch, &halves(smallest), self.gauge);
        }
        // From few items to many, as far as they are predicted to fit.
        let mut size = SMALLEST.min(items);
        let (plan, held) = loop {
            let is_known = self.measured.contains_key(&size);
            if !is_known {
                let added = micro_steps(learner, batch, &halves(size), self.gauge);
                log::debug!("micro-batches of {size} items add {added}");
                self.measured.insert(size, added);
                rehearsed.push(size);
            }
            let held = self.held();
            let planned = self.search(items, held)?;
            let wanted = planned.largest().get();
            size = wanted.min(size.saturating_mul(GROWTH));
            if self.measured.range(size..).next().is_some() {
                break (planned, held);
            }
        };
        self.predicted = self.predicted.max(plan.peak());
        self.plans.insert(items, plan.clone());
        let (budget, time) = (self.budget, begin.elapsed());
        Ok((plan.clone(), Some(PlanReport { plan, budget, held, rehearsed, time })))
    }

    /// The fewest micro-batches that fit next to what is held.
    fn search(&self, items: usize, held: Bytes) -> Result<Plan, TrainError> {
        let need = |split: Split| {
            let added = self.added(split.largest().get());
            let need = Need::heuristic(held + added);
            Ok::<_, Infallible>(
                need.holding("parameters, optimizer state and the batch", Role::State, held)
                    .holding("activations and gradients", Role::Activations, added),
            )
        };
        let found = plan(Items::new(items), self.budget, &PlanOptions::new(), need);
        found.map_err(|error| TrainError::DoesNotFit(error.into()))
    }

    /// What an iteration on micro-batches of `items` items adds: micro-steps next to the
    /// optimizer's state, or an update. With a margin for what no measurement has shown.
    fn added(&self, items: usize) -> Bytes {
        let state = if self.has_run { self.update.state } else { Bytes::ZERO };
        let added = (self.on_line(items) + self.update.state).max(self.update.added) - state;
        match self.gauge.is_exact() {
            true => added.scale(1.02) + Bytes::kib(64),
            false => added.scale(1.1) + Bytes::mib(8),
        }
    }

    /// What micro-steps on `items` items add: as measured, or on the steepest line through any two
    /// neighbours.
    fn on_line(&self, items: usize) -> Bytes {
        let points: Vec<(usize, Bytes)> = self.measured.iter().map(|(n, b)| (*n, *b)).collect();
        let slopes = points.windows(2).map(|pair| {
            let [(few, less), (many, more)] = pair else { return 0.0 };
            (*more - *less).get() as f64 / (many - few) as f64
        });
        let steepest = slopes.fold(0.0, f64::max);
        match points.iter().rev().find(|(measured, _)| *measured <= items).or(points.first()) {
            Some((measured, bytes)) if *measured <= items => {
                *bytes + Bytes::new((steepest * (items - measured) as f64) as u64)
            }
            Some((_, bytes)) => *bytes,
            None => Bytes::ZERO,
        }
    }

    /// Notes what an iteration took. If it is more than predicted, batches are planned anew.
    pub(crate) fn note(&mut self, plan: &Plan, before: Bytes, peak: Bytes) -> Option<Bytes> {
        let taken = self.parameters + (peak - self.before);
        self.peak = self.peak.max(taken);
        self.has_run = true;
        if taken <= self.predicted {
            return None;
        }
        let known = self.measured.entry(plan.largest().get()).or_default();
        *known = (*known).max(peak - before);
        self.plans.clear();
        self.predicted = taken;
        Some(taken)
    }

    pub(crate) fn budget(&self) -> Bytes {
        self.budget
    }

    /// The most items of a micro-batch in any plan. `None` before the first.
    pub(crate) fn largest(&self) -> Option<usize> {
        self.plans.values().map(|plan| plan.largest().get()).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planner(budget: Bytes, measured: &[(usize, Bytes)]) -> Planner {
        let mut planner = Planner::new(Gauge::Heap, budget, Bytes::ZERO);
        planner.measured = measured.iter().copied().collect();
        planner
    }

    #[test]
    fn needs_lie_on_the_steepest_line() {
        let mib = Bytes::mib;
        let planner = planner(mib(100), &[(2, mib(6)), (4, mib(8)), (8, mib(14))]);
        let close = |found: Bytes, wanted: f64| {
            let found = found.get() as f64 / f64::from(1 << 20);
            assert!((found - wanted * 1.02 - 0.0625).abs() < 0.01, "{found} is not {wanted}");
        };
        close(planner.added(8), 14.0);
        close(planner.added(16), 26.0);
        close(planner.added(5), 9.5);
        close(planner.added(1), 6.0);
    }

    #[test]
    fn the_fewest_micro_batches_that_fit_are_taken() {
        let mib = Bytes::mib;
        let measured = [(2, mib(12)), (4, mib(14)), (8, mib(18))];
        let split = |budget| planner(mib(budget), &measured).search(100, Bytes::ZERO);
        assert_eq!(split(200).expect("it fits").to_string(), "100 = 1 x 100");
        assert_eq!(split(40).expect("it fits").len(), 4);
        let error = split(8).expect_err("nothing fits").to_string();
        assert!(error.contains("one item needs"), "{error}");
    }

    #[test]
    fn what_was_measured_replaces_what_was_predicted() {
        let mib = Bytes::mib;
        let mut planner = planner(mib(60), &[(2, mib(12)), (4, mib(14)), (8, mib(18))]);
        let plan = planner.search(100, Bytes::ZERO).expect("it fits");
        planner.predicted = plan.peak();
        let before = planner.before;
        assert_eq!(planner.note(&plan, before, before + mib(1)), None);
        assert!(planner.note(&plan, before, before + mib(90)).is_some());
        assert!(planner.search(100, Bytes::ZERO).expect("it fits").len() > plan.len());
    }
}
