//! Errors for buffers that find no place: what they say, and who receives them.
//!
//! CubeCL's `initialize_memory` returns nothing, so the error waits for the next read, flush or
//! sync. Until then nothing runs, so nothing is computed from missing buffers.
//!
//! During training the error stays for every caller. The tuner, a thread that reads metrics and the
//! training thread share one device, and none of them may take the error from the others. Outside
//! training the first caller takes it. A later use of a buffer without a place fails again.

use cubecl_common::backtrace::BackTrace;
use cubecl_runtime::server::{IoError, ServerError};

use crate::no_place::NoPlace;

/// Refusals that have not been reported yet.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    waiting: Option<NoPlace>,
    /// The first refusal since training began or ended, for later uses of a buffer without a place.
    first: Option<NoPlace>,
    profiles: bool,
}

impl Refusals {
    pub(crate) fn add(&mut self, no_place: NoPlace) {
        self.first.get_or_insert(no_place);
        self.waiting.get_or_insert(no_place);
    }

    /// Reports the first refusal again, because a buffer without a place is used. Returns whether
    /// there was one.
    pub(crate) fn recur(&mut self) -> bool {
        self.waiting = self.waiting.or(self.first);
        self.waiting.is_some()
    }

    /// Whether a refusal is waiting. Nothing may run then.
    pub(crate) fn are_any(&self) -> bool {
        self.waiting.is_some()
    }

    /// Returns the waiting error, if any. Removes it unless it `stays` or a kernel is being
    /// profiled.
    pub(crate) fn tell(&mut self, stays: bool) -> Result<(), ServerError> {
        let told = if stays || self.profiles { self.waiting } else { self.waiting.take() };
        told.map_or(Ok(()), |no_place| Err(error(no_place.to_string())))
    }

    /// Begins to profile a kernel. Refusals from here on end with the profile.
    pub(crate) fn begin_profile(&mut self) -> Result<(), ServerError> {
        self.tell(true)?;
        self.profiles = true;
        Ok(())
    }

    /// Ends the profile. Returns the refusal that kept the kernel from running, if any.
    pub(crate) fn end_profile(&mut self) -> Result<(), ServerError> {
        self.profiles = false;
        self.tell(false)
    }
}

pub(crate) fn no_buffer() -> IoError {
    IoError::NotFound {
        backtrace: BackTrace::capture(),
        reason: "the buffer has no place, because there was none left when it was asked for".into(),
    }
}

pub(crate) fn error(reason: String) -> ServerError {
    ServerError::Generic { reason, backtrace: BackTrace::capture() }
}

pub(crate) fn gone() -> ServerError {
    error("the thread of the device panicked".into())
}
