//! How much host memory a run takes, as the system counts it. The training loop compares it with
//! the budget on the CPU.

use firebox_plan::Resident;
use firebox_trace::Bytes;

/// Up to this multiple of the budget, growth cannot be told apart from the overhead of the system's
/// allocator. With glibc, at most 1.20 times the prediction was measured on the models of
/// `tests/memory`.
const SHARE: f64 = 1.2;
/// The part of that overhead that does not grow with the budget: stacks of threads, arenas.
const FIXED: Bytes = Bytes::mib(8);

/// How much the process has grown since training began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    before: Resident,
    /// What training held at that time.
    held: Bytes,
}

impl Growth {
    /// Starts measuring, with `held` bytes of parameters already allocated. `None` if the system
    /// does not report memory.
    pub(crate) fn begin(held: Bytes) -> Option<Self> {
        Resident::of_this_process().map(|before| Self { before, held })
    }

    /// The largest growth so far, plus what training held at the start.
    pub(crate) fn measured(&mut self) -> Option<Bytes> {
        let now = Resident::of_this_process()?;
        self.before = self.before.with_files_of(now);
        Some(self.held + now.growth_since(self.before))
    }

    /// The growth above which measured memory counts as more than the budget.
    pub(crate) fn limit(budget: Bytes) -> Bytes {
        budget.scale(SHARE) + FIXED
    }
}
