//! The memory model of GPU backends: replays a trace on a dry device.
//!
//! `replay/program.rs` turns the trace into instructions and `replay/execute.rs` runs them on the
//! twin. This file replays on burn's own pools and turns what the device measured into a footprint.
//! Backends with firebox's pool are replayed by `replay/pooled.rs`.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::{Backend, DType};
use burn_router::Runner;
use cubecl::ir::DeviceProperties;
use firebox_heap::Heap;
use firebox_trace::{
    Bytes, Category, CategoryBytes, Estimate, Footprint, Mark, MemoryModel, Moment, OpIndex,
    Origin, Paging, Question, Step, TensorIndex, TensorInfo, Trace,
};

use crate::device::{DryDevice, Lease, Monitor, Panicked};
use crate::registry::LeaseError;
use crate::replay::execute::{execute, is_drain, is_settle, upload};
use crate::replay::least::{Counted, Least, least};
use crate::replay::program::{Begin, End, Leftovers, Program, Templates, unaccounted};
use crate::replay::translate::Types;
use crate::server::usage::Usage;
use crate::target::Target;
use crate::twin::DryTwin;

/// What running a trace reserves on a GPU, for the GPU backend `B`.
///
/// The trace is replayed on the [twin](DryTwin::Twin) of `B`: first what existed before it, then
/// its steps. It may have been recorded on another backend; element types are translated.
/// [`Footprint::peak`] is the bytes of all pages of the allocator, which the card must have.
/// [`Footprint::paging`] says how they are used.
///
/// burn's fusion learns from what it has run, so a trace is replayed more than once. On firebox's
/// pool, until fusion learns nothing more or two replays in a row need the same, at most
/// [`MOST_REPLAYS`] times: the answer is exact. On burn's own pools twice in a row, or once if the
/// last iteration opens no page: where a buffer lies there depends on how threads interleave, so
/// the answer is a heuristic.
///
/// In [`Footprint::timeline`], `peak` is the bytes of all pages, and `live` is the bytes of the
/// buffers as of the latest mark. burn runs operations later than the program requests them, so a
/// page is opened at or after the step that needs it.
///
/// Excludes what the driver keeps for itself ([`Card::context`](crate::Card::context)) and what
/// other threads have reserved apart from the tensors of the trace.
pub struct Dry<B: DryTwin> {
    name: String,
    properties: Arc<DeviceProperties>,
    types: Types,
    tuned: Option<String>,
    replays: AtomicUsize,
    backend: PhantomData<fn() -> B>,
}

/// The maximum number of replays of a trace on firebox's pool.
pub const MOST_REPLAYS: usize = 6;

/// How often a trace runs in a replay at most. Where a buffer is placed depends on the gaps that
/// earlier steps have left.
const ROUNDS: usize = 2;

/// The factor by which the guess for a failed replay is widened. The measured factor between
/// tensors and what the allocator reserves for them was up to 2.4.
const WIDENING: f64 = 3.0;

/// The pages of the largest size that a CUDA card has memory for (`runtime.rs` of cubecl-cuda).
const LARGEST_PAGES: u64 = 4;

/// Why there is no replay.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// There was no dry device.
    #[error(transparent)]
    NoDevice(#[from] LeaseError),
    /// burn panicked at an operation of the trace.
    #[error(transparent)]
    Panicked(#[from] Panicked),
}

impl<B: DryTwin> Dry<B> {
    /// The model for a device with known properties: those of a [`Card`](crate::Card), or those
    /// that a real device reports.
    pub fn new(properties: DeviceProperties) -> Self {
        let name = format!("dry ({})", <B::Target as Target>::NAME.trim_start_matches("dry-"));
        let types = Types { bools: B::bool_store(), instead: Vec::new() };
        let (properties, replays) = (Arc::new(properties), AtomicUsize::new(0));
        Self { name, properties, types, tuned: None, replays, backend: PhantomData }
    }

    /// Sets the default integer type of the backend that traces come from to `dtype`, such as `I64`
    /// on CPU backends. It is replaced by the default integer type of `B`. Default: integers keep
    /// their type.
    pub fn with_traces_of_ints(mut self, dtype: DType) -> Self {
        let ours = <B::IntElem as burn_backend::Element>::dtype();
        self.types.instead.extend((dtype != ours).then_some((dtype, ours)));
        self
    }

    /// With burn's autotune: chooses what the tuner has on disk for a real device. `tuned` is the
    /// device's name as CubeCL's `CubeTuneId` is written. What is not on disk is tuned and counted,
    /// as the real device would have to. Default: everything is tuned.
    pub fn with_choices_of(mut self, tuned: impl Into<String>) -> Self {
        self.tuned = Some(tuned.into());
        self
    }

    /// The number of replays this model has run so far: the cost of its footprints.
    pub fn replays(&self) -> usize {
        self.replays.load(Ordering::Relaxed)
    }

    /// The footprint of `trace`. [`MemoryModel::footprint`] guesses instead of failing.
    ///
    /// # Errors
    ///
    /// If there is no dry device, or if burn panicked. A trace that contradicts itself also ends in
    /// [`ReplayError::Panicked`]; [`Trace::check`] says how it contradicts itself.
    pub fn replay(&self, trace: &Trace) -> Result<Footprint, ReplayError> {
        self.replay_within(trace, Bytes::MAX)
    }

    /// The footprint of a trace. On burn's pools, a replay ends once more than `enough` is
    /// reserved.
    fn replay_within(&self, trace: &Trace, enough: Bytes) -> Result<Footprint, ReplayError> {
        if B::POOLED {
            return self.replay_on_pool(trace);
        }
        let lease = Lease::<B::Target>::take(&self.properties)?;
        let mut lease = lease.with_choices_of(self.tuned.as_deref());
        self.count_replay();
        let replay = lease.run(|device| self.run(device, trace, enough))?.0;
        Ok(self.report(trace, replay, Estimate::Heuristic))
    }

    /// Runs a trace [`ROUNDS`] times in a row, or once if its last iteration opens no page.
    fn run(&self, device: &DryDevice<B::Target>, trace: &Trace, enough: Bytes) -> Replay {
        let monitor = Monitor::of(device);
        let runner = Runner::<B::Twin>::new(device.clone());
        let mut templates = Templates::new();
        let mut left = Leftovers::default();
        let (mut baseline, mut timeline) = (Bytes::ZERO, Vec::new());
        for _ in 0..ROUNDS {
            let before = monitor.reserved();
            let program = Program::new(trace, &self.types, &mut templates, left);
            let passed = pass::<B>(device, &runner, &monitor, trace, program);
            left = passed.left;
            baseline = passed.baseline;
            let reserved = monitor.reserved();
            let is_settled = reserved_before_latest(trace, &passed.timeline) == Some(reserved);
            timeline = merge(timeline, passed.timeline, reserved > before);
            if reserved > enough || is_settled {
                break;
            }
        }
        drop(runner);
        B::Twin::sync(device).expect("a dry device does not fail");
        Replay { baseline, timeline, usage: monitor.usage() }
    }

    pub(crate) fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    pub(crate) fn types(&self) -> &Types {
        &self.types
    }

    pub(crate) fn tuned(&self) -> Option<&str> {
        self.tuned.as_deref()
    }

    pub(crate) fn count_replay(&self) {
        self.replays.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn report(&self, trace: &Trace, replay: Replay, estimate: Estimate) -> Footprint {
        let unaccounted = unaccounted(trace);
        let Replay { baseline, timeline, usage, .. } = replay;
        let page = match B::POOLED && !<B::Target as Target>::LIMITS_BINDINGS {
            true => u64::MAX,
            false => self.properties.memory.max_page_size,
        };
        let alignment = self.properties.memory.alignment;
        let in_use = usage.most_in_use;
        let paging = Paging {
            reserved: usage.peak,
            in_use,
            pages: usage.pages,
            largest_buffer: usage.largest,
            largest_page: match page {
                u64::MAX => Bytes::MAX,
                page => Bytes::new(page / alignment * alignment),
            },
            tunes: usage.tuned > 0,
            pool: None,
        };
        let peak = if paging.is_refused() { Bytes::MAX } else { usage.peak };
        // If pages are larger than any step was found to need, they count at the step that needs
        // most.
        let most = timeline.iter().map(|moment| moment.peak).max().unwrap_or_default();
        let most = most.min(usage.peak);
        let first = timeline.iter().position(|moment| moment.peak >= most).unwrap_or(0);
        let at = OpIndex(first as u32);
        Footprint {
            peak,
            at,
            op: trace.steps.get(first).map(|step| step.name().to_owned()).unwrap_or_default(),
            baseline,
            kept: Bytes::ZERO,
            stays: Bytes::ZERO,
            categories: self.categories(trace, at, peak, in_use),
            timeline,
            estimate: if unaccounted.is_empty() { estimate } else { Estimate::Heuristic },
            unaccounted,
            paging: Some(paging),
        }
    }

    /// The most that a trace may need at least and is still replayed.
    ///
    /// CubeCL 0.10 panics at tensors whose elements are counted with 64 bits. A trace with such a
    /// tensor is not replayed if it certainly needs more than the device has, whoever asks.
    fn worth_a_replay(&self, trace: &Trace, enough: Bytes) -> Bytes {
        let device = Bytes::new(self.properties.memory.max_page_size) * LARGEST_PAGES;
        let is_long = |tensor: &TensorInfo| u32::try_from(tensor.shape.num_elements()).is_err();
        if trace.tensors.iter().any(is_long) { enough.min(device) } else { enough }
    }

    /// The footprint of a trace that is not replayed: what it needs at least.
    fn not_replayed(&self, trace: &Trace, least: Least) -> Footprint {
        let Least { bytes: peak, at } = least;
        let existing = trace.existing().map(|tensor| trace.tensor(tensor));
        let baseline = existing.map(|tensor| self.types.bytes(tensor)).sum();
        Footprint {
            peak,
            at,
            op: trace.steps.get(at.0 as usize).map_or("", Step::name).to_owned(),
            baseline,
            categories: self.categories(trace, at, peak, peak),
            timeline: vec![Moment { live: baseline, peak }; trace.steps.len()],
            estimate: Estimate::LowerBound,
            ..Footprint::default()
        }
    }

    /// What the pages at the peak are for. Tensors that are alive there count by their labels, what
    /// else is in use as temporaries.
    fn categories(&self, trace: &Trace, at: OpIndex, peak: Bytes, in_use: Bytes) -> CategoryBytes {
        let mut categories = CategoryBytes::default();
        let mut left = in_use.min(peak);
        categories.add(Category::Unused, peak - left);
        for tensor in trace.alive_before(OpIndex(at.0 + 1)) {
            let Some(category) = category(trace, tensor) else { continue };
            let bytes = self.types.bytes(trace.tensor(tensor)).min(left);
            categories.add(category, bytes);
            left -= bytes;
        }
        categories.add(Category::Temporary, left);
        categories
    }
}

impl<B: DryTwin> MemoryModel for Dry<B> {
    fn name(&self) -> &str {
        &self.name
    }

    fn answer(&self, question: &Question<'_>) -> Footprint {
        let Question { trace, enough } = *question;
        let least = least(trace, &self.types, Counted::AsRecorded);
        if least.bytes > self.worth_a_replay(trace, enough) {
            return self.not_replayed(trace, least);
        }
        self.replay_within(trace, enough).unwrap_or_else(|error| guess(trace, &error))
    }

    fn at_least(&self, trace: &Trace) -> Bytes {
        least(trace, &self.types, Counted::Recomputed).bytes
    }

    fn keeps_pages(&self) -> bool {
        !B::POOLED
    }
}

/// The widened footprint on a heap, used when a replay failed.
fn guess(trace: &Trace, error: &ReplayError) -> Footprint {
    let mut footprint = Heap::simple().footprint(trace);
    let widened = footprint.peak.scale(WIDENING);
    footprint.categories.add(Category::Temporary, widened - footprint.peak);
    footprint.peak = widened;
    footprint.estimate = Estimate::Heuristic;
    footprint.unaccounted.push(error.to_string());
    footprint
}

/// What one replay measured.
#[derive(Clone)]
pub(crate) struct Replay {
    /// The bytes of the buffers that existed before the trace.
    pub(crate) baseline: Bytes,
    pub(crate) timeline: Vec<Moment>,
    pub(crate) usage: Usage,
}

/// Live bytes come from the latest round. Pages come from the latest round that opened one, since
/// it shows where the page was opened.
fn merge(earlier: Vec<Moment>, latest: Vec<Moment>, opened: bool) -> Vec<Moment> {
    if opened || earlier.is_empty() {
        return latest;
    }
    let moments = earlier.into_iter().zip(latest);
    moments.map(|(earlier, latest)| Moment { live: latest.live, peak: earlier.peak }).collect()
}

/// What was reserved before the last iteration of a trace. `None` if it has only one.
fn reserved_before_latest(trace: &Trace, timeline: &[Moment]) -> Option<Bytes> {
    let is_end = |step: &Step| step.is_mark(&Mark::IterationEnd);
    let ends = trace.steps.iter().zip(timeline).filter(|(step, _)| is_end(step));
    ends.rev().nth(1).map(|(_, moment)| moment.peak)
}

/// What one program did to the memory.
struct Passed {
    /// The bytes of what existed before.
    baseline: Bytes,
    /// The memory at each step.
    timeline: Vec<Moment>,
    left: Leftovers,
}

/// Runs a program. Other threads, such as the metrics thread, read wherever it drains its queue.
fn pass<B: DryTwin>(
    device: &DryDevice<B::Target>,
    runner: &Runner<B::Twin>,
    monitor: &Monitor<B::Target>,
    trace: &Trace,
    (mut program, begin): (Program, Begin),
) -> Passed {
    begin.discarded.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    begin.existing.iter().for_each(|tensor| upload(runner, tensor));
    B::Twin::sync(device).expect("a dry device does not fail");
    let baseline = monitor.usage().in_use;
    let mut timeline = Vec::with_capacity(trace.steps.len());
    let mut live = baseline;
    for step in &trace.steps {
        let instructions = program.step(step);
        // Work that waits for the device is miscounted: new buffers are missing, and freed ones
        // still count.
        if instructions.is_empty() {
            live = monitor.usage().in_use;
        }
        instructions.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
        if is_settle(step) || is_drain(step) {
            B::Twin::sync(device).expect("a dry device does not fail");
            live = monitor.usage().in_use;
        }
        timeline.push(Moment { live, peak: monitor.reserved() });
    }
    B::Twin::sync(device).expect("a dry device does not fail");
    // What burn had queued belongs to the last step.
    if let Some(last) = timeline.last_mut() {
        *last = Moment { live: monitor.usage().in_use, peak: monitor.reserved() };
    }
    let End { freed, left } = program.end(OpIndex(trace.steps.len() as u32));
    freed.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    B::Twin::sync(device).expect("a dry device does not fail");
    Passed { baseline, timeline, left }
}

fn category(trace: &Trace, tensor: TensorIndex) -> Option<Category> {
    let info = trace.tensor(tensor);
    if let Some(label) = &info.label {
        return Some(label.category);
    }
    match info.origin {
        Origin::Existing => Some(Category::Input),
        Origin::Made(at) => match &trace.steps[at.0 as usize] {
            Step::Upload { .. } => Some(Category::Input),
            Step::Call(call) if call.is_view() => None,
            _ => Some(Category::Activation),
        },
    }
}
