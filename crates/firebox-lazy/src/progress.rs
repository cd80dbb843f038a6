//! Whether the program that is being recorded gets on.
//!
//! Loader threads are held back while a step goes on. A step that waits for one of them, because it pulls from a loader of its own,
//! records nothing meanwhile, and this is how the gate notices.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many programs are being recorded, and are not running a part of themselves.
static PROGRAMS: AtomicUsize = AtomicUsize::new(0);
/// How many calls were ever recorded.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Notes that a call was recorded.
pub(crate) fn tick() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// How many calls were ever recorded, if a program is being recorded now.
pub(crate) fn calls() -> Option<u64> {
    (PROGRAMS.load(Ordering::Relaxed) > 0).then(|| CALLS.load(Ordering::Relaxed))
}

/// Runs a program that is recorded.
pub(crate) fn recording<R>(program: impl FnOnce() -> R) -> R {
    PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let _until_done = Change(|| {
        PROGRAMS.fetch_sub(1, Ordering::Relaxed);
    });
    program()
}

/// Runs a part of a program that was recorded, inside of it.
pub(crate) fn running<R>(part: impl FnOnce() -> R) -> R {
    PROGRAMS.fetch_sub(1, Ordering::Relaxed);
    let _until_done = Change(|| {
        PROGRAMS.fetch_add(1, Ordering::Relaxed);
    });
    part()
}

/// Does something when it is dropped.
struct Change(fn());

impl Drop for Change {
    fn drop(&mut self) {
        (self.0)();
    }
}
