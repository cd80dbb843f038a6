//! Finds out whether the device did its work. The Learner asks before and after every optimizer
//! step.
//!
//! On burn's GPU backends a failed allocation is not an error of any call. The device's thread
//! panics, CubeCL catches the panic, kernels that miss the buffer are skipped, and later ones
//! compute with whatever was in memory. The Learner therefore listens for those panics
//! ([`Listener`]), and asks the server for its own list of errors. Both come late, because
//! operations wait in two queues. [`Watch::check`] first waits until these are empty.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use burn_backend::{Backend, DeviceOps, StreamId};
use firebox_plan::Plan;
use firebox_trace::Items;

use crate::device::DeviceMemory;
use crate::device::panics::panic_message;
use crate::device::panics::{Listener, without_backtrace};
use crate::error::{DeviceFailure, During, TrainError};

/// How long to wait for a device that failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Watches the device that a Learner trains on.
pub(crate) struct Watch<B: Backend> {
    device: B::Device,
    listener: Listener,
    during: During,
    /// The batch in progress.
    batch: Option<(Items, Plan)>,
}

impl<B: DeviceMemory> Watch<B> {
    pub(crate) fn new(device: B::Device) -> Self {
        let listener = Listener::new(device.id());
        Self { device, listener, during: During::MicroSteps, batch: None }
    }

    /// Sets what a failure belongs to from here on.
    pub(crate) fn begin(&mut self, during: During) {
        self.during = during;
    }

    /// Like [`begin`](Self::begin), for a batch.
    pub(crate) fn begin_batch(&mut self, during: During, items: usize, plan: &Plan) {
        self.during = during;
        let is_same = |(old, known): &(Items, Plan)| {
            (old.get(), known.split(), known.peak()) == (items, plan.split(), plan.peak())
        };
        if !self.batch.as_ref().is_some_and(is_same) {
            self.batch = Some((Items::new(items), plan.clone()));
        }
    }

    /// Returns an error if a failure is already known. Does not wait.
    pub(crate) fn heard_nothing(&self) -> Result<(), TrainError> {
        self.listener.heard().map_or(Ok(()), |message| Err(self.failure(message)))
    }

    /// Returns an error if any work this thread submitted has failed. Waits until the work is
    /// issued, not until it is computed.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        self.settled().map_err(|message| self.failure(message))
    }

    /// Why training stopped: the device if it failed, otherwise `error`.
    pub(crate) fn explain(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::DeviceFailed(_) => error,
            error => self.check().err().unwrap_or(error),
        }
    }

    /// Why training stopped after a panic outside of the model. The cause is the device, if it
    /// failed; or a thread of burn's, of which the training thread only notices that it is gone; or
    /// the training thread itself.
    pub(crate) fn panicked(&self, panic: &(dyn Any + Send)) -> TrainError {
        if let Err(failure) = self.check() {
            return failure;
        }
        let message = self.listener.heard_of_burn().unwrap_or_else(|| panic_message(panic));
        TrainError::Panicked { message }
    }

    /// Whether an unnamed thread panicked. The threads of burn's checkpointers are unnamed.
    pub(crate) fn may_have_lost_checkpointers(&self) -> bool {
        self.listener.unnamed_thread_panicked()
    }

    /// Waits until a failed device has nothing left to do, for at most [`PATIENCE`]. A program that
    /// ends while a software device still computes may crash on exit.
    pub(crate) fn come_to_rest_after(&self, cause: &TrainError) {
        if !matches!(cause, TrainError::DeviceFailed(_)) {
            return;
        }
        let (device, stream) = (self.device.clone(), StreamId::current());
        let (done, wait) = mpsc::channel();
        // Its errors belong to the failure that is being reported.
        let sync = move || {
            let _ = catch_unwind(AssertUnwindSafe(|| stream.executes(|| B::sync(&device))));
            let _ = done.send(());
        };
        let waiting = std::thread::Builder::new().name("firebox-rest".to_owned()).spawn(sync);
        if waiting.is_err() || wait.recv_timeout(PATIENCE).is_err() {
            log::error!(
                "the device still works {PATIENCE:?} after it failed; it is not waited for"
            );
        }
    }

    fn settled(&self) -> Result<(), String> {
        let answer = catch_unwind(AssertUnwindSafe(|| B::settle(&self.device)));
        let answer = match answer {
            Ok(answer) => answer.map_err(|error| without_backtrace(&error.to_string()).to_owned()),
            Err(panic) => Err(panic_message(&*panic)),
        };
        // The panic tells the cause. The server's answer tells only that there was a failure.
        self.listener.heard().map_or(answer, Err)
    }

    fn failure(&self, message: String) -> TrainError {
        let usage = catch_unwind(AssertUnwindSafe(|| B::pool_usage(&self.device)));
        TrainError::DeviceFailed(Box::new(DeviceFailure {
            during: self.during,
            items: self.batch.as_ref().map(|(items, _)| *items),
            plan: self.batch.as_ref().map(|(_, plan)| plan.clone()),
            measured: usage.ok().flatten().map(|usage| usage.reserved),
            message,
        }))
    }
}
