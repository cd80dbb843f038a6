//! Buffers that find no place: what is said, and to whom.
//!
//! CubeCL's `initialize_memory` answers nothing, so the error waits until somebody asks: a read, a flush, a sync. Until then nothing
//! runs, so that nothing is computed of what is not there. While one trains, the error stays for all who ask: the tuner, a thread that
//! reads metrics and the training thread share one device, and none of them may take it from the others. Otherwise whoever asks takes
//! it; what needs a buffer without a place fails again.

use cubecl_common::backtrace::BackTrace;
use cubecl_runtime::server::{IoError, ServerError};

/// A buffer found no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no place for a buffer of {size} bytes: the longest piece that is free on the pages for it has {largest_gap} bytes, \
     {in_use} of {reserved} bytes are in use, and {why}"
)]
pub struct NoPlace {
    /// The bytes that were asked for.
    pub size: u64,
    /// The longest piece that is free on the pages of the region.
    pub largest_gap: u64,
    /// The bytes of all buffers.
    pub in_use: u64,
    /// The bytes of all pages.
    pub reserved: u64,
    /// Why no page was opened for it.
    pub why: Why,
}

/// Why no page was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// All pages together must not be larger.
    #[error("another page would exceed {limit} bytes")]
    Limit {
        /// The bytes of all pages, at most.
        limit: u64,
    },
    /// The device has no more memory.
    #[error("the device refused a page of {page} bytes")]
    Refused {
        /// The bytes of the page.
        page: u64,
    },
    /// The device has no more memory, not even for a buffer that was there before it was moved.
    #[error(
        "the device refused a page of {page} bytes for a tensor that it had before, which is lost"
    )]
    Lost {
        /// The bytes of the page.
        page: u64,
    },
    /// It has one, and what it held before it was moved could not be read from the device: it is lost.
    #[error("what a tensor held could not be read from the device when it was moved, and is lost")]
    Unread,
}

/// What was refused, and has not been told.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    waiting: Option<NoPlace>,
    /// The first one ever, for what needs its buffer later.
    first: Option<NoPlace>,
    profiles: bool,
}

impl Refusals {
    pub(crate) fn add(&mut self, no_place: NoPlace) {
        self.first.get_or_insert(no_place);
        self.waiting.get_or_insert(no_place);
    }

    /// Something needs a buffer that found no place. Whether there was one.
    pub(crate) fn recur(&mut self) -> bool {
        self.waiting = self.waiting.or(self.first);
        self.waiting.is_some()
    }

    /// Whether nothing may run.
    pub(crate) fn are_any(&self) -> bool {
        self.waiting.is_some()
    }

    /// Tells the error, which `stays` for whoever else asks or is taken.
    pub(crate) fn tell(&mut self, stays: bool) -> Result<(), ServerError> {
        let told = if stays || self.profiles { self.waiting } else { self.waiting.take() };
        told.map_or(Ok(()), |no_place| Err(error(no_place.to_string())))
    }

    /// A kernel is tried from here on: what it is refused ends with it.
    pub(crate) fn begin_profile(&mut self) -> Result<(), ServerError> {
        self.tell(true)?;
        self.profiles = true;
        Ok(())
    }

    /// Why the kernel that was tried has not run.
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
