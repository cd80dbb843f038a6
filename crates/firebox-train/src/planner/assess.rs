//! Turns rehearsals into the needs that the search for a plan asks for, in parallel, and turns the
//! search's errors into training errors.

use firebox_heap::Heap;
use firebox_lazy::Rehearsal;
use firebox_plan::{Need, PlanError, RecomputedNeed, Role, Split};
use firebox_trace::{Category, MemoryModel, Question, Trace};

use crate::error::{Phase, TrainError};
use crate::planner::rehearsed::{Conditions, Rehearsed, assess};

/// Rehearses the splits one after the other, and assesses each while the next is rehearsed.
pub(super) fn assess_all(
    splits: &[Split],
    mut rehearse: impl FnMut(Split) -> Result<Rehearsal, TrainError>,
    conditions: &Conditions,
) -> Vec<Result<Rehearsed, TrainError>> {
    if let [split] = splits {
        return vec![rehearse(*split).map(|rehearsal| assess_alone(rehearsal, conditions))];
    }
    let mut assessed: Vec<_> = splits.iter().map(|_| None).collect();
    rayon::in_place_scope(|scope| {
        for (split, assessed) in splits.iter().zip(&mut assessed) {
            match rehearse(*split) {
                Ok(rehearsal) => {
                    scope.spawn(|_| *assessed = Some(Ok(assess(rehearsal, conditions))));
                }
                Err(error) => *assessed = Some(Err(error)),
            }
        }
    });
    assessed.into_iter().map(|one| one.expect("the scope ends when all are assessed")).collect()
}

fn assess_alone(rehearsal: Rehearsal, conditions: &Conditions) -> Rehearsed {
    let Conditions { memory, budget, .. } = conditions;
    match lesson(&rehearsal, conditions) {
        Some(trace) => {
            let question = Question { enough: *budget, ..Question::new(&trace) };
            let learn = || memory.answer(&question);
            rayon::join(|| assess(rehearsal, conditions), learn).0
        }
        None => assess(rehearsal, conditions),
    }
}

/// The trace of a single rehearsal, if more rehearsals will follow because its tensors alone exceed
/// the budget. The device without memory is slow at its first trace, because burn's fusion learns
/// from it. A second device can learn from this trace meanwhile.
fn lesson(rehearsal: &Rehearsal, conditions: &Conditions) -> Option<Trace> {
    let alone = conditions.memory.is_on_host() || rayon::current_num_threads() < 2;
    // What follows then are rewritten traces, of which both would have to learn.
    let alone = alone || conditions.recompute.is_some();
    let is_too_large = || Heap::simple().footprint(&rehearsal.trace).peak > conditions.budget;
    (!alone && is_too_large()).then(|| rehearsal.trace.clone())
}

/// The need that a rehearsal found, as the search takes it.
pub(super) fn need_of(rehearsed: &Rehearsed) -> Need {
    let footprint = &rehearsed.footprint;
    let mut need = Need::new(footprint.peak, footprint.estimate);
    if let Some(paging) = footprint.paging.as_ref().filter(|paging| paging.is_refused()) {
        need = need.oversized(paging.largest_buffer, paging.largest_page);
    }
    // More than if nothing is recomputed is no news.
    let least = rehearsed.least.filter(|least| least.peak < footprint.peak);
    need.recomputed = least.map(|least| RecomputedNeed {
        peak: least.peak,
        percent: (100.0 * least.overhead).ceil() as u32,
    });
    let overhead = &rehearsed.overhead;
    need = need.holding("batches of loader threads", Role::Loaders, overhead.queued).holding(
        "a checkpoint being written",
        Role::Checkpoint,
        overhead.saving,
    );
    for (category, bytes) in footprint.categories.iter() {
        let bytes = match category {
            Category::Input => bytes - overhead.queued,
            Category::Temporary => bytes - overhead.saving,
            _ => bytes,
        };
        let role = match category {
            Category::Parameter | Category::OptimizerState => Role::State,
            Category::Gradient | Category::AccumulatedGradient => Role::State,
            Category::Activation => Role::Activations,
            Category::Input => Role::Inputs,
            Category::Temporary | Category::Unused => Role::Other,
        };
        need = need.holding(category.name(), role, bytes);
    }
    need
}

/// Passes errors of rehearsals through unchanged, and adds the phase to planning errors.
pub(super) fn failed(phase: Phase, cause: PlanError<TrainError>) -> TrainError {
    match cause {
        PlanError::EmptyBatch => TrainError::EmptyBatch { phase },
        PlanError::Footprint { cause, .. } => cause,
        cause => TrainError::Plan { phase, cause: Box::new(cause) },
    }
}
