//! Whether anything is learned from the step that a thread runs. Recordings and `module.rs` say so,
//! and programs ask.

use std::cell::Cell;

thread_local! {
    static REHEARSES: Cell<bool> = const { Cell::new(false) };
    /// Whether the program being recorded has had a read refused.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Whether nothing is learned from the step that this thread runs: it runs to plan a batch, or to
/// find out whether a batch may be split. For steps with effects on the host, such as counters and
/// logs.
///
/// A micro-batch that turns out to be too large, for example because of a longer sequence, is
/// recorded as a step that is learned from. It is then halved, and its halves are steps too. This
/// cannot be known in advance.
///
/// If a step reads a value that cannot be computed within the budget, it gets zeros from then on
/// and this is true, because the micro-batch will be halved.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// static STEPS: AtomicUsize = AtomicUsize::new(0);
/// // In a step:
/// if !firebox_lazy::is_rehearsal() {
///     STEPS.fetch_add(1, Ordering::Relaxed);
/// }
/// ```
pub fn is_rehearsal() -> bool {
    REHEARSES.get()
}

/// Runs `program` as a step that nothing is learned from.
pub fn rehearsing<R>(program: impl FnOnce() -> R) -> R {
    rehearsing_as_before(|| {
        nothing_is_learned();
        program()
    })
}

/// Declares that nothing is learned from what runs on this thread from now on.
pub(crate) fn nothing_is_learned() {
    REHEARSES.set(true);
}

/// Declares that the program being recorded on this thread computes with zeros from now on.
pub(crate) fn read_is_refused() {
    REFUSED.set(true);
    nothing_is_learned();
}

/// Whether the program being recorded on this thread goes on after a refused read. What it makes of
/// the zeros it got means nothing, even a panic. For panic hooks.
pub fn goes_on_with_zeros() -> bool {
    REFUSED.try_with(Cell::get).unwrap_or(false)
}

/// Runs `program` and then restores whether something is learned, whatever the program declared.
pub(crate) fn rehearsing_as_before<R>(program: impl FnOnce() -> R) -> R {
    struct Before(bool, bool);

    impl Drop for Before {
        fn drop(&mut self) {
            REHEARSES.set(self.0);
            REFUSED.set(self.1);
        }
    }

    let _before = Before(REHEARSES.get(), REFUSED.get());
    program()
}
