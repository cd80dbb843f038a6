//! What a run takes of the host's memory beside what it was planned for, as the system counts it.

use firebox_plan::Resident;
use firebox_trace::Bytes;

/// Beyond the budget and so much of it is not told from what the system's allocator adds: 1.20 of what was predicted was measured at the
/// most with glibc, on the models of `tests/memory`.
const SHARE: f64 = 1.2;
/// The same for what does not grow with it: stacks of threads, arenas.
const FIXED: Bytes = Bytes::mib(8);

/// What the process has grown by since training began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    before: Resident,
    /// What training held then.
    held: Bytes,
}

impl Growth {
    /// From now on, with `held` bytes of parameters there already; `None` where the system does not tell.
    pub(crate) fn begin(held: Bytes) -> Option<Self> {
        Resident::of_this_process().map(|before| Self { before, held })
    }

    /// The most so far.
    pub(crate) fn measured(&mut self) -> Option<Bytes> {
        let now = Resident::of_this_process()?;
        self.before = self.before.with_files_of(now);
        Some(self.held + now.growth_since(self.before))
    }

    /// From where on what was measured is more than the budget.
    pub(crate) fn limit(budget: Bytes) -> Bytes {
        budget.scale(SHARE) + FIXED
    }
}
