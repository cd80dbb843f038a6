//! The clock of training: where in the run a step is, for everything that a step schedules. The
//! loops set it before each batch.

use std::cell::Cell;

thread_local! {
    static CLOCK: Cell<Clock> = const { Cell::new(Clock::BEGIN) };
}

/// Where in a training run a step is. See [`clock`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Clock {
    /// The epoch, counted from 1. Always 1 in a [`StepPlanner`](crate::StepPlanner).
    pub epoch: usize,
    /// The optimizer step of this epoch that the batch belongs to, counted from 1.
    pub step: usize,
    /// The batch of the loader in this epoch, counted from 1. With `grads_accumulation(k)`, `k` of
    /// them belong to one step.
    pub batch: usize,
    /// The epochs that have passed, with the part of this one that the loader has yielded before
    /// the batch: 0.5 in the middle of the first.
    pub epochs: f64,
}

impl Clock {
    /// The beginning of training.
    pub(crate) const BEGIN: Self = Self { epoch: 1, step: 1, batch: 1, epochs: 0.0 };
}

/// The batch that is being trained.
///
/// The same in a rehearsal, in each micro-batch of the batch and in the step itself, in a run that
/// resumes, and on every rank (but `batch` and `epochs`, which are those of the rank's own loader).
/// A step must not count its calls: it is called in rehearsals, and once for each micro-batch.
/// Everything that changes in the course of training, such as a weight of the loss that is
/// annealed, is computed of the clock.
///
/// In validation, that of the last batch that was trained. Outside of training, the beginning.
///
/// ```
/// use burn::prelude::*;
///
/// /// The divergence counts fully after two epochs.
/// fn loss<B: Backend>(reconstruction: Tensor<B, 1>, divergence: Tensor<B, 1>) -> Tensor<B, 1> {
///     let weight = (firebox_train::clock().epochs / 2.0).min(1.0);
///     reconstruction + divergence * weight
/// }
/// ```
pub fn clock() -> Clock {
    CLOCK.get()
}

/// Sets the clock of this thread.
pub(crate) fn set_clock(clock: Clock) {
    CLOCK.set(clock);
}

/// Sets the clock back when a run ends.
#[derive(Debug)]
pub(crate) struct ClockGuard;

impl Drop for ClockGuard {
    fn drop(&mut self) {
        set_clock(Clock::BEGIN);
    }
}
