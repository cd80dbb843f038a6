//! The rehearsal: a whole iteration as the Learner will run it, recorded on a copy and thrown away.
//!
//! Two iterations are rehearsed, since an optimizer's state is born in the first step and alive from then on, and up
//! to three micro-steps of each size, after which every further one repeats the third: the accumulated gradients are
//! there, and the metrics hold the outputs of the micro-step before. A batch of a shape that comes once in a while, such as
//! the last one of an epoch, is rehearsed as it comes: one iteration, in a process that has trained before.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, LearningComponentsTypes, TrainOutput, TrainStep};
use firebox_lazy::{
    HOST_BYTES_PER_CALL, LazyBackend, Recorder, Rehearsal, host_bytes_of_descriptions,
    host_bytes_of_rehearsal, mark, rehearse,
};
use firebox_plan::Split;
use firebox_trace::{
    Bytes, Category, Footprint, Items, MemoryModel, OpIndex, Origin, Step, TensorIndex, TensorInfo,
    Trace,
};

use crate::beside::{Beside, BesideBytes, add_outputs_of_before, outputs_held};
use crate::error::{Phase, TrainError, panic_message};
use crate::gradients::{GradientSum, Reduction, forget_graphs_without};
use crate::labels::{
    ITERATION_END, MICRO_STEP, OPTIMIZER_STEP, label_by_lifetime, label_gradients,
    label_parameters, retire_what_is_replaced,
};
use crate::pieces::representative;
use crate::splitter::Splitter;
use crate::strategy::OUTPUTS_HELD;
use crate::whole::{Join, Joins, add_outputs_of_others, joined};

/// How many validated batches are rehearsed, so that the metrics hold the outputs of as many micro-steps as they may.
const VALIDATED_BATCHES: usize = OUTPUTS_HELD + 1;

/// What a rehearsal is assessed by.
pub(crate) struct Conditions<'a> {
    pub(crate) memory: &'a dyn MemoryModel,
    /// What must not be exceeded. By how much it is need not be known.
    pub(crate) budget: Bytes,
    /// What the process has run before, as far as that leaves pages behind.
    pub(crate) before: Vec<&'a Trace>,
    /// Whether these pages are given back, but for those that something lies on.
    pub(crate) gives_back: bool,
    pub(crate) beside: &'a Beside,
    /// The optimizer's state, for a phase that does not know of it.
    pub(crate) idle_state: &'a [TensorInfo],
    /// What threads keep for good after what has run before.
    pub(crate) kept: Bytes,
}

/// What a rehearsal showed.
#[derive(Clone, Debug)]
pub(crate) struct Rehearsed {
    pub(crate) footprint: Footprint,
    /// What was rehearsed, where the memory model wants to know what ran before.
    pub(crate) trace: Option<Arc<Trace>>,
    /// What the footprint counts beside the step.
    pub(crate) beside: BesideBytes,
    /// What a loader thread may have alive before it has to wait.
    pub(crate) loader_limit: Bytes,
    /// What is alive before a micro-step, at most.
    pub(crate) held: Bytes,
    /// The optimizer's state after the rehearsal.
    pub(crate) optimizer_state: Vec<TensorInfo>,
    /// The paths of the running statistics.
    pub(crate) running_state: Vec<String>,
    /// What threads keep for good beside it, its own and what others have left.
    pub(crate) kept: Bytes,
    /// What the rehearsal itself took of the memory.
    pub(crate) planning: Bytes,
    /// The operations recorded.
    pub(crate) operations: usize,
}

/// How many iterations in a row are rehearsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Iterations {
    /// One, behind iterations on batches of another shape: the optimizer's state is there.
    One = 1,
    /// Two, after which every further one repeats the second.
    Two = 2,
}

/// How a training run goes on that is rehearsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Course {
    pub(crate) iterations: Iterations,
    /// Whether the optimizer has stepped in this process.
    pub(crate) has_stepped: bool,
    /// How many batches an iteration has, whose gradients are summed up.
    pub(crate) batches: usize,
    /// Whether pages count, so that each size needs its own.
    pub(crate) pages: bool,
}

/// Rehearses training on the micro-batches `split` of `batch`.
pub(crate) fn rehearse_training<LC, S>(
    learner: &burn::train::Learner<LC>,
    splitter: &S,
    batch: &<LC::TrainingModel as TrainStep>::Input,
    split: Split,
    course: Course,
    joins: &Joins,
    recorder: &Recorder,
) -> Result<Rehearsal, TrainError>
where
    LC: LearningComponentsTypes,
    LC::Backend: LazyBackend,
    <LC::Backend as AutodiffBackend>::InnerBackend:
        LazyBackend<Base = <LC::Backend as LazyBackend>::Base>,
    S: Splitter<<LC::TrainingModel as TrainStep>::Input>,
{
    let pieces = representative(split, course.batches, course.pages);
    let model = learner.model();
    let mut trace = guard(Phase::Training, split.largest(), || {
        rehearse::<LC::Backend, _>(recorder, &model, |model| {
            let mut learner = learner.clone();
            // Leaves of its own: a backward pass takes those that it reaches out of burn's graph, and a model whose step has two of them
            // needs them there.
            if let Some(device) = model.devices().first() {
                learner.fork(device);
            }
            let mut outputs = Outputs::new(joins.of());
            label_parameters(model);
            if course.has_stepped {
                mark::<<LC::Backend as LazyBackend>::Base>(Step::STEPPED_BEFORE);
            }
            let iterations = course.iterations as usize;
            for iteration in 1..=iterations {
                // Where pages do not count, the first of two is there for the optimizer's state.
                let pieces = match course.pages || iteration == iterations {
                    true => &pieces[..],
                    false => &pieces[pieces.len() - 1..],
                };
                let accumulates = pieces.len() > 1;
                let mut sum = GradientSum::new();
                learner.lr_step();
                let current = learner.model();
                for piece in pieces {
                    outputs.begin(piece);
                    let micro = splitter.range(batch, piece.clone());
                    mark::<<LC::Backend as LazyBackend>::Base>(Step::DRAIN);
                    outputs.end_earlier();
                    mark::<<LC::Backend as LazyBackend>::Base>(MICRO_STEP);
                    let output = train_step(&learner, &current, micro);
                    mark::<<LC::Backend as LazyBackend>::Base>(Step::DRAIN);
                    label_gradients(model, &output.grads, Category::Gradient);
                    let scale = if accumulates { 0.5 } else { 1.0 };
                    sum.add(model, output.grads, scale);
                    if let (true, Some(sum)) = (accumulates, sum.get()) {
                        label_gradients(model, sum, Category::AccumulatedGradient);
                    }
                    mark::<<LC::Backend as LazyBackend>::Base>(Step::DRAIN);
                    outputs.add(output.item);
                }
                outputs.join();
                drop(current);
                let grads = sum.finish(model, 1.0);
                // The device is asked before and after the optimizer step whether all went well.
                mark::<<LC::Backend as LazyBackend>::Base>(Step::SETTLE);
                mark::<<LC::Backend as LazyBackend>::Base>(OPTIMIZER_STEP);
                learner.optimizer_step(grads);
                label_parameters(&learner.model());
                mark::<<LC::Backend as LazyBackend>::Base>(Step::SETTLE);
                mark::<<LC::Backend as LazyBackend>::Base>(ITERATION_END);
            }
        })
    })?;
    label_by_lifetime(&mut trace.trace);
    if joins.of::<<LC::TrainingModel as TrainStep>::Output>().is_some() {
        add_outputs_of_others(&mut trace.trace, missing(split, &pieces));
    }
    retire_what_is_replaced(&mut trace.trace);
    Ok(trace)
}

/// The step of the learner's `model` on a micro-batch. What it ran forward and not backward is let go of: burn-autodiff would keep it.
pub(crate) fn train_step<LC>(
    learner: &burn::train::Learner<LC>,
    model: &LC::TrainingModel,
    micro: <LC::TrainingModel as TrainStep>::Input,
) -> TrainOutput<<LC::TrainingModel as TrainStep>::Output>
where
    LC: LearningComponentsTypes,
    LC::Backend: LazyBackend,
{
    let output = learner.train_step(micro);
    forget_graphs_without::<LC::Backend, _>(model, &output.grads);
    output
}

/// Rehearses validation on the micro-batches `split` of `batch`, over and over.
pub(crate) fn rehearse_validation<B, M, S>(
    model: &M,
    splitter: &S,
    batch: &M::Input,
    split: Split,
    joins: &Joins,
    recorder: &Recorder,
) -> Result<Rehearsal, TrainError>
where
    B: LazyBackend,
    M: InferenceStep + Module<B>,
    S: Splitter<M::Input>,
{
    let pieces = representative(split, VALIDATED_BATCHES, true);
    let mut trace = guard(Phase::Validation, split.largest(), || {
        rehearse::<B, _>(recorder, model, |model| {
            let mut outputs = Outputs::new(joins.of());
            label_parameters(model);
            // It comes behind an epoch of training.
            mark::<B::Base>(Step::STEPPED_BEFORE);
            for piece in &pieces {
                outputs.begin(piece);
                let micro = splitter.range(batch, piece.clone());
                mark::<B::Base>(Step::DRAIN);
                outputs.end_earlier();
                mark::<B::Base>(MICRO_STEP);
                outputs.add(model.step(micro));
                mark::<B::Base>(Step::DRAIN);
            }
            outputs.join();
        })
    })?;
    label_by_lifetime(&mut trace.trace);
    if joins.of::<M::Output>().is_some() {
        add_outputs_of_others(&mut trace.trace, missing(split, &pieces));
    }
    Ok(trace)
}

/// How many micro-batches of a batch are not among the first pieces that stand for it.
fn missing(split: Split, pieces: &[Range<usize>]) -> usize {
    let of_batch = pieces.iter().skip(1).take_while(|piece| piece.start > 0).count() + 1;
    split.ranges().count().saturating_sub(of_batch)
}

/// The outputs that the metrics hold in a rehearsal.
struct Outputs<'a, T> {
    /// One by one, or those of the batch so far.
    latest: VecDeque<T>,
    /// The joined one of the batch before.
    earlier: Option<T>,
    join: Option<&'a Join<T>>,
}

impl<'a, T> Outputs<'a, T> {
    fn new(join: Option<&'a Join<T>>) -> Self {
        Self { latest: VecDeque::new(), earlier: None, join }
    }

    /// The micro-batch `piece` is next: the first of a batch begins where the last ended.
    fn begin(&mut self, piece: &Range<usize>) {
        if piece.start == 0 && !self.latest.is_empty() {
            self.join();
        }
    }

    /// Ends those that the metrics have let go of when a micro-step begins.
    fn end_earlier(&mut self) {
        match self.join {
            None => drop(self.latest.drain(..self.latest.len().saturating_sub(OUTPUTS_HELD))),
            Some(_) => self.earlier = None,
        }
    }

    fn add(&mut self, output: T) {
        self.latest.push_back(output);
    }

    /// At the end of a batch.
    fn join(&mut self) {
        if let Some(join) = self.join {
            let parts = self.latest.drain(..).map(|output| (output, 1.0)).collect();
            self.earlier = joined(join, Reduction::Mean, parts);
        }
    }
}

/// Turns a panic of the user's step into an error, and hidden state into another.
fn guard(
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

/// Finds out what a rehearsal shows.
pub(crate) fn assess(rehearsal: Rehearsal, conditions: &Conditions) -> Rehearsed {
    let Rehearsal { mut trace, replaced, .. } = rehearsal;
    let Conditions { memory, before, idle_state, .. } = conditions;
    debug_assert_eq!(trace.check(), Ok(()), "the recorder wrote a trace that contradicts itself");
    let optimizer_state = state_at_end(&trace);
    let (loader_limit, queued) = conditions.beside.add_queue(&mut trace, memory.is_on_host());
    // On the host the outputs of one batch less were found to be alive.
    if !memory.is_on_host() {
        add_outputs_of_before(&mut trace);
    }
    let mut beside = BesideBytes {
        small_page: Bytes::ZERO,
        queued,
        outputs: outputs_held(&trace),
        saving: Bytes::ZERO,
        idle_state: idle_state.iter().map(TensorInfo::bytes).sum(),
    };
    let idle = |tensor: &TensorInfo| TensorInfo { origin: Origin::Existing, ..tensor.clone() };
    trace.tensors.extend(idle_state.iter().map(idle));
    let state = if idle_state.is_empty() { &optimizer_state } else { *idle_state };
    beside.saving = conditions.beside.add_saved(&mut trace, state);
    let mut footprint = match conditions.gives_back {
        false => memory.footprint_after(before, &trace, conditions.budget),
        true => memory.footprint_given_back(before, &trace, conditions.budget),
    };
    beside.small_page = page_for_small_buffers(&footprint);
    footprint.peak += beside.small_page;
    footprint.categories.add(Category::Temporary, beside.small_page);
    let recording = recording_bytes(*memory, &trace, longest_micro_step(&trace));
    footprint.peak += recording + loop_bytes(*memory);
    footprint.categories.add(Category::Temporary, recording + loop_bytes(*memory));
    // What batches of other shapes have had threads keep.
    let left = conditions.kept - footprint.stays;
    footprint.peak += left;
    footprint.categories.add(Category::Temporary, left);
    let before = |step: usize| match step {
        0 => footprint.baseline,
        step => footprint.timeline[step - 1].live,
    };
    let micro_steps = trace.steps.iter().enumerate().filter(|(_, step)| step.is_mark(MICRO_STEP));
    let held = micro_steps.map(|(at, _)| before(at)).max().unwrap_or(footprint.baseline)
        + loop_bytes(*memory)
        + left;
    let planning = match memory.is_on_host() {
        true => footprint.baseline + host_bytes_of_rehearsal(&trace),
        false => Bytes::ZERO,
    };
    // Plans stay for the whole run, and their timelines would be the largest part of them.
    footprint.timeline = Vec::new();
    Rehearsed {
        held,
        kept: footprint.stays + left,
        planning,
        beside,
        loader_limit,
        optimizer_state,
        operations: trace.calls().count(),
        running_state: replaced,
        trace: (footprint.paging.is_some() && memory.keeps_pages()).then(|| Arc::new(trace)),
        footprint,
    }
}

/// One page more where the pool of the smallest pages is full at times. Whether a small operation works in place, and in which
/// order buffers are let go of, differs a little between runs of the same program, by how its threads happen to interleave.
fn page_for_small_buffers(footprint: &Footprint) -> Bytes {
    let paging = footprint.paging.as_ref().filter(|paging| !paging.is_refused());
    let sizes = paging.iter().flat_map(|paging| paging.pages.keys());
    let smallest = sizes.copied().find(|size| *size > Bytes::ZERO);
    smallest
        .filter(|size| paging.is_some_and(|paging| paging.full.contains(size)))
        .unwrap_or_default()
}

/// What the recording of a micro-step of so many calls takes of the memory, with the descriptions of `trace`.
pub(crate) fn recording_bytes(memory: &dyn MemoryModel, trace: &Trace, calls: usize) -> Bytes {
    let of_calls = Bytes::new(HOST_BYTES_PER_CALL.get() * calls as u64);
    match memory.is_on_host() {
        true => of_calls + host_bytes_of_descriptions(trace),
        false => Bytes::ZERO,
    }
}

/// What burn's training loop takes of the memory beside tensors: the items of a loader's batch, metrics, loggers. By
/// measurement 0.1 to 0.6 MiB.
fn loop_bytes(memory: &dyn MemoryModel) -> Bytes {
    if memory.is_on_host() { Bytes::mib(1) } else { Bytes::ZERO }
}

/// What the optimizer keeps: its state at the end of the first iteration. At the end of the second one a checkpoint may
/// still hold that of the first.
fn state_at_end(trace: &Trace) -> Vec<TensorInfo> {
    let end = trace.steps.iter().position(|step| step.is_mark(ITERATION_END)).unwrap_or_default();
    let is_state = |index: &TensorIndex| {
        let label = trace.tensor(*index).label.as_ref();
        label.is_some_and(|label| label.category == Category::OptimizerState)
    };
    let state = trace.alive_before(OpIndex(end as u32)).into_iter().filter(is_state);
    state.map(|index| trace.tensor(index).clone()).collect()
}

/// How many calls the longest micro-step of a rehearsal has.
fn longest_micro_step(trace: &Trace) -> usize {
    let parts = trace.steps.split(|step| matches!(step, Step::Mark(_)));
    let calls = |part: &[Step]| part.iter().filter(|step| matches!(step, Step::Call(_))).count();
    parts.map(calls).max().unwrap_or_default()
}

/// The model of a learner for validation, as burn makes it.
pub(crate) fn validation_model<LC: LearningComponentsTypes>(
    learner: &burn::train::Learner<LC>,
) -> LC::InferenceModel {
    learner.model().valid()
}
