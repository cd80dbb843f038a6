//! The memory model of GPU backends: replays a trace on a dry device.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::{Backend, DType};
use burn_router::Runner;
use cubecl::ir::DeviceProperties;
use firebox_trace::{
    Bytes, Category, CategoryBytes, Estimate, Footprint, Heap, MemoryModel, Moment, OpIndex,
    Origin, Paging, Step, TensorIndex, Trace,
};

use crate::device::{DryDevice, Lease, LeaseError, Monitor, Panicked};
use crate::execute::{execute, is_drain, is_settle, upload};
use crate::program::{Begin, End, Leftovers, Program, Templates, unaccounted};
use crate::target::Target;
use crate::translate::Types;
use crate::twin::DryTwin;
use crate::usage::Usage;

/// What running a trace reserves on a GPU, for the GPU backend `B`.
///
/// The trace is replayed on the [twin](DryTwin::Twin) of `B`: what existed before it first, then its steps. It may
/// have been recorded on another backend; element types are translated. [`Footprint::peak`] are the bytes of all pages
/// of the allocator, which is what the card has to have; [`Footprint::paging`] tells how they are used.
///
/// burn's fusion learns from what it has run, so a trace is replayed until fusion learns nothing more, or two replays in a row
/// reserve the same, at most [`MOST_REPLAYS`] times. If they never do, the most of them is reported, as a heuristic.
///
/// In [`Footprint::timeline`], `peak` are the bytes of all pages, and `live` are the bytes of the buffers as they were at
/// the last mark. burn runs operations later than the program asks for them, so that a page is opened at or after the
/// step that needs it.
///
/// Excludes what the driver keeps for itself ([`Card::context`](crate::Card::context)), and what other threads have
/// reserved beside the tensors of the trace.
pub struct Dry<B: DryTwin> {
    name: String,
    properties: Arc<DeviceProperties>,
    types: Types,
    tuned: Option<String>,
    replays: AtomicUsize,
    backend: PhantomData<fn() -> B>,
}

/// How often a trace is replayed at the most.
pub const MOST_REPLAYS: usize = 6;

/// In how many rounds the traces of a process follow each other at least.
const LEAST_ROUNDS: usize = 2;

/// How many rounds follow at the most until no page is opened any more: where a buffer is put depends on the gaps that earlier
/// steps have left.
const MORE_ROUNDS: usize = 2;

/// How much the guess that stands in for a replay that failed is widened: between tensors and what the allocator
/// reserves for them lay a factor of up to 2.4 when it was measured.
const WIDENING: f64 = 3.0;

/// Why there is no replay.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// There was no dry device.
    #[error(transparent)]
    NoDevice(#[from] LeaseError),
    /// burn panicked at an operation of the trace.
    #[error(transparent)]
    Panicked(#[from] Panicked),
}

impl<B: DryTwin> Dry<B> {
    /// The model for a device of which these properties are known: those of a [`Card`](crate::Card), or those that a
    /// real device reports.
    pub fn new(properties: DeviceProperties) -> Self {
        let name = format!("dry ({})", <B::Target as Target>::NAME.trim_start_matches("dry-"));
        let types = Types { bools: B::bool_store(), instead: Vec::new() };
        let (properties, replays) = (Arc::new(properties), AtomicUsize::new(0));
        Self { name, properties, types, tuned: None, replays, backend: PhantomData }
    }

    /// Says that traces come from a backend whose integers are `dtype` by default, such as `I64` on CPU backends. They
    /// become the default integers of `B`. Default: integers keep their type.
    pub fn with_traces_of_ints(mut self, dtype: DType) -> Self {
        let ours = <B::IntElem as burn_backend::Element>::dtype();
        self.types.instead.extend((dtype != ours).then_some((dtype, ours)));
        self
    }

    /// With burn's autotune: chooses what the tuner has on disk for a real device, called as CubeCL's `CubeTuneId` is written.
    /// What is not there it tunes and counts, as the real device would have to. Default: it tunes everything.
    pub fn with_choices_of(mut self, tuned: impl Into<String>) -> Self {
        self.tuned = Some(tuned.into());
        self
    }

    /// How many times this model has replayed a trace: what its footprints have cost.
    pub fn replays(&self) -> usize {
        self.replays.load(Ordering::Relaxed)
    }

    /// The footprint of `trace`, or why it cannot be found. [`MemoryModel::footprint`] guesses instead of failing.
    ///
    /// # Panics
    ///
    /// If the trace contradicts itself; [`Trace::check`] tells how.
    pub fn replay(&self, trace: &Trace) -> Result<Footprint, ReplayError> {
        self.replay_after(&[], trace)
    }

    /// The footprint of `trace` in a process that has run the traces of `before`: their pages stay open and count. The traces
    /// are run in turn until they open no page any more. A parameter or a part of the optimizer's state that one of them
    /// leaves is what the next one finds under the same label.
    ///
    /// # Panics
    ///
    /// As [`replay`](Self::replay).
    pub fn replay_after(&self, before: &[&Trace], trace: &Trace) -> Result<Footprint, ReplayError> {
        let traces = [before, &[trace]].concat();
        self.replay_until(Life::new(traces, &self.types, false), Bytes::MAX)
    }

    /// The footprint of the last trace of a life, which ends at the first round that reserves more than `enough`.
    fn replay_until(&self, mut life: Life, enough: Bytes) -> Result<Footprint, ReplayError> {
        let trace = life.last();
        if B::POOLED {
            return self.replay_on_pool(trace);
        }
        let lease = Lease::<B::Target>::take(&self.properties)?;
        let mut lease = lease.with_choices_of(self.tuned.as_deref());
        let mut last: Option<Replay> = None;
        let mut most: Option<Replay> = None;
        for _ in 0..MOST_REPLAYS {
            self.replays.fetch_add(1, Ordering::Relaxed);
            let replay = life.run::<B>(&mut lease, enough)?;
            let is_same = |last: &Replay| last.usage.peak == replay.usage.peak;
            if replay.settled || last.as_ref().is_some_and(is_same) {
                return Ok(self.report(trace, replay, Estimate::UpperBound));
            }
            if most.as_ref().is_none_or(|most| most.usage.peak < replay.usage.peak) {
                most = Some(replay.clone());
            }
            last = Some(replay);
        }
        let most = most.expect("a trace is replayed at least once");
        Ok(self.report(trace, most, Estimate::Heuristic))
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
        let paging = Paging {
            reserved: usage.peak,
            in_use: usage.most_in_use,
            pages: usage.pages,
            full: usage.full,
            largest_buffer: usage.largest,
            largest_page: Bytes::new(page / alignment * alignment),
            tunes: usage.tuned > 0,
            pool: None,
        };
        let peak = if paging.is_refused() { Bytes::MAX } else { usage.peak };
        // Pages that are larger than any step was found to need are needed at the step that needs most.
        let most = timeline.iter().map(|moment| moment.peak).max().unwrap_or_default();
        let most = most.min(usage.peak);
        let first = timeline.iter().position(|moment| moment.peak >= most).unwrap_or(0);
        let at = OpIndex(first as u32);
        Footprint {
            peak,
            at,
            op: trace.steps.get(first).map(name_of).unwrap_or_default(),
            baseline,
            kept: Bytes::ZERO,
            stays: Bytes::ZERO,
            categories: self.categories(trace, at, peak),
            timeline,
            estimate: if unaccounted.is_empty() { estimate } else { Estimate::Heuristic },
            unaccounted,
            paging: Some(paging),
        }
    }

    /// What the pages at the peak are for: the tensors that are alive there by their labels, and everything else, the
    /// space between them included, as temporaries.
    fn categories(&self, trace: &Trace, at: OpIndex, peak: Bytes) -> CategoryBytes {
        let mut categories = CategoryBytes::default();
        let mut left = peak;
        for tensor in trace.alive_before(OpIndex(at.0 + 1)) {
            let Some(category) = category(trace, tensor) else { continue };
            let info = trace.tensor(tensor);
            let dtype = self.types.translate(info.dtype);
            let bytes = Bytes::of_elements(&info.shape, dtype).min(left);
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

    fn footprint(&self, trace: &Trace) -> Footprint {
        self.footprint_after(&[], trace, Bytes::MAX)
    }

    fn keeps_pages(&self) -> bool {
        !B::POOLED
    }

    fn footprint_after(&self, before: &[&Trace], trace: &Trace, enough: Bytes) -> Footprint {
        let life = Life::new([before, &[trace]].concat(), &self.types, false);
        self.replay_until(life, enough).unwrap_or_else(|error| guess(trace, &error))
    }

    fn footprint_given_back(&self, before: &[&Trace], trace: &Trace, enough: Bytes) -> Footprint {
        let life = Life::new([before, &[trace]].concat(), &self.types, true);
        self.replay_until(life, enough).unwrap_or_else(|error| guess(trace, &error))
    }
}

/// The footprint on a heap, widened, where a replay failed.
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
    /// The buffers of what existed before.
    pub(crate) baseline: Bytes,
    pub(crate) timeline: Vec<Moment>,
    pub(crate) usage: Usage,
    /// Whether every round was run in the same way: fusion had nothing to learn.
    pub(crate) settled: bool,
}

/// The life of a process: traces, one after the other and round and round, as training and validation follow each other.
struct Life<'a> {
    types: &'a Types,
    /// Each with its descriptions.
    traces: Vec<(&'a Trace, Templates)>,
    /// Whether pages that nothing lies on are given back behind each trace.
    gives_back: bool,
}

impl<'a> Life<'a> {
    /// The life of at least one trace.
    fn new(traces: Vec<&'a Trace>, types: &'a Types, gives_back: bool) -> Self {
        let traces = traces.into_iter().map(|trace| (trace, Templates::new())).collect();
        Self { types, traces, gives_back }
    }

    fn last(&self) -> &'a Trace {
        self.traces.last().expect("a life has a trace").0
    }

    /// Lives once, until a round opens no page any more or more than `enough` is reserved, for [`LEAST_ROUNDS`] and
    /// at most [`MORE_ROUNDS`] behind them. Where pages are given back, what counts is what is open while the last trace runs.
    ///
    /// Other threads ask the device, too, and where they do decides about the batches in which it takes requests. In the first
    /// round the metrics read something wherever the program drains its queue. In the second one nobody does in the earlier half
    /// of a program; in the other half the metrics read, and loader threads upload a batch after each answer. Then come rounds in
    /// which batches begin elsewhere, as the target says. A round behind one that opened a page has uploads of one batch more.
    fn run<B: DryTwin>(
        &mut self,
        lease: &mut Lease<B::Target>,
        enough: Bytes,
    ) -> Result<Replay, Panicked> {
        let ((baseline, timeline, most, settled), usage) = lease.run(|device| {
            let monitor = Monitor::of(device);
            let runner = Runner::<B::Twin>::new(device.clone());
            let mut memory = (Bytes::ZERO, Vec::new());
            let mut latest = (Bytes::ZERO, Vec::new());
            let mut rounds: Vec<Vec<u64>> = Vec::new();
            let mut left = Leftovers::default();
            // Of all rounds the most that counts for the last trace.
            let mut most = Usage::default();
            for round in 0..LEAST_ROUNDS + MORE_ROUNDS {
                // What counts is how full pools are once they grow no more; that is never the first round.
                if round > 0 && <B::Target as Target>::SMALL_PAGE_VARIES {
                    monitor.look_for_room();
                }
                let mut calls = Vec::new();
                let mut open = Bytes::ZERO;
                let last = self.traces.len() - 1;
                for (at, (trace, templates)) in self.traces.iter_mut().enumerate() {
                    if self.gives_back {
                        B::Twin::memory_cleanup(device);
                        // What earlier traces had open is gone.
                        if at == last {
                            monitor.forget_peak();
                        }
                    }
                    open = monitor.usage().peak;
                    let program = Program::new(trace, self.types, templates, left);
                    let answers = if round == 0 { 0 } else { middle(trace) };
                    let passed = pass::<B>(device, &runner, &monitor, trace, answers, program);
                    left = passed.left;
                    calls.push(passed.calls);
                    latest = (passed.baseline, passed.timeline);
                }
                let usage = monitor.usage();
                let has_grown = usage.peak > most.peak;
                let grew = has_grown && usage.peak > open;
                memory = (latest.0, merge(memory.1, std::mem::take(&mut latest.1), grew));
                rounds.push(calls);
                if has_grown {
                    most = usage;
                }
                if most.peak > enough || round + 1 >= LEAST_ROUNDS && !has_grown {
                    break;
                }
            }
            drop(runner);
            B::Twin::sync(device).expect("a dry device does not fail");
            let settled = rounds.windows(2).all(|rounds| rounds[0] == rounds[1]);
            (memory.0, memory.1, most, settled)
        })?;
        let most_in_use = most.most_in_use.max(usage.most_in_use);
        let usage = Usage { peak: most.peak, pages: most.pages, most_in_use, ..usage };
        Ok(Replay { baseline, timeline, usage, settled })
    }
}

/// What is alive as in the latest round; pages as in the latest that opened one, which tells where it was opened.
fn merge(earlier: Vec<Moment>, latest: Vec<Moment>, opened: bool) -> Vec<Moment> {
    if opened || earlier.is_empty() {
        return latest;
    }
    let moments = earlier.into_iter().zip(latest);
    moments.map(|(earlier, latest)| Moment { live: latest.live, peak: earlier.peak }).collect()
}

/// What one program did to the memory.
struct Passed {
    /// The bytes of what existed before.
    baseline: Bytes,
    /// The memory at each step.
    timeline: Vec<Moment>,
    /// How much the device was asked for.
    calls: u64,
    left: Leftovers,
}

/// The middle one of a trace's drains, or its begin if it has none. In a trace of two iterations the second one begins there.
fn middle(trace: &Trace) -> usize {
    let drains = trace.steps.iter().enumerate().filter(|(_, step)| is_drain(step));
    let drains: Vec<usize> = drains.map(|(at, _)| at).collect();
    drains.get(drains.len() / 2).copied().unwrap_or_default()
}

/// Runs a program. From the step `others` on, another thread reads wherever the program drains its queue.
fn pass<B: DryTwin>(
    device: &DryDevice<B::Target>,
    runner: &Runner<B::Twin>,
    monitor: &Monitor<B::Target>,
    trace: &Trace,
    others: usize,
    (mut program, begin): (Program, Begin),
) -> Passed {
    begin.discarded.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    begin.existing.iter().for_each(|tensor| upload(runner, tensor));
    B::Twin::sync(device).expect("a dry device does not fail");
    let (baseline, before) = (monitor.usage().in_use, monitor.calls());
    let mut timeline = Vec::with_capacity(trace.steps.len());
    let mut live = baseline;
    for (at, step) in trace.steps.iter().enumerate() {
        let answers = at >= others;
        let instructions = program.step(step);
        // What waits for the device is not counted right: new buffers are missing, freed ones still count.
        if instructions.is_empty() && answers {
            live = monitor.usage().in_use;
        }
        instructions.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
        if is_settle(step) || answers && is_drain(step) {
            B::Twin::sync(device).expect("a dry device does not fail");
            live = monitor.usage().in_use;
        }
        timeline.push(Moment { live, peak: monitor.reserved() });
    }
    B::Twin::sync(device).expect("a dry device does not fail");
    let calls = monitor.calls() - before;
    // What burn had queued belongs to the last step.
    if let Some(last) = timeline.last_mut() {
        *last = Moment { live: monitor.usage().in_use, peak: monitor.reserved() };
    }
    let End { freed, left } = program.end(OpIndex(trace.steps.len() as u32));
    freed.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    B::Twin::sync(device).expect("a dry device does not fail");
    Passed { baseline, timeline, calls, left }
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
            Step::Call(call) if is_view(&call.name) => None,
            _ => Some(Category::Activation),
        },
    }
}

/// Whether a call makes a tensor that shares the buffer of its input.
fn is_view(call: &str) -> bool {
    let views = ["reshape", "swap_dims", "permute", "expand", "slice", "detach", "unfold"];
    views.iter().any(|view| call.ends_with(view))
}

fn name_of(step: &Step) -> String {
    match step {
        Step::Call(call) => call.name.to_string(),
        Step::Upload { .. } => "upload".into(),
        Step::Free(_) => "free".into(),
        Step::Read(_) => "read".into(),
        Step::Mark(_) => "mark".into(),
    }
}
