//! The memory model of GPU backends: replays a trace on a dry device.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_backend::{Backend, DType, TensorData};
use burn_ir::{BackendIr, TensorIr};
use burn_router::{Runner, RunnerClient};
use burn_std::{Bytes as HostBytes, future::block_on};
use cubecl::ir::DeviceProperties;
use firebox_trace::{
    Bytes, Category, CategoryBytes, Estimate, Footprint, Heap, MemoryModel, Moment, OpIndex,
    Origin, Paging, Step, TensorIndex, Trace,
};

use crate::device::{DryDevice, Lease, LeaseError, Monitor, Panicked, stream_of};
use crate::program::{Instruction, Program, Templates};
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
/// A tensor that a loader thread made ([`TensorInfo::worker`](firebox_trace::TensorInfo::worker)) is put into pools of that
/// thread's own, as on a real device.
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

/// How often the traces of a process follow each other at the most until they open no page any more: where a buffer is put
/// depends on the gaps that earlier steps have left.
const MOST_ROUNDS: usize = 4;

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
        let types = Types { bools: B::bool_store(), ints: None };
        let (properties, replays) = (Arc::new(properties), AtomicUsize::new(0));
        Self { name, properties, types, tuned: None, replays, backend: PhantomData }
    }

    /// Says that traces come from a backend whose integers are `dtype` by default, such as `I64` on CPU backends. They
    /// become the default integers of `B`. Default: integers keep their type.
    pub fn with_traces_of_ints(mut self, dtype: DType) -> Self {
        let ours = <B::IntElem as burn_backend::Element>::dtype();
        self.types.ints = (dtype != ours).then_some((dtype, ours));
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
        let mut life = Life::new([before, &[trace]].concat(), self.types);
        let lease = Lease::<B::Target>::take(&self.properties)?;
        let mut lease = lease.with_choices_of(self.tuned.as_deref());
        let mut last: Option<Replay> = None;
        let mut most: Option<Replay> = None;
        for _ in 0..MOST_REPLAYS {
            self.replays.fetch_add(1, Ordering::Relaxed);
            let replay = life.run::<B>(&mut lease)?;
            let is_same = |last: &Replay| last.usage.peak == replay.usage.peak;
            if replay.settled || last.as_ref().is_some_and(is_same) {
                return Ok(self.report(trace, replay, life.unaccounted(), Estimate::UpperBound));
            }
            if most.as_ref().is_none_or(|most| most.usage.peak < replay.usage.peak) {
                most = Some(replay.clone());
            }
            last = Some(replay);
        }
        let most = most.expect("a trace is replayed at least once");
        Ok(self.report(trace, most, life.unaccounted(), Estimate::Heuristic))
    }

    fn report(
        &self,
        trace: &Trace,
        replay: Replay,
        unaccounted: Vec<String>,
        estimate: Estimate,
    ) -> Footprint {
        let Replay { baseline, timeline, usage, .. } = replay;
        let page = self.properties.memory.max_page_size;
        let alignment = self.properties.memory.alignment;
        let paging = Paging {
            reserved: usage.peak,
            in_use: usage.most_in_use,
            pages: usage.pages,
            full: usage.full,
            largest_buffer: usage.largest,
            largest_page: Bytes::new(page / alignment * alignment),
        };
        let peak = if paging.is_refused() { Bytes::MAX } else { usage.peak };
        let first = timeline.iter().position(|moment| moment.peak >= usage.peak).unwrap_or(0);
        let at = OpIndex(first as u32);
        Footprint {
            peak,
            at,
            op: trace.steps.get(first).map(name_of).unwrap_or_default(),
            baseline,
            kept: Bytes::ZERO,
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
            let mut info = trace.tensor(tensor).clone();
            info.dtype = self.types.translate(info.dtype);
            let bytes = info.bytes().min(left);
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
        self.footprint_after(&[], trace)
    }

    fn footprint_after(&self, before: &[&Trace], trace: &Trace) -> Footprint {
        match self.replay_after(before, trace) {
            Ok(footprint) => footprint,
            Err(error) => guess(trace, &error),
        }
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
struct Replay {
    /// The buffers of what existed before.
    baseline: Bytes,
    timeline: Vec<Moment>,
    usage: Usage,
    /// Whether every round was run in the same way: fusion had nothing to learn.
    settled: bool,
}

/// The life of a process: traces, one after the other and round and round, as training and validation follow each other.
struct Life<'a> {
    traces: Vec<&'a Trace>,
    types: Types,
    /// For each trace.
    templates: Vec<Templates>,
    /// The programs of the rounds so far: each goes on with what the one before it left.
    programs: Vec<Program>,
}

impl<'a> Life<'a> {
    fn new(traces: Vec<&'a Trace>, types: Types) -> Self {
        let templates = traces.iter().map(|_| Templates::new()).collect();
        Self { traces, types, templates, programs: Vec::new() }
    }

    /// Lives once, until a round opens no page any more, at most [`MOST_ROUNDS`] rounds.
    fn run<B: DryTwin>(&mut self, lease: &mut Lease<B::Target>) -> Result<Replay, Panicked> {
        let ((baseline, timeline, settled), usage) = lease.run(|device| {
            let monitor = Monitor::of(device);
            let runner = Runner::<B::Twin>::new(device.clone());
            let mut memory = (Bytes::ZERO, Vec::new());
            let mut rounds: Vec<Vec<u64>> = Vec::new();
            for round in 0..MOST_ROUNDS {
                let before = monitor.reserved();
                // What counts is how full pools are once they grow no more; that is never the first round.
                if round > 0 {
                    monitor.look_for_room();
                }
                let mut calls = Vec::new();
                for place in 0..self.traces.len() {
                    let open = monitor.reserved();
                    let program = self.program(round * self.traces.len() + place);
                    let (baseline, moments, made) = pass::<B>(device, &runner, &monitor, program);
                    calls.push(made);
                    if place + 1 == self.traces.len() {
                        let grew = monitor.reserved() > open;
                        memory = (baseline, merge(memory.1, moments, grew));
                    }
                }
                rounds.push(calls);
                if round > 0 && monitor.reserved() == before {
                    break;
                }
            }
            drop(runner);
            B::Twin::sync(device).expect("a dry device does not fail");
            let settled = rounds.windows(2).all(|rounds| rounds[0] == rounds[1]);
            (memory.0, memory.1, settled)
        })?;
        Ok(Replay { baseline, timeline, usage, settled })
    }

    fn program(&mut self, number: usize) -> &Program {
        if number == self.programs.len() {
            let place = number % self.traces.len();
            let (trace, templates) = (self.traces[place], &mut self.templates[place]);
            let program = Program::new(trace, self.types, templates, self.programs.last());
            self.programs.push(program);
        }
        &self.programs[number]
    }

    /// The names of the calls that cannot be run.
    fn unaccounted(&self) -> Vec<String> {
        self.programs
            .get(self.traces.len() - 1)
            .map(|program| program.unaccounted.clone())
            .unwrap_or_default()
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

/// Runs a program, and gives the bytes of what existed before, the memory at each step, and how much the device was asked
/// for.
fn pass<B: DryTwin>(
    device: &DryDevice<B::Target>,
    runner: &Runner<B::Twin>,
    monitor: &Monitor<B::Target>,
    program: &Program,
) -> (Bytes, Vec<Moment>, u64) {
    program.discarded.iter().for_each(|instruction| execute(runner, instruction));
    for (tensor, worker) in &program.existing {
        stream_of(*worker).executes(|| upload(runner, tensor));
    }
    let (baseline, before) = (monitor.usage().in_use, monitor.calls());
    let mut timeline = Vec::with_capacity(program.steps.len());
    let mut live = baseline;
    for step in &program.steps {
        step.iter().for_each(|instruction| execute(runner, instruction));
        if step.is_empty() {
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
    program.ends.iter().for_each(|instruction| execute(runner, instruction));
    B::Twin::sync(device).expect("a dry device does not fail");
    (baseline, timeline, calls)
}

fn execute<B: BackendIr>(runner: &Runner<B>, instruction: &Instruction) {
    match instruction {
        Instruction::Run(operation) => runner.register_op(operation.as_ref().clone()),
        Instruction::Upload(tensor) => upload(runner, tensor),
        Instruction::Read(tensor) => drop(block_on(runner.read_tensor_async(tensor.clone()))),
        Instruction::Drain => runner.sync().expect("a dry device does not fail"),
    }
}

/// Makes a tensor as burn's backend makes one from host data: the buffer is asked for at once, not when fusion gets to
/// it. The data itself is not looked at on a dry device, and so there is none.
fn upload<B: BackendIr>(runner: &Runner<B>, tensor: &TensorIr) {
    let (shape, dtype) = (tensor.shape.clone(), tensor.dtype);
    let bytes = HostBytes::from_bytes_vec(Vec::new());
    runner.register_tensor_data_id(tensor.id, TensorData { bytes, shape, dtype });
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
