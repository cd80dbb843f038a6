//! What the thread that trains makes of a batch outside of a step: the tensors that the loader's
//! `next` asks for. What it makes later of calls of loader threads is known beforehand, see
//! [`Recording::bytes_to_make`](crate::Recording::bytes_to_make).

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use firebox_trace::Bytes;

use crate::threads::gate::Tally;

thread_local! {
    /// Whether this thread is making a batch.
    static MAKES: Cell<bool> = const { Cell::new(false) };
    /// What it has made of the latest one.
    static MADE: RefCell<Arc<Tally>> = RefCell::default();
}

/// The most bytes of tensors that this thread had at once of those that it made in the latest
/// [`LoaderGuard::waiting`](crate::LoaderGuard::waiting). A call's inputs count until its result is
/// there, a view like any other tensor. What an operation takes while it runs does not count.
pub fn bytes_made() -> Bytes {
    MADE.with_borrow(|tally| tally.peak())
}

/// Counts the tensors that this thread makes while `make` runs.
pub(crate) fn counting<R>(make: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            MAKES.set(self.0);
        }
    }
    MADE.set(Arc::default());
    let _before = Before(MAKES.replace(true));
    make()
}

/// A tensor that was made of a batch. Counts while it lives.
#[derive(Debug)]
pub(crate) struct Made {
    tally: Arc<Tally>,
    bytes: Bytes,
}

impl Made {
    /// A tensor of `bytes`, if this thread is making a batch.
    #[inline]
    pub(crate) fn here(bytes: impl FnOnce() -> Bytes) -> Option<Self> {
        MAKES.get().then(|| {
            let (tally, bytes) = (MADE.with_borrow(Arc::clone), bytes());
            tally.add(bytes);
            Self { tally, bytes }
        })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.tally.remove(self.bytes, true);
    }
}
