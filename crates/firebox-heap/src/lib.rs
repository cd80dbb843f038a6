//! The heap model: predicts the memory of a trace on a CPU backend by running it on a simulated
//! heap.
//!
//! `run` walks the steps. `flex` holds the rules, one file per group of operations. `arena`
//! is the simulated heap that the rules work on. `attribution` says what the memory at the peak
//! is for. The rules never compute a value; they allocate, share and free what the backend
//! allocates, shares and frees.

mod run;

mod call;

mod flex;

mod generic;

mod arena;

mod layout;

mod attribution;

use firebox_trace::{Bytes, Footprint, MemoryModel, Question};

/// The memory model of CPU backends: live bytes with exact lifetimes.
///
/// Views share the buffer of their source. Operations write in place where the backend does.
/// Operations that need workspace hold it while they run. Counts the elements of tensors (one byte
/// for a bool). Excludes what the allocator adds to a block, the few hundred bytes of shape and
/// reference counts per tensor, and what the program holds apart from its tensors. Exception: host
/// data on its way to a tensor counts.
///
/// Two assumptions cover what a trace does not say: tensors that existed before the recording are
/// contiguous, and no two of them share a buffer.
///
/// ```
/// use firebox_heap::Heap;
/// use firebox_trace::{Bytes, MemoryModel, Trace};
/// let footprint = Heap::flex().footprint(&Trace::default());
/// assert_eq!(footprint.peak, Bytes::ZERO);
/// ```
#[derive(Clone, Debug)]
pub struct Heap {
    backend: Backend,
    threads: usize,
    kept_per_thread: Bytes,
    on_host: bool,
}

/// The backend whose rules a [`Heap`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Flex,
    Simple,
}

impl Heap {
    /// The heap of burn's Flex backend, release 0.21.
    ///
    /// The estimate is [`Exact`](firebox_trace::Estimate::Exact) or an
    /// [`UpperBound`](firebox_trace::Estimate::UpperBound), since the workspace of some operations
    /// depends on how many threads happen to work at the same time. If a call has no rule, it is a
    /// [`Heuristic`](firebox_trace::Estimate::Heuristic).
    pub fn flex() -> Self {
        Self {
            backend: Backend::Flex,
            threads: available_threads(),
            kept_per_thread: flex::kept_per_thread(),
            on_host: true,
        }
    }

    /// The heap of a plain CPU backend, such as NdArray.
    ///
    /// Views share, elementwise operations that own an operand write in place, everything else
    /// allocates its outputs, and convolutions unroll their input. Always a
    /// [`Heuristic`](firebox_trace::Estimate::Heuristic).
    pub fn simple() -> Self {
        Self {
            backend: Backend::Simple,
            threads: available_threads(),
            kept_per_thread: Bytes::ZERO,
            on_host: true,
        }
    }

    /// Sets how many threads an operation may use at the same time. Zero means one.
    ///
    /// Default: the parallelism of the machine that plans. Set it if the run happens elsewhere, or
    /// in a thread pool of another size.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets what a thread keeps for good once it has computed a matrix product.
    ///
    /// Default: for Flex, the size of the second-level cache as the `gemm` crate determines it; for
    /// the simple heap, zero. Set it to zero for a process whose threads have already worked.
    #[must_use]
    pub fn with_kept_per_thread(mut self, kept: Bytes) -> Self {
        self.kept_per_thread = kept;
        self
    }

    /// Says that the memory is a device's own, so what the program holds on the host does not
    /// count.
    #[must_use]
    pub fn on_device(mut self) -> Self {
        self.on_host = false;
        self
    }

    /// The maximum that threads keep for good once each has computed a matrix product. Counts the
    /// threads that an operation may use and the thread that runs the operation.
    pub fn kept(&self) -> Bytes {
        self.kept_per_thread * (self.threads as u64 + 1)
    }

    /// Whether the model knows what `method` of burn's backend traits allocates. A call of any
    /// other method is named in [`Footprint::unaccounted`]. The simple heap treats every method
    /// alike and knows none.
    ///
    /// ```
    /// use firebox_heap::Heap;
    /// assert!(Heap::flex().has_rule("float_matmul"));
    /// assert!(!Heap::flex().has_rule("ctc_loss"));
    /// ```
    pub fn has_rule(&self, method: &str) -> bool {
        self.backend == Backend::Flex && flex::model(method).is_some()
    }
}

impl MemoryModel for Heap {
    fn name(&self) -> &str {
        match self.backend {
            Backend::Flex => "heap (flex)",
            Backend::Simple => "heap (simple)",
        }
    }

    fn answer(&self, question: &Question<'_>) -> Footprint {
        run::run(question.trace, self)
    }

    fn is_on_host(&self) -> bool {
        self.on_host
    }
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
