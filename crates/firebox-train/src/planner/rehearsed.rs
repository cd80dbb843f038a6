//! What a rehearsal needs: its footprint under the conditions of the run, with what lives beside
//! its steps. Where it does not fit and that is allowed, tensors are recomputed.

use std::collections::BTreeSet;

use firebox_lazy::{
    HOST_BYTES_PER_CALL, Rehearsal, host_bytes_of_descriptions, host_bytes_of_rehearsal,
};
use firebox_trace::{
    Bytes, Category, Difference, Estimate, Footprint, Mark, MemoryModel, ModuleBytes, Modules,
    Nonlinear, OpIndex, Origin, Paging, Question, Step, TensorIndex, TensorInfo, Trace,
};

use crate::planner::ledger::{Ledger, Left};
use crate::planner::overhead::{
    Overhead, OverheadBytes, add_outputs_of_before, arrivals, first_batch_bytes, guesses_outputs,
    idle_state, outputs_held,
};
use crate::planner::parked::park_state;
use crate::planner::recompute::{Attempt, Least, Passes, Recomputed};
use crate::planner::speed::Speed;

/// The conditions under which a rehearsal is assessed.
pub(crate) struct Conditions<'a> {
    pub(crate) memory: &'a dyn MemoryModel,
    /// The limit. By how much a footprint exceeds it need not be known.
    pub(crate) budget: Bytes,
    pub(crate) overhead: &'a Overhead,
    /// The optimizer's state, for a phase that does not use it.
    pub(crate) idle_state: &'a [TensorInfo],
    /// What updates have left: that of parameters which the rehearsal does not change is alive next
    /// to it.
    pub(crate) ledger: &'a Ledger,
    /// Whether the optimizer's state is parked between steps.
    pub(crate) parks: bool,
    /// What is parked, for a phase that does not use it.
    pub(crate) parked: &'a [TensorInfo],
    /// What threads keep permanently after what has run before.
    pub(crate) kept: Bytes,
    /// How the device computes.
    pub(crate) speed: Speed,
    /// The share of time that may be spent on computing tensors again if the rehearsal does not fit
    /// otherwise. `None`: nothing is recomputed.
    pub(crate) recompute: Option<f64>,
}

/// The result of a rehearsal.
#[derive(Clone, Debug)]
pub(crate) struct Rehearsed {
    pub(crate) footprint: Footprint,
    /// What is recomputed, if it does not fit otherwise.
    pub(crate) recomputed: Option<Recomputed>,
    /// The least that was found by recomputing, if that is too much.
    pub(crate) least: Option<Least>,
    /// What holds the peak, by module.
    pub(crate) modules: Vec<ModuleBytes>,
    /// What the footprint counts in addition to the step.
    pub(crate) overhead: OverheadBytes,
    /// What a loader thread may have alive before it must wait.
    pub(crate) loader_limit: Bytes,
    /// The most that is alive before a micro-step.
    pub(crate) held: Bytes,
    /// The most that is alive before a batch is made.
    pub(crate) idle: Bytes,
    pub(crate) state: State,
    pub(crate) of_step: OfStep,
    /// What threads keep permanently after it: its own part and what others have left.
    pub(crate) kept: Bytes,
    /// The memory that the rehearsal itself took.
    pub(crate) planning: Bytes,
    /// The number of recorded operations.
    pub(crate) operations: usize,
}

/// The optimizer's state after a rehearsal.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// What of it is on the device between steps.
    pub(crate) on_device: Vec<TensorInfo>,
    pub(crate) parked: Vec<TensorInfo>,
}

/// What a rehearsal shows of the user's step.
#[derive(Clone, Debug)]
pub(crate) struct OfStep {
    /// The paths of the running statistics.
    pub(crate) running_state: Vec<String>,
    /// What its updates leave.
    pub(crate) left: Vec<Left>,
    /// What the step makes of its gradients, if that is nothing linear.
    pub(crate) nonlinear: Option<Nonlinear>,
    /// Where the step is another one each time that it is called on the same items.
    pub(crate) counts: Option<Difference>,
    /// Whether its micro-steps of one size are the same calls with the same numbers.
    pub(crate) is_alike: bool,
}

impl OfStep {
    fn of(rehearsal: Rehearsal) -> (Trace, Self) {
        let Rehearsal { trace, replaced, .. } = rehearsal;
        // What a step does with a value that it reads may depend on the value, and running
        // statistics are brought up to date in the second step.
        let is_fixed = trace.reads().next().is_none() && replaced.is_empty();
        let shown = Self {
            left: Left::by_rehearsal(&trace),
            nonlinear: trace.nonlinear_gradient(),
            counts: if is_fixed { trace.difference_of_iterations() } else { None },
            is_alike: is_fixed && trace.has_like_micro_steps() == Some(true),
            running_state: replaced,
        };
        (trace, shown)
    }
}

/// Computes the footprint of a rehearsal under the given conditions.
pub(crate) fn assess(rehearsal: Rehearsal, conditions: &Conditions) -> Rehearsed {
    let (mut trace, of_step) = OfStep::of(rehearsal);
    let Conditions { memory, .. } = *conditions;
    debug_assert_eq!(trace.check(), Ok(()), "the recorder wrote a trace that contradicts itself");
    let operations = trace.calls().count();
    let parked = if conditions.parks { park_state(&mut trace) } else { Vec::new() };
    debug_assert_eq!(trace.check(), Ok(()), "parking wrote a trace that contradicts itself");
    let state = State { on_device: state_at_end(&trace), parked };
    let changed: BTreeSet<&str> = of_step.left.iter().flat_map(Left::paths).collect();
    let listed: Bytes = conditions.idle_state.iter().map(TensorInfo::bytes).sum();
    let idle = conditions.ledger.idle(changed.into_iter()) - listed;
    trace.tensors.extend(idle_state(idle));
    let (loader_limit, mut overhead) = add_beside(&mut trace, conditions, &state);
    overhead.idle_state += idle;
    // How much is missing decides how much is recomputed.
    let enough = may_recompute(&trace, conditions).map_or(conditions.budget, |_| Bytes::MAX);
    let recording = recording_bytes(memory, &trace, longest_micro_step(&trace));
    let answer = |trace: &Trace, programs: Bytes| {
        let footprint = memory.answer(&Question { trace, enough });
        let programs = if memory.is_on_host() { programs } else { Bytes::ZERO };
        Answered::of(footprint, recording + programs, conditions)
    };
    let recorded = answer(&trace, Bytes::ZERO);
    let (answered, rewritten, recomputed, least) =
        within_budget(&trace, recorded, conditions, answer);
    let trace = rewritten.unwrap_or(trace);
    let Answered { mut footprint, in_use, small_page, left } = answered;
    if !memory.is_on_host() && guesses_outputs(&trace) {
        footprint.estimate = footprint.estimate.max(Estimate::Heuristic);
    }
    overhead.small_page = small_page;
    let held = held_by(&trace, &footprint) + loop_bytes(memory) + left;
    let idle = before_batches(&trace, &footprint) + loop_bytes(memory) + left;
    let planning = match memory.is_on_host() {
        true => footprint.baseline + first_batch_bytes(&trace) + host_bytes_of_rehearsal(&trace),
        false => Bytes::ZERO,
    };
    // Only a split that fits is reported.
    let modules = match footprint.peak <= conditions.budget {
        true => Modules::of(&trace).held(&trace, footprint.at, in_use),
        false => Vec::new(),
    };
    // Plans live for the whole run, and timelines would be the largest part of them.
    footprint.timeline = Vec::new();
    Rehearsed {
        recomputed,
        least,
        held,
        idle,
        modules,
        kept: footprint.stays + left,
        planning,
        overhead,
        loader_limit,
        state,
        of_step,
        operations,
        footprint,
    }
}

/// Adds what lives beside the steps of a rehearsal. Returns what a loader thread may have prepared,
/// and what was added.
fn add_beside(trace: &mut Trace, conditions: &Conditions, state: &State) -> (Bytes, OverheadBytes) {
    let Conditions { memory, idle_state, .. } = conditions;
    let (loader_limit, queued) = conditions.overhead.add_queue(trace, memory.is_on_host());
    // On the host, the outputs of one batch less were found to be alive.
    if !memory.is_on_host() {
        add_outputs_of_before(trace);
    }
    let mut overhead = OverheadBytes {
        exchange: conditions.overhead.add_exchange(trace),
        queued,
        outputs: outputs_held(trace),
        idle_state: idle_state.iter().map(TensorInfo::bytes).sum(),
        ..OverheadBytes::default()
    };
    let idle = |tensor: &TensorInfo| TensorInfo { origin: Origin::Existing, ..tensor.clone() };
    trace.tensors.extend(idle_state.iter().map(idle));
    let mut saved = [&state.on_device, *idle_state].concat();
    // Parked state is written from host memory.
    if memory.is_on_host() {
        let parked = &state.parked;
        saved.extend_from_slice(if parked.is_empty() { conditions.parked } else { parked });
    }
    overhead.saving = conditions.overhead.add_saved(trace, &saved);
    (loader_limit, overhead)
}

/// A footprint with what is counted beside it.
struct Answered {
    footprint: Footprint,
    /// What buffers of the step take at the peak.
    in_use: Bytes,
    small_page: Bytes,
    /// What threads keep because of batches of other shapes.
    left: Bytes,
}

impl Answered {
    /// `recording` is what the recording and its programs take of the host's memory.
    fn of(mut footprint: Footprint, recording: Bytes, conditions: &Conditions) -> Self {
        let in_use = footprint.paging.as_ref().map_or(footprint.peak, |paging| paging.in_use);
        let small_page = match conditions.memory.keeps_pages() {
            true => page_for_small_buffers(&footprint),
            false => Bytes::ZERO,
        };
        let left = conditions.kept - footprint.stays;
        add_temporary(&mut footprint, small_page);
        add_temporary(&mut footprint, recording + loop_bytes(conditions.memory));
        add_temporary(&mut footprint, left);
        Self { footprint, in_use, small_page, left }
    }

    fn is_refused(&self) -> bool {
        self.footprint.paging.as_ref().is_some_and(Paging::is_refused)
    }
}

/// The share of time that may be spent on computing tensors again, unless what cannot be computed
/// again is too much already.
fn may_recompute(trace: &Trace, conditions: &Conditions) -> Option<f64> {
    let Conditions { memory, budget, recompute, .. } = conditions;
    recompute.filter(|_| memory.at_least(trace) <= *budget)
}

/// Computes tensors again if that is allowed and makes an iteration fit. Returns what was answered
/// at last, and the rewritten trace, or the least that was found.
fn within_budget(
    trace: &Trace,
    recorded: Answered,
    conditions: &Conditions,
    answer: impl Fn(&Trace, Bytes) -> Answered,
) -> (Answered, Option<Trace>, Option<Recomputed>, Option<Least>) {
    let (budget, peak) = (conditions.budget, recorded.footprint.peak);
    let is_too_much = peak > budget && !recorded.is_refused();
    let most = may_recompute(trace, conditions).filter(|_| is_too_much);
    let Some(most) = most else { return (recorded, None, None, None) };
    let Some(passes) = Passes::of(trace, conditions.memory, conditions.speed) else {
        return (recorded, None, None, None);
    };
    let found = passes.within(trace, (budget, peak, most), |attempt: &Attempt| {
        let answered = answer(&attempt.trace, attempt.programs);
        (answered.footprint.peak, answered)
    });
    match found {
        Ok((Attempt { trace, recomputed, .. }, answered)) => {
            (answered, Some(trace), Some(recomputed), None)
        }
        Err(least) => (recorded, None, None, least),
    }
}

/// What is alive before a step.
fn before(footprint: &Footprint, step: usize) -> Bytes {
    match step {
        0 => footprint.baseline,
        step => footprint.timeline[step - 1].live,
    }
}

/// The most that is alive before the first batch of an iteration arrives.
fn before_batches(trace: &Trace, footprint: &Footprint) -> Bytes {
    let arrivals = arrivals(trace).map(|at| before(footprint, at));
    arrivals.max().unwrap_or(footprint.baseline)
}

/// The most that is alive before a micro-step.
fn held_by(trace: &Trace, footprint: &Footprint) -> Bytes {
    let before = |step: usize| before(footprint, step);
    let steps = trace.steps.iter().enumerate();
    let micro_steps = steps.filter(|(_, step)| step.is_mark(&Mark::MicroStep));
    micro_steps.map(|(at, _)| before(at)).max().unwrap_or(footprint.baseline)
}

/// One page of the smallest size, on burn's own pools. Whether a small operation works in place,
/// and in which order buffers are released, differs slightly between runs of the same program,
/// depending on how its threads interleave.
fn page_for_small_buffers(footprint: &Footprint) -> Bytes {
    let paging = footprint.paging.as_ref().filter(|paging| !paging.is_refused());
    let mut sizes = paging.into_iter().flat_map(|paging| paging.pages.keys().copied());
    sizes.find(|size| *size > Bytes::ZERO).unwrap_or_default()
}

fn add_temporary(footprint: &mut Footprint, bytes: Bytes) {
    footprint.peak += bytes;
    footprint.categories.add(Category::Temporary, bytes);
}

/// The memory that recording a micro-step of `calls` calls takes, including the descriptions of
/// `trace`.
pub(crate) fn recording_bytes(memory: &dyn MemoryModel, trace: &Trace, calls: usize) -> Bytes {
    let of_calls = Bytes::new(HOST_BYTES_PER_CALL.get() * calls as u64);
    match memory.is_on_host() {
        true => of_calls + host_bytes_of_descriptions(trace),
        false => Bytes::ZERO,
    }
}

/// The memory that burn's training loop takes apart from tensors: the items of a loader's batch,
/// metrics, loggers. Measured at 0.1 to 0.6 MiB.
pub(crate) fn loop_bytes(memory: &dyn MemoryModel) -> Bytes {
    if memory.is_on_host() { Bytes::mib(1) } else { Bytes::ZERO }
}

/// The optimizer's state at the end of the rehearsal.
fn state_at_end(trace: &Trace) -> Vec<TensorInfo> {
    let is_end = |step: &Step| step.is_mark(&Mark::IterationEnd);
    let end = trace.steps.iter().rposition(is_end).unwrap_or_default();
    let is_state = |index: &TensorIndex| {
        let label = trace.tensor(*index).label.as_ref();
        label.is_some_and(|label| label.category == Category::OptimizerState)
    };
    let state = trace.alive_before(OpIndex(end as u32)).into_iter().filter(is_state);
    state.map(|index| trace.tensor(index).clone()).collect()
}

/// The number of calls in the longest micro-step of a rehearsal.
fn longest_micro_step(trace: &Trace) -> usize {
    let parts = trace.steps.split(|step| matches!(step, Step::Mark(_)));
    let calls = |part: &[Step]| part.iter().filter(|step| matches!(step, Step::Call(_))).count();
    parts.map(calls).max().unwrap_or_default()
}
