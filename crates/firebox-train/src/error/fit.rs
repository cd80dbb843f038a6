//! What `fit` returns when training stops before its end: why, and what is left.

use std::fmt;
use std::sync::Mutex;

use super::TrainError;

/// The state after the last whole optimizer step. Training can resume from it.
#[derive(Clone, Debug)]
pub struct LastState<M, R, S> {
    /// The model.
    pub model: M,
    /// The optimizer's record. `None` if the optimizer panicked and lost its state.
    pub optimizer: Option<R>,
    /// The learning-rate scheduler's record. Its next step gives the rate of the next optimizer
    /// step.
    pub scheduler: S,
    /// The epoch in which training stopped, counted from 1.
    pub epoch: usize,
    /// How many loader batches of that epoch the state includes.
    pub iteration: usize,
}

/// Training stopped before its end. Holds the reason and the remaining state.
pub struct FitError<M, R, S> {
    cause: TrainError,
    /// In a mutex, because a model need not be `Sync` but an error should be.
    state: Option<Box<Mutex<LastState<M, R, S>>>>,
}

impl<M, R, S> FitError<M, R, S> {
    pub(crate) fn new(cause: TrainError, state: Option<LastState<M, R, S>>) -> Self {
        Self { cause, state: state.map(|state| Box::new(Mutex::new(state))) }
    }

    /// Why training stopped.
    pub fn cause(&self) -> &TrainError {
        &self.cause
    }

    /// The cause, and the state after the last whole optimizer step. The state is `None` if
    /// training had not begun, or if the device failed in an optimizer step, which leaves no state.
    ///
    /// After [`TrainError::DeviceFailed`] the state is still on the failed device. Its values are
    /// those of the last whole step, but reading them may panic.
    pub fn into_parts(self) -> (TrainError, Option<LastState<M, R, S>>) {
        let state = self.state.map(|state| state.into_inner().unwrap_or_else(|e| e.into_inner()));
        (self.cause, state)
    }
}

impl<M, R, S> fmt::Debug for FitError<M, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `main` prints the error it returns this way, and `unwrap` the error it panics with.
        fmt::Display::fmt(self, f)
    }
}

impl<M, R, S> fmt::Display for FitError<M, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<M, R, S> std::error::Error for FitError<M, R, S> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}
