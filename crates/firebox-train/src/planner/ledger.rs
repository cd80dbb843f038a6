//! The ledger of what lives between steps: what updates of the parameters have left, such as the
//! moments of an optimizer. It is corrected from what an update is recorded to leave, before it
//! runs, and a plan is compared with it each time that a batch begins.
//!
//! A plan counts the state of the parameters that had a gradient when it was made. Others get
//! theirs later: a head whose task comes up, layers that were frozen, an optimizer that leaves out
//! its first step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use firebox_trace::{Bytes, Category, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo, Trace};

use super::Planner;
use crate::error::{Phase, TrainError};
use crate::planner::shape::Shape;

/// What updates have left, by the path of the parameter that it belongs to.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: BTreeMap<String, Bytes>,
    /// Whether updates read values and have left nothing yet: any of them may.
    is_open: bool,
    /// What the micro-steps of the running batch leave beyond those that were planned: gradients of
    /// parameters that had none.
    beyond: Bytes,
    /// The optimizer's state on the device, as the last plan has it. Validation does not use it,
    /// but it is alive meanwhile.
    pub(super) optimizer_state: Vec<TensorInfo>,
    /// What of the optimizer's state is outside of the device between steps.
    pub(super) parked: Vec<TensorInfo>,
    /// The parameters for which an optimizer brings state along from an earlier run, until it is
    /// known how much.
    pub(super) brought: Vec<(String, Bytes)>,
    /// What threads keep permanently after what has run so far, and how much of it the current
    /// batch's `held` includes.
    pub(super) kept: Arc<AtomicU64>,
    pub(super) kept_in_held: Bytes,
}

/// What an update leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Left {
    /// The paths and bytes of the parameters that it changes.
    parameters: Vec<(String, Bytes)>,
    /// The bytes that it leaves besides parameters.
    state: Bytes,
    /// Whether it reads values.
    reads: bool,
}

impl Left {
    /// What each update of a rehearsal leaves.
    pub(crate) fn by_rehearsal(trace: &Trace) -> Vec<Self> {
        let mut left = Vec::new();
        let mut begin = None;
        for (at, step) in trace.steps.iter().enumerate() {
            if step.is_mark(&Mark::OptimizerStep) {
                begin = Some(at);
            } else if step.is_mark(&Mark::IterationEnd)
                && let Some(begin) = begin.take()
            {
                let last = trace.last_uses(begin..at);
                let is_state = |tensor: &TensorIndex| {
                    let label = trace.tensor(*tensor).label.as_deref();
                    let is = label.is_some_and(|of| of.category == Category::OptimizerState);
                    is && last.contains_key(tensor)
                };
                left.push(Self::of(trace, begin, at, is_state));
            }
        }
        left
    }

    /// What a recorded update leaves: its survivors that are no parameters.
    pub(crate) fn by_recording(trace: &Trace) -> Self {
        let last = trace.last_uses(0..trace.steps.len());
        let is_other = |tensor: &TensorIndex| {
            last.contains_key(tensor) && parameter_of(trace, *tensor).is_none()
        };
        Self::of(trace, 0, trace.steps.len(), is_other)
    }

    fn of(
        trace: &Trace,
        begin: usize,
        end: usize,
        is_state: impl Fn(&TensorIndex) -> bool,
    ) -> Self {
        let is_made = |tensor: &TensorIndex| match trace.tensor(*tensor).origin {
            Origin::Made(at) => (begin..end).contains(&(at.0 as usize)),
            Origin::Existing => false,
        };
        let alive = trace.alive_before(OpIndex(end as u32));
        let changed = alive.iter().filter(|tensor| is_made(tensor)).filter_map(|tensor| {
            Some((parameter_of(trace, *tensor)?.to_owned(), trace.tensor(*tensor).bytes()))
        });
        let state = alive.iter().filter(|tensor| is_state(tensor));
        Self {
            parameters: changed.collect(),
            state: state.map(|tensor| trace.tensor(*tensor).bytes()).sum(),
            reads: trace.steps[begin..end].iter().any(|step| matches!(step, Step::Read(_))),
        }
    }

    /// The paths of the parameters that it changes.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|(path, _)| path.as_str())
    }

    /// Whether it reads values.
    pub(crate) fn reads(&self) -> bool {
        self.reads
    }

    /// The state that it leaves for each parameter. What belongs to which is not known: each has
    /// its share by bytes.
    fn by_parameter(&self) -> impl Iterator<Item = (&str, Bytes)> {
        let ratio = self.ratio();
        self.parameters.iter().map(move |(path, bytes)| (path.as_str(), bytes.scale(ratio)))
    }

    /// What state it leaves for each byte of a parameter.
    pub(crate) fn ratio(&self) -> f64 {
        let all: Bytes = self.parameters.iter().map(|(_, bytes)| *bytes).sum();
        if all == Bytes::ZERO { 0.0 } else { self.state.ratio(all) }
    }
}

fn parameter_of(trace: &Trace, tensor: TensorIndex) -> Option<&str> {
    let label = trace.tensor(tensor).label.as_deref()?;
    (label.category == Category::Parameter).then_some(&label.name)
}

impl Ledger {
    /// All that updates have left, and will once those that are known have run.
    pub(crate) fn total(&self) -> Bytes {
        self.state.values().copied().sum()
    }

    /// What others have left than an update that changes these parameters.
    pub(crate) fn idle<'a>(&self, changed: impl Iterator<Item = &'a str>) -> Bytes {
        let own: Bytes = changed.filter_map(|path| self.state.get(path)).copied().sum();
        self.total() - own
    }

    /// Whether an update that changes this parameter is known.
    pub(crate) fn knows(&self, path: &str) -> bool {
        self.state.contains_key(path)
    }

    /// Whether any update may leave something, known or not.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// What an update leaves that is not taken down yet.
    fn grown_by(&self, left: &Left) -> Bytes {
        let known = |path| self.state.get(path).copied().unwrap_or_default();
        left.by_parameter().map(|(path, bytes)| bytes - known(path)).sum()
    }

    /// Takes down what an update leaves.
    pub(crate) fn note(&mut self, left: &Left) {
        for (path, bytes) in left.by_parameter() {
            let state = self.state.entry(path.to_owned()).or_default();
            *state = (*state).max(bytes);
        }
        self.is_open = (self.is_open || left.reads) && self.total() == Bytes::ZERO;
    }

    /// Takes down what an optimizer brings along from an earlier run: as much for each byte of a
    /// parameter as an update leaves.
    pub(crate) fn take_what_is_brought(&mut self, ratio: f64) {
        for (path, bytes) in self.brought.drain(..) {
            self.state.entry(path).or_insert(bytes.scale(ratio));
        }
    }

    /// Begins a batch.
    pub(crate) fn begin(&mut self) {
        self.beyond = Bytes::ZERO;
    }

    /// Notes that a micro-step of this batch leaves so much more than a planned one.
    pub(crate) fn leaves(&mut self, more: Bytes) {
        self.beyond = self.beyond.max(more);
    }

    /// What the micro-steps of this batch leave beyond those that were planned.
    pub(crate) fn beyond(&self) -> Bytes {
        self.beyond
    }
}

/// Whether a batch is alive while parameters are updated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Batch {
    IsGone,
    IsHeld,
}

impl Planner {
    /// Admits an update of the parameters before it runs, by what it is recorded to leave and to
    /// need beyond what is alive. One that leaves nothing new fits as it was planned. `batch` is
    /// what of the batch is gone by then.
    ///
    /// # Errors
    ///
    /// If it does not fit.
    pub(crate) fn admit_update(
        &mut self,
        shape: Shape,
        batch: Batch,
        (left, needed): (&Left, impl FnOnce() -> Bytes),
    ) -> Result<(), TrainError> {
        let Some(planned) = self.plans.made.get(&(Phase::Training, shape)) else { return Ok(()) };
        let grown = self.ledger.grown_by(left);
        if grown > Bytes::ZERO {
            let gone = match batch {
                Batch::IsGone => planned.batch,
                Batch::IsHeld => Bytes::ZERO,
            };
            // Its gradients are there.
            let gradients = match planned.plan.accumulating() {
                firebox_plan::Accumulating::No => planned.leaves,
                _ => Bytes::ZERO,
            };
            let alive = self.held(planned) - gone + gradients;
            let (needed, budget) = (alive + needed(), self.room.budget);
            log::info!("an update leaves {grown} that no plan counts, and needs {needed}");
            if needed > budget {
                return Err(TrainError::UpdateTooLarge { grown, needed, budget });
            }
            self.predict(needed);
        }
        self.ledger.note(left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(paths: &[&str], state: u64) -> Left {
        let parameters = paths.iter().map(|path| (path.to_string(), Bytes::new(10))).collect();
        Left { parameters, state: Bytes::new(state), reads: false }
    }

    #[test]
    fn what_updates_leave_adds_up_by_parameter() {
        let mut ledger = Ledger::default();
        ledger.note(&left(&["body", "first"], 40));
        assert_eq!(ledger.total(), Bytes::new(40));
        // The body's is replaced.
        ledger.note(&left(&["body", "second"], 40));
        assert_eq!(ledger.total(), Bytes::new(60));
        assert_eq!(ledger.idle(["body", "second"].into_iter()), Bytes::new(20));
        assert!(ledger.knows("first") && !ledger.knows("third"));
        // A step that was left out takes nothing back.
        ledger.note(&left(&["body"], 0));
        assert_eq!(ledger.total(), Bytes::new(60));
    }

    #[test]
    fn updates_that_read_are_looked_at_until_they_leave_something() {
        let mut ledger = Ledger::default();
        ledger.note(&Left { reads: true, ..left(&["body"], 0) });
        assert!(ledger.is_open());
        ledger.note(&left(&["body"], 0));
        assert!(ledger.is_open(), "the next may be another one");
        ledger.note(&Left { reads: true, ..left(&["body"], 20) });
        assert!(!ledger.is_open());
    }
}
