//! Memory outside the step: batches that loader threads have prepared, outputs that burn's metrics
//! thread still holds, and the state that a checkpoint is being written from. The rehearsal's
//! footprint includes it.
//!
//! The rehearsal holds outputs itself, as training does. The batches of loader threads and the
//! state being saved are added to its trace here, as tensors that exist all the time.

use firebox_lazy::LoaderGuard;
use firebox_trace::{
    Bytes, Category, Label, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo, TensorType, Trace,
};

/// How many batches a loader thread may have prepared before it must wait.
const BATCHES_PER_WORKER: u64 = 1;

/// What a training run does outside of its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overhead {
    /// The number of loader threads.
    pub(crate) workers: usize,
    /// How many batches each of them prepares in an epoch.
    pub(crate) batches: usize,
    /// What a loader thread may have prepared before it must wait, as set by earlier plans.
    pub(crate) limit: Bytes,
    /// What was counted for the largest batch of a loader thread, or, while none was used yet, the
    /// most that one thread has prepared.
    pub(crate) counted: Bytes,
    /// Whether checkpoints are written while training goes on.
    pub(crate) saves: bool,
    /// What an exchange of gradients between ranks takes of the memory that training uses.
    pub(crate) exchange: Bytes,
}

/// What is counted in addition to a step. All of it is part of the predicted peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverheadBytes {
    /// Where training uses host memory: batches that loader threads have prepared or are preparing,
    /// except the one that is trained on.
    pub queued: Bytes,
    /// Outputs of earlier micro-steps that the metrics may still hold.
    pub outputs: Bytes,
    /// Parameters and optimizer state that a checkpoint is still being written from after later
    /// steps have replaced them.
    pub saving: Bytes,
    /// Where training uses host memory: what gradients are read to and summed in over several
    /// ranks.
    pub exchange: Bytes,
    /// One more page for small buffers, whose placement varies between runs.
    pub small_page: Bytes,
    /// The optimizer's state where the step does not use it: in validation, and that of parameters
    /// which have no gradient in this batch.
    pub idle_state: Bytes,
}

impl OverheadBytes {
    /// The names and bytes, in the order of the printed table.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, Bytes)> {
        [
            ("batches of loader threads", self.queued),
            ("outputs for the metrics", self.outputs),
            ("a checkpoint being written", self.saving),
            ("the exchange between ranks", self.exchange),
            ("optimizer state at rest", self.idle_state),
            ("a page for small buffers", self.small_page),
        ]
        .into_iter()
    }
}

impl Overhead {
    /// What loader threads prepare, for a loader of `loader_items` items in batches of `items`.
    pub(crate) fn of_loaders(gate: &LoaderGuard, loader_items: usize, items: usize) -> Self {
        let workers = gate.workers();
        let batches = loader_items.div_ceil(items).div_ceil(workers.max(1));
        let counted = match gate.largest_batch() {
            Bytes::ZERO => gate.peak_of_worker(),
            largest => largest,
        };
        Self { workers, batches, counted, ..Self::default() }
    }

    /// Adds the batches of loader threads to a trace. Returns what one loader thread may have
    /// prepared before it must wait, for batches like the one in `trace`, and what all of them may
    /// have then.
    ///
    /// A batch that waits is host data. It is therefore added only where training uses host memory.
    pub(crate) fn add_queue(&self, trace: &mut Trace, is_on_host: bool) -> (Bytes, Bytes) {
        let existing = trace.existing().map(|tensor| trace.tensor(tensor));
        // While a step is being recorded, no tensor has a label yet.
        let existing = existing.filter(|tensor| category(tensor).is_none_or(is_input));
        let batch = existing.chain(first_batch(trace)).filter(|tensor| tensor.prepared);
        let batch: Bytes = batch.map(TensorInfo::bytes).sum();
        if batch == Bytes::ZERO {
            return (self.limit, Bytes::ZERO);
        }
        let limit = self.limit.max(batch * BATCHES_PER_WORKER);
        if !is_on_host {
            return (limit, Bytes::ZERO);
        }
        // A thread below the limit makes one more batch. In an epoch of few batches it cannot make
        // more than those.
        let batch = batch.max(self.counted);
        let most = (limit.max(batch) + batch).min(batch * (self.batches as u64 + 1));
        let queued = most * self.workers as u64;
        if queued > Bytes::ZERO {
            trace.tensors.push(beside_the_step(&workspace(queued), Category::Input, "queued"));
        }
        (limit, queued)
    }

    /// Adds what the exchange of gradients takes. Returns the bytes.
    pub(crate) fn add_exchange(&self, trace: &mut Trace) -> Bytes {
        if self.exchange > Bytes::ZERO {
            let buckets = workspace(self.exchange);
            trace.tensors.push(beside_the_step(&buckets, Category::Temporary, ""));
        }
        self.exchange
    }

    /// Adds what a checkpoint is written from: the parameters, and the optimizer's `state`. Returns
    /// the bytes.
    ///
    /// burn writes checkpoints on its own threads, and many steps may replace these tensors before
    /// it is done. One checkpoint is written at a time; the next one waits for it.
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

/// A tensor that exists all the time, outside of the step.
fn beside_the_step(tensor: &TensorInfo, category: Category, name: &str) -> TensorInfo {
    let label = Label { category, name: name.into() };
    TensorInfo { origin: Origin::Existing, label: Some(label.into()), ..tensor.clone() }
}

/// A tensor of `bytes` bytes, for memory without a shape.
fn workspace(bytes: Bytes) -> TensorInfo {
    let shape = [bytes.get() as usize].into();
    TensorInfo::new(TensorType { shape, dtype: burn_backend::DType::U8 }.into(), Origin::Existing)
}

/// The label of outputs that the metrics still hold from before the rehearsal.
const EARLIER_OUTPUT: &str = "earlier output";

/// Adds the outputs of the previous iteration to a rehearsal of a single iteration, in which the
/// metrics still hold them, with what they hold of their batch. They are as large as its own
/// outputs. The outputs of a larger batch were counted when that batch was rehearsed.
pub(crate) fn add_outputs_of_before(trace: &mut Trace) {
    let is_end = |step: &Step| step.is_mark(&Mark::IterationEnd);
    let mut ends = trace.steps.iter().enumerate().filter(|(_, step)| is_end(step));
    if let (Some((end, _)), None) = (ends.next(), ends.next()) {
        let alive = trace.alive_before(OpIndex(end as u32)).into_iter();
        let is_held = |tensor: &&TensorInfo| is_output(tensor) || is_of_a_batch(tensor);
        let outputs = alive.map(|tensor| trace.tensor(tensor)).filter(is_held);
        let earlier = |tensor| beside_the_step(tensor, Category::Temporary, EARLIER_OUTPUT);
        let outputs: Vec<TensorInfo> = outputs.map(earlier).collect();
        trace.tensors.extend(outputs);
    }
}

/// Optimizer state of `bytes` bytes that a step does not use. `None` for zero bytes.
pub(crate) fn idle_state(bytes: Bytes) -> Option<TensorInfo> {
    let tensor = || beside_the_step(&workspace(bytes), Category::OptimizerState, "");
    (bytes > Bytes::ZERO).then(tensor)
}

/// The label of outputs of micro-steps that are not rehearsed.
const OTHER_OUTPUT: &str = "output of another micro-step";

/// Outputs of `bytes` bytes that exist all the time. `None` for zero bytes.
pub(crate) fn other_outputs(bytes: Bytes) -> Option<TensorInfo> {
    let tensor = || beside_the_step(&workspace(bytes), Category::Temporary, OTHER_OUTPUT);
    (bytes > Bytes::ZERO).then(tensor)
}

/// Whether a rehearsal has outputs whose place on a page was not rehearsed.
pub(crate) fn guesses_outputs(trace: &Trace) -> bool {
    let label = |tensor: TensorIndex| trace.tensor(tensor).label.as_ref();
    trace.existing().filter_map(label).any(|label| label.name == OTHER_OUTPUT)
}

fn is_output(tensor: &TensorInfo) -> bool {
    match &tensor.label {
        None => matches!(tensor.origin, Origin::Made(_)),
        Some(label) => label.name == EARLIER_OUTPUT || label.name == OTHER_OUTPUT,
    }
}

/// The bytes of the first batch that arrives in a rehearsal.
pub(crate) fn first_batch_bytes(trace: &Trace) -> Bytes {
    first_batch(trace).map(TensorInfo::bytes).sum()
}

/// The tensors of the first batch that arrives in a rehearsal.
fn first_batch(trace: &Trace) -> impl Iterator<Item = &TensorInfo> {
    let first = trace.steps.iter().take_while(|step| !step.is_mark(&Mark::MicroStep));
    let uploads = first.filter_map(|step| match step {
        Step::Upload { output, .. } => Some(trace.tensor(*output)),
        _ => None,
    });
    uploads.filter(|tensor| is_of_a_batch(tensor))
}

/// The steps at which the first tensor of an iteration's first batch arrives in a rehearsal.
pub(crate) fn arrivals(trace: &Trace) -> impl Iterator<Item = usize> {
    let is_of_batch = |at: usize| match &trace.steps[at] {
        Step::Upload { output, .. } => is_of_a_batch(trace.tensor(*output)),
        _ => false,
    };
    let mut has_begun = false;
    (0..trace.steps.len()).filter(move |at| {
        let is_first = is_of_batch(*at) && !has_begun;
        has_begun = (has_begun || is_first) && !trace.steps[*at].is_mark(&Mark::IterationEnd);
        is_first
    })
}

/// Whether a tensor belongs to a batch that arrived in the rehearsal. Between two iterations only
/// outputs hold one.
fn is_of_a_batch(tensor: &TensorInfo) -> bool {
    category(tensor).is_some_and(is_input) && matches!(tensor.origin, Origin::Made(_))
}

fn is_input(category: Category) -> bool {
    category == Category::Input
}

fn category(tensor: &TensorInfo) -> Option<Category> {
    tensor.label.as_ref().map(|label| label.category)
}

/// The most bytes of earlier outputs that are alive when a micro-step begins.
pub(crate) fn outputs_held(trace: &Trace) -> Bytes {
    let is_mark = |step: &Step| step.is_mark(&Mark::MicroStep);
    let marks = trace.steps.iter().enumerate().filter(|(_, step)| is_mark(step));
    marks.map(|(at, _)| outputs_alive(trace, at)).max().unwrap_or_default()
}

/// The bytes of outputs that are alive before a step.
pub(crate) fn outputs_alive(trace: &Trace, step: usize) -> Bytes {
    let alive = trace.alive_before(OpIndex(step as u32)).into_iter();
    let outputs = alive.map(|tensor| trace.tensor(tensor)).filter(|tensor| is_output(tensor));
    outputs.map(TensorInfo::bytes).sum()
}
