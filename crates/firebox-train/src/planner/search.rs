//! The search for one plan: rehearses ways to cut a batch until the planner has found the fewest
//! micro-batches that fit.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use firebox_lazy::{RecordError, Recorder, Rehearsal};
use firebox_plan::{Need, Plan, PlanError, PlanOptions, Probing, Sizing, Split, plan_at_once};
use firebox_trace::{Bytes, Items};

use super::assess::{assess_all, failed, need_of};
use super::{AT_ONCE, Planner, PlanningCost};
use crate::error::{Phase, TrainError};
use crate::planner::rehearsal::{Conditions, Rehearsed, assess};

impl Planner {
    /// Searches for a plan for batches of `items` items, after what has run. The pages of what has
    /// run stay open or are given back.
    ///
    /// The first search allows no read inside a rehearsal. A model that reads values is detected
    /// this way before any part of a large batch has run. It is then planned from one item upwards.
    pub(super) fn search(
        &mut self,
        phase: Phase,
        items: usize,
        gives_back: bool,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &Recorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<(Plan, Rehearsed), TrainError> {
        let budget = self.budget.scale(self.share);
        let (plan, mut rehearsals) = loop {
            let reads = self.reads;
            let recorder = self.recorder(budget);
            let conditions = self.conditions(phase, budget, gives_back);
            let probing = if reads { Probing::FromOne } else { Probing::FromWhole };
            let options = PlanOptions::new().sizing(self.sizing).probing(probing);
            let options = options.cliffs(self.cliffs);
            // On the host, a footprint is computed faster than the step is recorded. With reads, a
            // rehearsal takes the memory that it measures.
            let alone = reads || self.memory.is_on_host();
            let options = options.at_once(if alone { 1 } else { AT_ONCE });
            let mut rehearsals: HashMap<Split, Rehearsed> = HashMap::new();
            let mut too_long = None;
            let result = plan_at_once(Items::new(items), budget, &options, |splits| {
                cost.rehearsals += splits.len();
                let assessed = assess_all(splits, |split| rehearse(split, &recorder), &conditions);
                let needs = splits.iter().zip(assessed).map(|(split, assessed)| match assessed {
                    Ok(rehearsed) => {
                        cost.operations += rehearsed.operations;
                        self.rehearsed.fetch_max(rehearsed.planning.get(), Relaxed);
                        let need = need_of(&rehearsed);
                        rehearsals.insert(*split, rehearsed);
                        Ok(need)
                    }
                    // The recording of a smaller micro-batch may be shorter.
                    Err(error @ TrainError::Record(RecordError::TooLong { needed, .. })) => {
                        too_long = Some(error);
                        Ok(Need::heuristic(needed))
                    }
                    // The operations before the read are already too large.
                    Err(TrainError::Record(RecordError::ReadTooLarge { needed, .. })) if reads => {
                        Ok(Need::heuristic(needed))
                    }
                    Err(error) => Err(error),
                });
                needs.collect()
            });
            match result {
                Err(PlanError::Footprint {
                    cause: TrainError::Record(RecordError::ReadTooLarge { .. }),
                    ..
                }) if !reads => self.reads = true,
                Err(cause) => return Err(too_long.unwrap_or_else(|| failed(phase, cause))),
                Ok(plan) => break (plan, rehearsals),
            }
        };
        let rehearsed = rehearsals.remove(&plan.split()).expect("what is planned was rehearsed");
        Ok((plan, rehearsed))
    }

    /// Whether a split fits once the pages of earlier plans are given back.
    pub(super) fn fits_given_back(
        &self,
        phase: Phase,
        split: Split,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &Recorder) -> Result<Rehearsal, TrainError>,
    ) -> bool {
        let budget = self.budget.scale(self.share);
        cost.rehearsals += 1;
        // A failure in this rehearsal does not stop training, because the rehearsal was not needed.
        let Ok(rehearsal) = rehearse(split, &self.recorder(budget)) else { return false };
        let rehearsed = assess(rehearsal, &self.conditions(phase, budget, true));
        cost.operations += rehearsed.operations;
        rehearsed.footprint.peak <= budget
    }

    fn conditions(&self, phase: Phase, budget: Bytes, gives_back: bool) -> Conditions<'_> {
        let idle_state = match phase {
            Phase::Training => &[],
            Phase::Validation => self.optimizer_state.as_slice(),
        };
        let before = self.ran.iter().map(|(_, trace)| trace.as_ref()).collect();
        let memory = self.memory.as_ref();
        let kept = self.kept();
        Conditions {
            memory,
            budget,
            before,
            gives_back,
            overhead: &self.overhead,
            idle_state,
            kept,
        }
    }
}

/// Whether a batch planned after others may run in fewer steps once their pages are given back.
/// `fits` tells which splits fit then.
///
/// Tries the next larger split that was not found to fit with those pages. If that split has two
/// sizes, also tries the next one of a single size, because two sizes may need more than a larger
/// single one.
pub(super) fn may_run_in_fewer_steps(
    plan: &Plan,
    sizing: Sizing,
    fits: impl FnMut(Split) -> bool,
) -> bool {
    let does_fit = |split: &Split| {
        plan.asked().iter().any(|asked| asked.split == *split && asked.need.peak <= plan.budget())
    };
    let is_chosen = matches!(sizing, Sizing::Fixed(_));
    let mut fewer = plan.with_fewer_steps(sizing).filter(|split| !is_chosen && !does_fit(split));
    let next = fewer.next();
    let even = next.filter(Split::is_uneven).and_then(|_| fewer.find(|split| !split.is_uneven()));
    next.into_iter().chain(even).any(fits)
}
