//! The memory model of backends with firebox's pool: the same pool in front of a dry device, with
//! pages that have no end.
//!
//! What is used of a page is the size that the page must have. The real device's pool places the
//! same requests in the same order in the same way. `model.rs` calls this file for such backends.

use burn_backend::Backend;
use burn_router::Runner;
use firebox_pool::{
    Fit, Lifetime, Loop, Measure, Packing, Pages, Region, SMALL_PAGE, Sequence, pack,
};
use firebox_trace::{
    Bytes, Category, Estimate, Footprint, Label, Mark, Moment, OpIndex, PoolPages, Step,
    TensorIndex, Trace,
};

use crate::device::{DryDevice, Lease, Monitor};
use crate::replay::execute::{execute, is_drain, is_settle, upload};
use crate::replay::model::{Dry, MOST_REPLAYS, Replay, ReplayError};
use crate::replay::program::{Begin, End, Leftovers, Program, Templates};
use crate::server::usage::Usage;
use crate::target::Target;
use crate::twin::DryTwin;

/// The margin of the page of steps while kernels are chosen, as a divisor: a fourth of the page.
///
/// A real device tries all candidates, and may choose another than the one counted here. Later
/// buffers then lie elsewhere. Up to 0.18 of the page was missing.
///
/// The page for small buffers always has this margin, and at least [`SMALL_PAGE`] bytes. Small
/// buffers are many, and cost little.
const UNSURE_SHARE: u64 = 4;

/// How often a trace runs in one life. From the second time on, what the trace leaves lies where
/// steps have placed it.
const ROUNDS: usize = 2;

impl<B: DryTwin> Dry<B> {
    /// The footprint of `trace`, replayed on a pool until fusion learns nothing more or two replays
    /// need the same pages.
    pub(crate) fn replay_on_pool(&self, trace: &Trace) -> Result<Footprint, ReplayError> {
        let (lived, below, estimate) = self.lives(trace, |last, lived| last.high == lived.high)?;
        let alignment = self.properties().memory.alignment.max(1);
        let reads = trace.steps.iter().any(|step| matches!(step, Step::Read(_)));
        let largest_page = B::Target::largest_page(self.properties());
        let (replay, high) = lived.with(below, reads, alignment, largest_page);
        let bytes = |region| Bytes::new(high.of(region));
        let pool = PoolPages {
            lasting: bytes(Region::Lasting),
            step: bytes(Region::Step),
            small: bytes(Region::Small),
            beside: bytes(Region::Beside),
            below: replay.usage.peak - Bytes::new(high.total()),
            step_from: Bytes::new(high.step_from),
        };
        let mut footprint = self.report(trace, replay, estimate);
        if let Some(paging) = &mut footprint.paging {
            paging.pool = Some(pool);
        }
        Ok(footprint)
    }

    /// The places and lifetimes of the buffers of `trace` when it runs twice in a row, for backends
    /// with firebox's pool ([`DryTwin::POOLED`]). None for others. Places are those of best fit on
    /// pages without an end.
    ///
    /// # Errors
    ///
    /// As [`replay`](Self::replay).
    pub fn lifetimes(&self, trace: &Trace) -> Result<Lifetimes, ReplayError> {
        if !B::POOLED {
            return Ok(Lifetimes::default());
        }
        let (lived, ..) = self.lives(trace, |_, _| false)?;
        Ok(Lifetimes { buffers: lived.lifetimes, requests: lived.requests })
    }

    /// The last of the replays of `trace`, which end once fusion learns nothing more or two in a
    /// row are the same.
    fn lives(
        &self,
        trace: &Trace,
        are_same: fn(&Lived, &Lived) -> bool,
    ) -> Result<(Lived, Usage, Estimate), ReplayError> {
        let lease = Lease::<B::Target>::take(self.properties())?;
        let mut lease = lease.with_choices_of(self.tuned());
        let mut templates = Templates::new();
        let mut last: Option<(Lived, Usage, Estimate)> = None;
        for _ in 0..MOST_REPLAYS {
            self.count_replay();
            let (lived, below) = lease.run(|device| self.live(device, trace, &mut templates))?;
            let ends = lived.settled || last.is_some_and(|(last, ..)| are_same(&last, &lived));
            let estimate = if ends { Estimate::Exact } else { Estimate::Heuristic };
            last = Some((lived, below, estimate));
            if ends {
                break;
            }
        }
        Ok(last.expect("a trace is replayed at least once"))
    }

    fn live(
        &self,
        device: &DryDevice<B::Target>,
        trace: &Trace,
        templates: &mut Templates,
    ) -> Lived {
        let monitor = Monitor::of(device);
        monitor.begin_pool();
        let runner = Runner::<B::Twin>::new(device.clone());
        let mut left = Leftovers::default();
        let mut rounds = Vec::new();
        let has_stepped = trace.steps.iter().any(|step| step.is_mark(&Mark::SteppedBefore));
        let (mut baseline, mut timeline, mut parts) = (Bytes::ZERO, Vec::new(), Parts::begin(0));
        let (mut high, mut most_in_use, mut requests) = (Pages::default(), 0, Vec::new());
        for round in 0..ROUNDS {
            let (program, begin) = Program::new(trace, self.types(), templates, left);
            let before = monitor.calls();
            let passed = pass::<B>(device, &runner, &monitor, trace, round == 0, (program, begin));
            requests.push(passed.requests);
            Passed { baseline, timeline, left, parts, .. } = passed;
            rounds.push(monitor.calls() - before);
            let mut of_round = monitor.pool(Measure::high);
            if round == 0 && has_stepped {
                // An uploaded tensor has another layout than one that a step made.
                of_round.lasting = 0;
            }
            high = high.max(of_round);
            most_in_use = most_in_use.max(monitor.pool(Measure::memory).most_in_use);
        }
        drop(runner);
        B::Twin::sync(device).expect("a dry device does not fail");
        let settled = rounds.windows(2).all(|rounds| rounds[0] == rounds[1]);
        Lived {
            baseline,
            timeline,
            settled,
            high,
            most_in_use: Bytes::new(most_in_use),
            largest: Bytes::new(monitor.pool(Measure::memory).largest),
            lifetimes: monitor.pool(Measure::lifetimes),
            requests,
            parts,
        }
    }
}

/// The buffers of a trace that ran several times in a row.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    /// Places and lifetimes, by requests.
    pub buffers: Vec<Lifetime>,
    /// For each run, how many requests there had been when it began, when all tensors existed that
    /// exist before its first step, and after each of its steps. Where operations are fused, a
    /// buffer may be requested later than by the step that makes its tensor.
    pub requests: Vec<Vec<u32>>,
}

/// What one life measured of the pool.
struct Lived {
    baseline: Bytes,
    timeline: Vec<Moment>,
    settled: bool,
    high: Pages,
    most_in_use: Bytes,
    largest: Bytes,
    lifetimes: Vec<Lifetime>,
    /// Of each round.
    requests: Vec<Vec<u32>>,
    /// Those of the last round.
    parts: Parts,
}

impl Lived {
    /// Adds what the runtime below has reserved, and the margins. The page for steps is the
    /// smallest on which a way to place the buffers was found.
    fn with(self, below: Usage, reads: bool, alignment: u64, largest_page: u64) -> (Replay, Pages) {
        let Self { baseline, mut timeline, mut high, most_in_use, .. } = self;
        let Parts { units, loops, .. } = &self.parts;
        let of_region = |region| Sequence::of(&self.lifetimes, region, units, loops);
        let [steps, small] = [Region::Step, Region::Small].map(of_region);
        let used = |sequence: &Sequence| sequence.place(u64::MAX, Fit::Best).unwrap_or_default();
        (high.step, high.small) = (high.step.max(used(&steps)), high.small.max(used(&small)));
        let with_margin = |bytes: u64| {
            let margin = if below.tuned > 0 { bytes / UNSURE_SHARE } else { 0 };
            (bytes + margin).next_multiple_of(alignment)
        };
        high.step = with_margin(high.step);
        // A step that reads values is planned in parts, which all must use the same rule.
        if !reads
            && let Packing { page, fit: fit @ Fit::TwoEnded { from } } = pack(&steps, alignment)
        {
            let page = with_margin(page);
            let fits = page < high.step && page <= largest_page;
            // Places follow from the size of the page, margin included.
            if fits && steps.place(page, fit).is_some() {
                (high.step, high.step_from) = (page, from);
            }
        }
        high.small = (high.small + high.small / UNSURE_SHARE).max(SMALL_PAGE);
        high.small = high.small.next_multiple_of(alignment);
        let peak = Bytes::new(high.total()) + below.peak;
        timeline.iter_mut().for_each(|moment| moment.peak = moment.peak.min(peak));
        let most_in_use = most_in_use + below.most_in_use;
        let usage = Usage { reserved: peak, peak, most_in_use, largest: self.largest, ..below };
        (Replay { baseline, timeline, usage }, high)
    }
}

/// What one round measured.
struct Passed {
    baseline: Bytes,
    timeline: Vec<Moment>,
    left: Leftovers,
    parts: Parts,
    /// See [`Lifetimes::requests`].
    requests: Vec<u32>,
}

/// Runs a program up to the end of its last iteration. Before it, puts the lasting buffers in
/// order, as when training begins.
fn pass<B: DryTwin>(
    device: &DryDevice<B::Target>,
    runner: &Runner<B::Twin>,
    monitor: &Monitor<B::Target>,
    trace: &Trace,
    is_first: bool,
    (mut program, begin): (Program, Begin),
) -> Passed {
    let requested = || monitor.pool(|pool| pool.requests());
    let enter = |region| monitor.pool(|pool| pool.enter(region));
    begin.discarded.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    let mut requests = vec![requested()];
    let existing = trace.existing().filter(|tensor| !program.is_taken_over(*tensor));
    for (index, tensor) in existing.zip(&begin.existing) {
        enter(if lasts(trace, index) { Region::Lasting } else { Region::Step });
        upload(runner, tensor);
    }
    enter(Region::Step);
    B::Twin::sync(device).expect("a dry device does not fail");
    let settled: &[Region] = match is_first {
        true => &[Region::Lasting, Region::Small],
        false => &[Region::Lasting],
    };
    monitor.pool(|pool| pool.settle(settled));
    let baseline = Bytes::new(monitor.pool(Measure::memory).in_use);
    let mut parts = Parts::begin(requested());
    requests.push(requested());
    let trains = trace.steps.iter().any(|step| step.is_mark(&Mark::IterationEnd));
    let mut timeline = Vec::with_capacity(trace.steps.len());
    let mut live = baseline;
    // A rehearsal drops its model after the last iteration, but a run keeps it.
    let end = trace.steps.iter().rposition(|step| step.is_mark(&Mark::IterationEnd));
    let end = end.map_or(trace.steps.len(), |at| at + 1);
    for step in &trace.steps[..end] {
        let instructions = program.step(step);
        instructions.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
        if is_settle(step) || is_drain(step) {
            B::Twin::sync(device).expect("a dry device does not fail");
            live = Bytes::new(monitor.pool(Measure::memory).in_use);
        }
        parts.note(step, trains, requested);
        if step.is_mark(&Mark::OptimizerStep) {
            enter(Region::Lasting);
        } else if step.is_mark(&Mark::IterationEnd) {
            enter(Region::Step);
        }
        timeline.push(Moment { live, peak: Bytes::new(monitor.pool(Measure::high).total()) });
        requests.push(requested());
    }
    B::Twin::sync(device).expect("a dry device does not fail");
    // What burn had queued belongs to the last step.
    if timeline.pop().is_some() {
        let live = Bytes::new(monitor.pool(Measure::memory).in_use);
        let last = Moment { live, peak: Bytes::new(monitor.pool(Measure::high).total()) };
        timeline.resize(trace.steps.len(), last);
    }
    let End { freed, left } = program.end(OpIndex(end as u32));
    freed.into_iter().for_each(|instruction| execute::<B>(runner, device, instruction));
    enter(Region::Step);
    B::Twin::sync(device).expect("a dry device does not fail");
    Passed { baseline, timeline, left, parts, requests }
}

/// The parts of a round, by the numbers of requests.
struct Parts {
    /// The last requests of the parts that repeat, and the last request before them. In training a
    /// part is an iteration, in validation a micro-step.
    units: Vec<u32>,
    /// The last requests of the micro-steps, and the last request before them.
    micro_steps: Vec<u32>,
    loops: Vec<Loop>,
}

impl Parts {
    fn begin(requests: u32) -> Self {
        Self { units: vec![requests], micro_steps: vec![requests], loops: Vec::new() }
    }

    /// Notes what ends with a step.
    fn note(&mut self, step: &Step, trains: bool, requests: impl Fn() -> u32) {
        match step {
            Step::Mark(Mark::MicroStepEnd(more)) => {
                self.micro_steps.push(requests());
                if let [.., first, from, middle, to] = self.micro_steps[..] {
                    self.loops.push(Loop { first, from, middle, to, times: *more });
                }
                if !trains {
                    self.units.push(requests());
                }
            }
            Step::Mark(Mark::IterationEnd) => {
                self.micro_steps = vec![requests()];
                self.units.push(requests());
            }
            _ => {}
        }
    }
}

/// Whether a tensor that exists before a step existed before training, or is kept from step to
/// step.
fn lasts(trace: &Trace, tensor: TensorIndex) -> bool {
    let label = trace.tensor(tensor).label.as_deref();
    label.is_some_and(|Label { category, name }| {
        matches!(category, Category::Parameter | Category::OptimizerState)
            || **name == *Label::BEING_SAVED
    })
}
