//! Makes a plan: rehearses ways to cut a batch until the planner has found the fewest micro-batches
//! that fit.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use firebox_lazy::{RecordError, Rehearsal, StepRecorder, forget_calls};
use firebox_plan::{Need, Plan, PlanError, PlanOptions, Probing, Sizing, Split, plan_at_once};
use firebox_saved::InstantiateError;
use firebox_trace::{Bytes, Items};

use super::assess::{assess_all, failed, need_of};
use super::tuning::Tuning;
use super::{AT_ONCE, Planned, Planner, PlanningCost};
use crate::error::{Phase, TrainError};
use crate::iteration::pieces::JOINED;
use crate::planner::ledger::Left;
use crate::planner::parked::Parks;
use crate::planner::recorders::with_autodiff;
use crate::planner::rehearsal::Iterations;
use crate::planner::rehearsed::{Conditions, Rehearsed, assess};
use crate::planner::shape::Shape;
use crate::whole::Joining;

/// A batch to search a plan for.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    phase: Phase,
    items: usize,
    sizing: Sizing,
    /// The share of time that may be spent on recomputing, if any.
    pub(super) recompute: Option<f64>,
}

/// A plan, and the rehearsal of its split.
type Found = Result<(Plan, Rehearsed), TrainError>;

impl Planner {
    /// Makes the plan for batches of this shape. `rehearse` rehearses one split with a recorder.
    ///
    /// The split is searched without the outputs that are joined by default. If it also fits with
    /// them, they are `joining`: metrics do not cost a micro-batch.
    ///
    /// Where kernels are not chosen yet, the plan counts the candidates that need the most memory.
    /// Once the tuner has chosen, the batch is planned again, and the pages that tuning opened are
    /// given back.
    pub(super) fn plan(
        &mut self,
        (phase, shape): (Phase, Shape),
        iterations: Iterations,
        joining: Joining,
        mut rehearse: impl FnMut(Split, Joining, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<&Planned, TrainError> {
        let started = Instant::now();
        let mut cost = PlanningCost::default();
        let tuned = self.planned(phase, shape).filter(|planned| planned.tuning.is_over());
        let tuned = tuned.map(|planned| planned.plan.split());
        let mut apart =
            |split: Split, recorder: &StepRecorder| rehearse(split, Joining::Asked, recorder);
        // The pages of the plan that it replaces are not those of this one.
        self.plans.open = None;
        let found = match self.as_before(phase, shape, &mut cost, &mut apart) {
            Some(found) => Ok(found),
            None => self.find(phase, shape.items, &mut cost, &mut apart),
        };
        let found = found.map_err(|error| self.tell_of_parking(error, &mut apart));
        let planned = match found {
            Ok(found) => {
                let ((plan, rehearsed), joining) = match joining {
                    Joining::OfBurn => self.with_outputs(phase, found, &mut cost, &mut rehearse),
                    joining => (found, joining),
                };
                cost.time = started.elapsed();
                // Kernels that are still not chosen after the same split has run will never be.
                let may_tune = tuned != Some(plan.split());
                let planned =
                    self.adopt((phase, shape), plan, rehearsed, may_tune, (iterations, cost));
                Planned { joining, ..planned }
            }
            Err(cause) => Planned { iterations, ..self.planned_before(phase, shape, cause)? },
        };
        Ok(self.plans.made.entry((phase, shape)).insert_entry(planned).into_mut())
    }

    /// A plan that was found, with the outputs of burn's types joined if that fits, too.
    fn with_outputs(
        &self,
        phase: Phase,
        (plan, rehearsed): (Plan, Rehearsed),
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, Joining, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> ((Plan, Rehearsed), Joining) {
        if plan.is_whole() {
            return ((plan, rehearsed), Joining::OfBurn);
        }
        if plan.split().len() > JOINED && !self.memory.is_on_host() {
            return ((plan, rehearsed), Joining::NoRoom);
        }
        let most = self.choices.recompute.if_allowed().filter(|_| rehearsed.recomputed.is_some());
        let wanted = Wanted { recompute: most, ..self.wanted(phase, plan.batch().get()) };
        let mut joined =
            |split: Split, recorder: &StepRecorder| rehearse(split, Joining::OfBurn, recorder);
        let joined = self.rehearse_one(wanted, plan.split(), cost, &mut joined);
        let joined = joined.inspect_err(|error| log::warn!("outputs cannot be joined: {error}"));
        match joined.ok().and_then(|joined| Some((plan.needing(need_of(&joined))?, joined))) {
            Some(fits) => (fits, Joining::OfBurn),
            None => ((plan, rehearsed), Joining::NoRoom),
        }
    }

    /// Searches for a plan, and where the policy says so, for one that computes tensors again.
    fn find(
        &mut self,
        phase: Phase,
        items: usize,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Found {
        let found = self.search(self.wanted(phase, items), cost, rehearse);
        let most = self.choices.recompute.if_allowed().filter(|_| phase == Phase::Training);
        let Some(most) = most else { return found };
        let wanted = Wanted { recompute: Some(most), ..self.wanted(phase, items) };
        match &found {
            // What comes before a read has run when the rest is recorded.
            Err(TrainError::Plan { cause, .. }) if self.step.reads && does_not_fit(cause) => {
                log::warn!("nothing is recomputed, because the step reads values while it runs");
                found
            }
            Err(TrainError::Plan { cause, .. }) if does_not_fit(cause) => {
                self.search(wanted, cost, rehearse)
            }
            // A whole batch has the statistics of a whole batch.
            Ok((plan, recorded))
                if !self.step.reads && !plan.is_whole() && self.prefers_whole(recorded) =>
            {
                let whole = Wanted { sizing: Sizing::Whole, ..wanted };
                self.search(whole, cost, rehearse).or(found)
            }
            _ => found,
        }
    }

    /// Whether a split changes what the model computes, and the user has not asked for one.
    fn prefers_whole(&self, rehearsed: &Rehearsed) -> bool {
        let is_chosen = matches!(self.sizing(Phase::Training), Sizing::Fixed(_) | Sizing::Whole);
        let is_free = !is_chosen && !self.choices.splits_statistics;
        is_free && !rehearsed.of_step.running_state.is_empty()
    }

    /// A batch as it is recorded.
    pub(super) fn wanted(&self, phase: Phase, items: usize) -> Wanted {
        Wanted { phase, items, sizing: self.sizing(phase), recompute: None }
    }

    /// Takes over what a search has found.
    fn adopt(
        &mut self,
        key: (Phase, Shape),
        plan: Plan,
        rehearsed: Rehearsed,
        may_tune: bool,
        (iterations, cost): (Iterations, PlanningCost),
    ) -> Planned {
        self.room.take_rehearsals();
        // Most rehearsed sizes do not come again.
        forget_calls();
        if key.0 == Phase::Training {
            self.ledger.optimizer_state.clone_from(&rehearsed.state.on_device);
            self.ledger.parked.clone_from(&rehearsed.state.parked);
            if self.choices.parks != Parks::Does {
                rehearsed.of_step.left.iter().for_each(|left| self.ledger.note(left));
            }
            self.step.nonlinear =
                self.step.nonlinear.take().or(rehearsed.of_step.nonlinear.clone());
            self.step.running_state.extend(rehearsed.of_step.running_state.iter().cloned());
        }
        let tunes = rehearsed.footprint.paging.as_ref().is_some_and(|paging| paging.tunes);
        let state = self.ledger.total();
        if key.0 == Phase::Training && self.choices.parks != Parks::Does {
            let ratio = rehearsed.of_step.left.iter().map(Left::ratio).fold(0.0, f64::max);
            self.ledger.take_what_is_brought(ratio);
        }
        Planned {
            plan: plan.into(),
            joining: Joining::Asked,
            iterations,
            held: rehearsed.held,
            rehearsed,
            cost,
            again: None,
            kept: self.kept(),
            batch: self.plans.batch,
            making: Bytes::ZERO,
            state,
            leaves: Bytes::ZERO,
            standalone: Bytes::ZERO,
            tuning: Tuning::new(tunes && may_tune),
        }
    }

    /// The plan that batches of this shape have, if no other was found because of `cause`.
    ///
    /// A plan that ran for one batch may run for two. A plan whose micro-batches ran in parts may
    /// run that way again.
    fn planned_before(
        &self,
        phase: Phase,
        shape: Shape,
        cause: TrainError,
    ) -> Result<Planned, TrainError> {
        let small = Shape::of_items(shape.items);
        let ran = self.planned(phase, shape).or_else(|| self.planned(phase, small));
        let is_no_plan = matches!(
            cause,
            TrainError::Plan { .. } | TrainError::Record(RecordError::TooLong { .. })
        );
        // It is no longer known to fit where updates have left more.
        let fits = |ran: &&Planned| self.grown(ran) == Bytes::ZERO;
        let Some(ran) = ran.filter(fits).filter(|_| is_no_plan) else { return Err(cause) };
        log::warn!("batches keep the plan that they have, as there is no other: {cause}");
        Ok(Planned { tuning: Tuning::Chosen, kept: self.kept(), ..ran.clone() })
    }

    /// Searches for a plan for batches of `items` items, after what has run.
    ///
    /// The first search allows no read inside a rehearsal. A model that reads values is detected
    /// this way before any part of a large batch has run. It is then planned from one item upwards.
    fn search(
        &mut self,
        wanted: Wanted,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Found {
        let phase = wanted.phase;
        loop {
            let mut too_long = None;
            let found = self.search_once(wanted, &mut too_long, cost, rehearse);
            let (plan, mut rehearsals) = match found {
                Err(PlanError::Footprint {
                    cause: TrainError::Record(RecordError::ReadTooLarge { .. }),
                    ..
                }) if !self.step.reads => {
                    self.step.reads = true;
                    continue;
                }
                Err(cause) => return Err(too_long.unwrap_or_else(|| failed(phase, cause))),
                Ok(found) => found,
            };
            let split = plan.split();
            return match rehearsals.remove(&split) {
                Some(rehearsed) => Ok((plan, rehearsed)),
                None => Ok((plan, self.rehearse_one(wanted, split, cost, rehearse)?)),
            };
        }
    }

    /// Searches once. Returns the plan, and the rehearsals that were made. `too_long` gets the
    /// error of a recording that was too long.
    fn search_once(
        &self,
        wanted: Wanted,
        too_long: &mut Option<TrainError>,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<(Plan, HashMap<Split, Rehearsed>), PlanError<TrainError>> {
        let budget = self.room.of_plans();
        let Wanted { phase, items, sizing, recompute } = wanted;
        let options = self.options(sizing);
        let mut rehearsals: HashMap<Split, Rehearsed> = HashMap::new();
        let plan = plan_at_once(Items::new(items), budget, &options, |splits| {
            cost.rehearsals += splits.len();
            let conditions = Conditions { recompute, ..self.conditions(phase, budget) };
            let assessed =
                assess_all(splits, |split| rehearse(split, &self.recorder(budget)), &conditions);
            let needs = splits.iter().zip(assessed).map(|(split, assessed)| match assessed {
                Ok(rehearsed) => {
                    self.count_rehearsal(&rehearsed, cost);
                    let need = need_of(&rehearsed);
                    rehearsals.insert(*split, rehearsed);
                    Ok(need)
                }
                // The recording of a smaller micro-batch may be shorter.
                Err(error @ TrainError::Record(RecordError::TooLong { needed, .. })) => {
                    *too_long = Some(error);
                    Ok(Need::heuristic(with_autodiff(needed)))
                }
                // The operations before the read are already too large.
                Err(TrainError::Record(RecordError::ReadTooLarge { needed, .. }))
                    if self.step.reads =>
                {
                    Ok(Need::heuristic(needed))
                }
                // A smaller micro-batch may fit.
                Err(TrainError::Saved(InstantiateError::TooLarge(_))) => {
                    Ok(Need::lower_bound(Bytes::MAX))
                }
                Err(error) => Err(error),
            });
            needs.collect()
        })?;
        Ok((plan, rehearsals))
    }

    fn options(&self, sizing: Sizing) -> PlanOptions {
        let probing = if self.step.reads { Probing::FromOne } else { Probing::FromWhole };
        // On the host, a footprint is computed faster than the step is recorded. With reads, a
        // rehearsal takes the memory that it measures.
        let alone = self.step.reads || self.memory.is_on_host();
        let options = PlanOptions::new().sizing(sizing).probing(probing);
        options.at_once(if alone { 1 } else { AT_ONCE })
    }

    pub(super) fn rehearse_one(
        &self,
        wanted: Wanted,
        split: Split,
        cost: &mut PlanningCost,
        rehearse: &mut impl FnMut(Split, &StepRecorder) -> Result<Rehearsal, TrainError>,
    ) -> Result<Rehearsed, TrainError> {
        let budget = self.room.of_plans();
        cost.rehearsals += 1;
        let Wanted { phase, recompute, .. } = wanted;
        let rehearsal = rehearse(split, &self.recorder(budget))?;
        let conditions = Conditions { recompute, ..self.conditions(phase, budget) };
        let rehearsed = assess(rehearsal, &conditions);
        self.count_rehearsal(&rehearsed, cost);
        Ok(rehearsed)
    }

    fn count_rehearsal(&self, rehearsed: &Rehearsed, cost: &mut PlanningCost) {
        cost.operations += rehearsed.operations;
        self.room.rehearsed().fetch_max(rehearsed.planning.get(), Relaxed);
    }

    pub(super) fn conditions(&self, phase: Phase, budget: Bytes) -> Conditions<'_> {
        let idle_state = match phase {
            Phase::Training => &[],
            Phase::Validation => self.ledger.optimizer_state.as_slice(),
        };
        let memory = self.memory.as_ref();
        Conditions {
            memory,
            budget,
            overhead: &self.overhead,
            idle_state,
            ledger: &self.ledger,
            parks: self.choices.parks == Parks::Does,
            parked: &self.ledger.parked,
            kept: self.kept(),
            speed: self.choices.speed,
            recompute: None,
        }
    }
}

/// Whether less memory in each micro-step would help.
fn does_not_fit(cause: &PlanError<TrainError>) -> bool {
    matches!(cause, PlanError::DoesNotFit(_) | PlanError::FixedDoesNotFit(_))
}
