//! The rehearsal: a whole iteration as the Learner will run it, recorded and thrown away.
//!
//! Two iterations are rehearsed, because an optimizer's state is created in the first step and
//! alive from then on. Each has up to three micro-steps of each size. Later micro-steps repeat the
//! third: the accumulated gradients exist, and the metrics hold the outputs of the previous
//! micro-step. Where outputs are joined on a GPU, each has all micro-steps, up to 16. A batch of a
//! shape that comes once in a while, such as the last one of an epoch, is rehearsed the same way it
//! comes: as one iteration of a process that has trained before.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module};
use burn::train::{LearningComponentsTypes, TrainOutput};
use firebox_lazy::{LazyBackend, Rehearsal, StepRecorder, mark, rehearse};
use firebox_plan::Split;
use firebox_trace::{Category, Items, Mark};

use crate::components::{LazyComponents, TrainBatch, TrainItem};
use crate::device::panics::panic_message;
use crate::error::{Phase, TrainError};
use crate::gradients::{WeightedGradients, forget_graphs_without};
use crate::iteration::outputs::{OUTPUTS_HELD, Outputs};
use crate::iteration::pieces::{Piece, of_joined, representative};
use crate::iteration::rehearsing::Rehearsing;
use crate::loss_scale::{LossScale, Scaling, witness};
use crate::park::of_step;
use crate::planner::labels::{
    label_by_lifetime, label_gradients, label_parameters, retire_what_is_replaced,
};
use crate::ranks::exchange::rehearse_exchange;
use crate::splitter::Splitter;
use crate::whole::{Join, add_outputs_of_others};

/// How many validation batches are rehearsed: enough for the metrics to hold the outputs of as many
/// micro-steps as they may.
const VALIDATED_BATCHES: usize = OUTPUTS_HELD + 1;

/// How many consecutive iterations are rehearsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Iterations {
    /// One iteration, after iterations on batches of another shape: the optimizer's state exists.
    One = 1,
    /// Two iterations. Later ones repeat the second.
    Two = 2,
}

/// The course of the training run that is rehearsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RehearsalPlan {
    pub(crate) iterations: Iterations,
    /// Whether the optimizer has stepped in this process.
    pub(crate) has_stepped: bool,
    /// How many batches one iteration sums gradients over.
    pub(crate) batches: usize,
    /// Whether pages count, which makes each size need its own pages.
    pub(crate) pages: bool,
    /// Whether gradients are summed over several ranks.
    pub(crate) exchanges: bool,
    /// Whether the optimizer's state is parked between steps.
    pub(crate) parks: bool,
}

impl RehearsalPlan {
    /// The pieces that an iteration, counted from one, runs. Where pages do not count, the first of
    /// two iterations only creates the optimizer's state.
    pub(crate) fn pieces<'a>(&self, pieces: &'a [Piece], iteration: usize) -> &'a [Piece] {
        match self.pages || iteration == self.iterations as usize {
            true => pieces,
            false => &pieces[pieces.len() - 1..],
        }
    }
}

/// Rehearses training on the micro-batches `split` of `batch`, whose outputs are joined by `join`.
pub(crate) fn rehearse_training<LC, S>(
    learner: &burn::train::Learner<LC>,
    splitter: &S,
    batch: &TrainBatch<LC>,
    split: Split,
    course: RehearsalPlan,
    join: Option<&Join<TrainItem<LC>>>,
    recorder: &StepRecorder,
) -> Result<Rehearsal, TrainError>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    let join = join.filter(|_| split.len() > 1);
    let pieces = match join {
        Some(_) if course.pages => of_joined(split, course.batches),
        _ => representative(split, course.batches, course.pages),
    };
    let model = learner.model();
    let mut trace = guard(Phase::Training, split.largest(), || {
        rehearse::<LC::Backend, _>(recorder, &model, |model| {
            let mut learner = learner.clone();
            // The learner needs leaves of its own. A backward pass removes the leaves it reaches
            // from burn's graph, and a model with two backward passes per step needs them there.
            if let Some(device) = model.devices().first() {
                learner.fork(device);
            }
            let mut outputs = Outputs::new(join);
            label_parameters(model);
            if course.has_stepped {
                mark::<LC::Base>(Mark::SteppedBefore);
            }
            for iteration in 1..=course.iterations as usize {
                let pieces = course.pieces(&pieces, iteration);
                iterate(&mut learner, model, (splitter, batch), pieces, &course, &mut outputs);
            }
        })
    })?;
    label_by_lifetime(&mut trace.trace);
    if join.is_some() {
        add_outputs_of_others(&mut trace.trace, missing(split, &pieces));
    }
    retire_what_is_replaced(&mut trace.trace);
    Ok(trace)
}

/// Records one iteration on the micro-batches `pieces`. Gradients are labelled by the parameters of
/// `labels`.
fn iterate<LC, S>(
    learner: &mut burn::train::Learner<LC>,
    labels: &LC::TrainingModel,
    (splitter, batch): (&S, &TrainBatch<LC>),
    pieces: &[Piece],
    course: &RehearsalPlan,
    outputs: &mut Outputs<'_, TrainItem<LC>>,
) where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    // Any share of the batch, but for all of it: that gradient stays as it is.
    let share = if pieces.len() > 1 { 0.5 } else { 1.0 };
    let scale = LossScale::of::<LC::Backend>();
    let scaling = Scaling::with(scale);
    let mut gradients = WeightedGradients::mean(1.0);
    learner.lr_step();
    let current = learner.model();
    let mut rehearsing = Rehearsing::new(pieces);
    rehearsing.each::<LC::Backend, _, _, _>(
        (splitter, batch),
        outputs,
        &mut |micro| scaling.step(|| train_step(learner, &current, micro)),
        &mut |output, _| {
            // One that does not scale its loss is told when it runs.
            gradients.add_times(labels, output.grads, share, scaling.undo().unwrap_or(1.0));
            output.item
        },
    );
    drop(current);
    rehearsing.end_batch();
    let grads = match course.exchanges {
        false => gradients.finish(labels),
        true => {
            mark::<LC::Base>(Mark::Settle);
            let grads = rehearse_exchange(labels, gradients.take(1.0).0);
            label_gradients(labels, &grads, Category::Gradient);
            grads
        }
    };
    if scale.is_some() && !course.exchanges {
        drop(witness::<LC::Backend, _>(labels, &grads));
    }
    rehearsing.update::<LC::Backend, _>(|| {
        let grads = match course.parks {
            true => of_step::<LC::Backend, _>(labels, grads),
            false => grads,
        };
        learner.optimizer_step(grads);
        label_parameters(&learner.model());
    });
}

/// Runs the step of the learner's `model` on a micro-batch. Then releases graphs that had a forward
/// pass and no backward pass, which burn-autodiff would keep.
pub(crate) fn train_step<LC>(
    learner: &burn::train::Learner<LC>,
    model: &LC::TrainingModel,
    micro: TrainBatch<LC>,
) -> TrainOutput<TrainItem<LC>>
where
    LC: LazyComponents,
{
    let output = learner.train_step(micro);
    forget_graphs_without::<LC::Backend, _>(model, &output.grads);
    output
}

/// Rehearses validation by `step` on the micro-batches `split` of `batch`, for several batches in a
/// row. Outputs of a batch are joined by `join`. `pages`: whether pages count.
pub(crate) fn rehearse_validation<B, M, I, T, S>(
    model: &M,
    step: &mut dyn FnMut(&M, I) -> T,
    (splitter, batch): (&S, &I),
    split: Split,
    (join, pages): (Option<&Join<T>>, bool),
    recorder: &StepRecorder,
) -> Result<Rehearsal, TrainError>
where
    B: LazyBackend,
    M: Module<B>,
    S: Splitter<I>,
{
    let join = join.filter(|_| split.len() > 1);
    let pieces = match join {
        Some(_) if pages => of_joined(split, VALIDATED_BATCHES),
        _ => representative(split, VALIDATED_BATCHES, true),
    };
    let mut trace = guard(Phase::Validation, split.largest(), || {
        rehearse::<B, _>(recorder, model, |model| {
            let mut outputs = Outputs::new(join);
            label_parameters(model);
            // Validation comes after an epoch of training.
            mark::<B::Base>(Mark::SteppedBefore);
            let step = &mut |micro| step(model, micro);
            let mut rehearsing = Rehearsing::new(&pieces);
            rehearsing.each::<B, _, _, _>((splitter, batch), &mut outputs, step, &mut |it, _| it);
        })
    })?;
    label_by_lifetime(&mut trace.trace);
    if join.is_some() {
        add_outputs_of_others(&mut trace.trace, missing(split, &pieces));
    }
    Ok(trace)
}

/// How many micro-batches of a batch are missing from the pieces that represent it.
fn missing(split: Split, pieces: &[Piece]) -> usize {
    let of_batch = pieces.iter().skip(1).take_while(|piece| piece.range.start > 0).count() + 1;
    split.ranges().count().saturating_sub(of_batch)
}

/// Turns a panic of the user's step into an error, and hidden state into another.
pub(crate) fn guard(
    phase: Phase,
    items: Items,
    rehearse: impl FnOnce() -> Result<Rehearsal, firebox_lazy::RecordError>,
) -> Result<Rehearsal, TrainError> {
    let rehearsal = catch_unwind(AssertUnwindSafe(rehearse)).map_err(|panic| {
        let message = panic_message(&*panic);
        TrainError::StepPanicked { phase, items, message }
    })??;
    if rehearsal.survivors.is_empty() {
        Ok(rehearsal)
    } else {
        Err(TrainError::HiddenState { survivors: rehearsal.survivors })
    }
}

/// The learner's model for validation, made the way burn does.
pub(crate) fn validation_model<LC: LearningComponentsTypes>(
    learner: &burn::train::Learner<LC>,
) -> LC::InferenceModel {
    learner.model().valid()
}
