//! What lives on the device beside a step: batches that loader threads have prepared, outputs that burn's metrics thread
//! still holds, the state that a checkpoint is being written from.
//!
//! Outputs are held in the rehearsal itself, as they are in training. Batches of loader threads and what a checkpoint is
//! written from are put into its trace here, as tensors that exist all the time.

use firebox_trace::{Bytes, Category, Label, OpIndex, Origin, Step, TensorInfo, TensorType, Trace};

use crate::labels::{ITERATION_END, MICRO_STEP};

/// How many batches a loader thread may have prepared before it has to wait.
const BATCHES_PER_WORKER: u64 = 1;

/// What a training run does beside its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Beside {
    /// The threads that prepare batches.
    pub(crate) workers: usize,
    /// How many batches one of them prepares in an epoch.
    pub(crate) batches: usize,
    /// What a thread may have prepared before it has to wait, for batches that were planned before.
    pub(crate) limit: Bytes,
    /// What was counted for the largest batch of theirs, or, while none was used yet, the most that one of them has prepared.
    pub(crate) counted: Bytes,
    /// Whether checkpoints are written while training goes on.
    pub(crate) saves: bool,
}

/// What is counted beside a step. All of it is part of the predicted peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BesideBytes {
    /// Where training is in the host's memory: batches that loader threads have prepared or are preparing, beside the one that is
    /// trained on.
    pub queued: Bytes,
    /// Outputs of earlier micro-steps that the metrics may still hold.
    pub outputs: Bytes,
    /// Parameters and optimizer state from which a checkpoint is still being written, when later steps have replaced them.
    pub saving: Bytes,
    /// A page for small buffers, which lie now here, now there.
    pub small_page: Bytes,
    /// The optimizer's state, where the step itself does not use it: in validation.
    pub idle_state: Bytes,
}

impl BesideBytes {
    /// The names and the bytes, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, Bytes)> {
        [
            ("batches of loader threads", self.queued),
            ("outputs for the metrics", self.outputs),
            ("a checkpoint being written", self.saving),
            ("optimizer state at rest", self.idle_state),
            ("a page for small buffers", self.small_page),
        ]
        .into_iter()
    }
}

impl Beside {
    /// What a loader thread may have prepared before it has to wait, with batches like that of `trace`, and what all of them may have
    /// then. A batch that waits is host data; so this is a part of the trace only where that is the memory to be trained in.
    pub(crate) fn add_queue(&self, trace: &mut Trace, is_on_host: bool) -> (Bytes, Bytes) {
        let is_batch = |tensor: &&TensorInfo| {
            let label = tensor.label.as_ref().map(|label| label.category);
            // While a step is being recorded, nothing has a label yet.
            tensor.prepared && label.is_none_or(|label| label == Category::Input)
        };
        let batch: Bytes = trace.tensors.iter().filter(is_batch).map(TensorInfo::bytes).sum();
        if batch == Bytes::ZERO {
            return (self.limit, Bytes::ZERO);
        }
        let limit = self.limit.max(batch * BATCHES_PER_WORKER);
        if !is_on_host {
            return (limit, Bytes::ZERO);
        }
        // A thread that is below the limit makes another batch; in an epoch of few batches it can not make more than those.
        let batch = batch.max(self.counted);
        let most = (limit.max(batch) + batch).min(batch * (self.batches as u64 + 1));
        let queued = most * self.workers as u64;
        if queued > Bytes::ZERO {
            trace.tensors.push(beside_the_step(&workspace(queued), Category::Input, "queued"));
        }
        (limit, queued)
    }

    /// Adds what a checkpoint is written from, the parameters and `state`, the optimizer's. burn writes it on threads of its
    /// own, and by the time it is written many steps may have put others in their place. One checkpoint is written at a time;
    /// the next one waits for it. Gives the bytes.
    pub(crate) fn add_saved(&self, trace: &mut Trace, state: &[TensorInfo]) -> Bytes {
        if !self.saves {
            return Bytes::ZERO;
        }
        let is_parameter = |tensor: &&TensorInfo| {
            let label = tensor.label.as_ref().map(|label| label.category);
            tensor.origin == Origin::Existing && label == Some(Category::Parameter)
        };
        let parameters = trace.tensors.iter().filter(is_parameter);
        let parts = parameters.chain(state);
        let saved =
            parts.map(|tensor| beside_the_step(tensor, Category::Temporary, Label::BEING_SAVED));
        let saved: Vec<TensorInfo> = saved.collect();
        let bytes = saved.iter().map(TensorInfo::bytes).sum();
        trace.tensors.extend(saved);
        bytes
    }
}

/// A tensor that exists all the time beside the step.
fn beside_the_step(tensor: &TensorInfo, category: Category, name: &str) -> TensorInfo {
    let label = Label { category, name: name.into() };
    TensorInfo { origin: Origin::Existing, label: Some(label.into()), ..tensor.clone() }
}

/// Bytes without a shape.
fn workspace(bytes: Bytes) -> TensorInfo {
    let shape = [bytes.get() as usize].into();
    TensorInfo::new(TensorType { shape, dtype: burn_backend::DType::U8 }.into(), Origin::Existing)
}

/// The label of outputs that the metrics still hold from before the rehearsal.
const EARLIER_OUTPUT: &str = "earlier output";

/// Adds the outputs of the iteration before to the rehearsal of a single iteration, in which the metrics still hold them. They are
/// as large as its own; those of a larger batch were counted when that one was rehearsed.
pub(crate) fn add_outputs_of_before(trace: &mut Trace) {
    let is_end = |step: &Step| step.is_mark(ITERATION_END);
    let mut ends = trace.steps.iter().enumerate().filter(|(_, step)| is_end(step));
    if let (Some((end, _)), None) = (ends.next(), ends.next()) {
        let alive = trace.alive_before(OpIndex(end as u32)).into_iter();
        let outputs = alive.map(|tensor| trace.tensor(tensor)).filter(|tensor| is_output(tensor));
        let earlier = |tensor| beside_the_step(tensor, Category::Temporary, EARLIER_OUTPUT);
        let outputs: Vec<TensorInfo> = outputs.map(earlier).collect();
        trace.tensors.extend(outputs);
    }
}

/// Outputs of so many bytes that are there all the time.
pub(crate) fn earlier_outputs(bytes: Bytes) -> Option<TensorInfo> {
    let tensor = || beside_the_step(&workspace(bytes), Category::Temporary, EARLIER_OUTPUT);
    (bytes > Bytes::ZERO).then(tensor)
}

fn is_output(tensor: &TensorInfo) -> bool {
    match &tensor.label {
        None => matches!(tensor.origin, Origin::Made(_)),
        Some(label) => label.name == EARLIER_OUTPUT,
    }
}

/// The outputs of earlier micro-steps that are alive when a micro-step begins, at most.
pub(crate) fn outputs_held(trace: &Trace) -> Bytes {
    let is_mark = |step: &Step| step.is_mark(MICRO_STEP);
    let marks = trace.steps.iter().enumerate().filter(|(_, step)| is_mark(step));
    marks.map(|(at, _)| outputs_alive(trace, at)).max().unwrap_or_default()
}

/// The outputs that are alive before a step.
pub(crate) fn outputs_alive(trace: &Trace, step: usize) -> Bytes {
    let alive = trace.alive_before(OpIndex(step as u32)).into_iter();
    let outputs = alive.map(|tensor| trace.tensor(tensor)).filter(|tensor| is_output(tensor));
    outputs.map(TensorInfo::bytes).sum()
}
