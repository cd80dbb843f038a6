//! Counts the locks that a thread takes, in debug builds: a known call takes none.

use std::cell::Cell;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

/// Notes that this thread takes a lock.
#[inline]
pub(crate) fn taken() {
    if cfg!(debug_assertions) {
        // A thread that is ending has none.
        let _ = TAKEN.try_with(|taken| taken.set(taken.get() + 1));
    }
}

/// How many locks of this crate the thread has taken so far. Zero in release builds.
#[doc(hidden)]
pub fn locks_taken() -> u64 {
    TAKEN.get()
}
