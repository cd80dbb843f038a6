//! Whether the program being recorded makes progress.
//!
//! Loader threads are held back while a step runs. A step that pulls from a loader of its own may
//! wait for one of them, and then records nothing. The gate (`loaders.rs`) detects that here.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many programs are being recorded. Those that are running a part of themselves don't count.
static PROGRAMS: AtomicUsize = AtomicUsize::new(0);
/// How many calls were ever recorded.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Counts a recorded call.
pub(crate) fn tick() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// How many calls were ever recorded. `None` if no program is being recorded now.
pub(crate) fn calls() -> Option<u64> {
    (PROGRAMS.load(Ordering::Relaxed) > 0).then(|| CALLS.load(Ordering::Relaxed))
}

/// Runs a program that is being recorded.
pub(crate) fn recording<R>(program: impl FnOnce() -> R) -> R {
    PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let _until_done = Change(|| {
        PROGRAMS.fetch_sub(1, Ordering::Relaxed);
    });
    program()
}

/// Runs something on behalf of a program that is being recorded, for example its recorded part.
pub(crate) fn running<R>(part: impl FnOnce() -> R) -> R {
    PROGRAMS.fetch_sub(1, Ordering::Relaxed);
    let _until_done = Change(|| {
        PROGRAMS.fetch_add(1, Ordering::Relaxed);
    });
    part()
}

/// Calls its function on drop.
struct Change(fn());

impl Drop for Change {
    fn drop(&mut self) {
        (self.0)();
    }
}
