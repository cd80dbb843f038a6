//! A simulated heap: buffers with reference counts, and views on them.
//!
//! The rules of operations are written against it in the shape of the code that they model. A
//! [`View`] is cloned where the backend clones a tensor, and goes out of scope where the backend's
//! tensor does. Lifetimes, uniqueness and therefore the peak follow from Rust's own scoping rules.

use std::cell::RefCell;
use std::rc::Rc;

use burn_std::DType;
use rustc_hash::FxHashMap;

use crate::layout::Layout;
use firebox_trace::{Bytes, TensorIndex};

/// The simulated heap of one run.
#[derive(Clone)]
pub(crate) struct Arena {
    state: Rc<RefCell<State>>,
    /// How many threads an operation may use at the same time.
    pub(crate) threads: usize,
    /// What a thread keeps for good once it has computed a matrix product.
    kept_per_thread: Bytes,
}

/// Who keeps memory for good.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// The thread that runs the operations.
    Caller,
    /// Every thread of the pool.
    Pool,
}

/// What happened on the heap so far.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) live: u64,
    pub(crate) peak: u64,
    /// The number of buffers allocated so far, and that number when the peak was reached.
    allocated: usize,
    allocated_at_peak: usize,
    /// The step of the peak.
    pub(crate) peak_step: u32,
    /// The current step.
    pub(crate) step: u32,
    /// The maximum live bytes in the current step.
    pub(crate) step_peak: u64,
    /// The buffers that are alive, and those that were alive at the peak.
    buffers: FxHashMap<usize, Record>,
    /// The buffers of the peak that have died since.
    dead: Vec<usize>,
    /// Whether a workspace was bounded instead of known.
    pub(crate) bounded: bool,
    /// The keepers that already have what they keep.
    keepers: Vec<Keeper>,
    /// The bytes that threads keep for good.
    pub(crate) kept: u64,
    /// The maximum live bytes, without those that threads keep for good.
    pub(crate) peak_beside_kept: u64,
}

/// What is known about a buffer.
pub(crate) struct Record {
    pub(crate) bytes: u64,
    pub(crate) source: Source,
    pub(crate) born: u32,
    pub(crate) died: Option<u32>,
    /// The tensors that were on the buffer, each with its first and last step.
    pub(crate) tensors: Vec<Tenancy>,
}

/// A tensor on a buffer.
pub(crate) struct Tenancy {
    pub(crate) tensor: TensorIndex,
    pub(crate) from: u32,
    pub(crate) to: Option<u32>,
    /// The latest step that used the tensor.
    pub(crate) used: u32,
}

/// Where a buffer comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// It existed before the recording.
    Existing,
    /// It holds host data of the recording.
    Host,
    /// An operation allocated it.
    Operation,
    /// Threads keep it for good.
    Kept,
}

/// An allocation. Freed when dropped.
pub(crate) struct Buffer {
    pub(crate) id: usize,
    pub(crate) bytes: u64,
    arena: Arena,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.state.borrow_mut().free(self.id, self.bytes);
    }
}

/// A tensor of the simulated backend: a layout on a shared buffer. Cloning shares the buffer.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) buffer: Rc<Buffer>,
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
}

impl Arena {
    pub(crate) fn new(threads: usize, kept_per_thread: Bytes) -> Self {
        Self { state: Rc::default(), threads: threads.max(1), kept_per_thread }
    }

    /// Allocates `bytes` until the result is dropped.
    pub(crate) fn allocate(&self, bytes: u64, source: Source) -> Rc<Buffer> {
        let id = self.state.borrow_mut().allocate(bytes, source);
        Rc::new(Buffer { id, bytes, arena: self.clone() })
    }

    /// Records what `keeper` allocates once and never frees.
    pub(crate) fn keep_for_good(&self, keeper: Keeper) {
        let mut state = self.state.borrow_mut();
        if state.keepers.contains(&keeper) {
            return;
        }
        state.keepers.push(keeper);
        let threads = if keeper == Keeper::Caller { 1 } else { self.threads as u64 };
        let bytes = self.kept_per_thread.get() * threads;
        state.kept += bytes;
        state.allocate(bytes, Source::Kept);
    }

    /// Workspace of `bytes` until the result is dropped.
    #[must_use]
    pub(crate) fn workspace(&self, bytes: u64) -> Rc<Buffer> {
        self.allocate(bytes, Source::Operation)
    }

    /// Workspace of at most `bytes`. The estimate becomes an upper bound.
    #[must_use]
    pub(crate) fn workspace_at_most(&self, bytes: u64) -> Rc<Buffer> {
        self.state.borrow_mut().bounded = true;
        self.workspace(bytes)
    }

    /// A new contiguous tensor.
    pub(crate) fn tensor(&self, shape: impl Into<Vec<usize>>, dtype: DType) -> View {
        let layout = Layout::contiguous(shape);
        let buffer = self.workspace(bytes_of(layout.elements(), dtype));
        View { buffer, layout, dtype }
    }

    /// A new contiguous tensor from a vector of bytes. Its memory is copied once, to align it.
    pub(crate) fn tensor_from_bytes(&self, shape: impl Into<Vec<usize>>, dtype: DType) -> View {
        let shape = shape.into();
        let _unaligned = self.workspace(bytes_of(shape.iter().product(), dtype));
        self.tensor(shape, dtype)
    }

    pub(crate) fn begin(&self, step: u32) {
        let mut state = self.state.borrow_mut();
        state.step = step;
        state.step_peak = state.live;
    }

    /// The live bytes, and their maximum in this step.
    pub(crate) fn moment(&self) -> (Bytes, Bytes) {
        let state = self.state.borrow();
        (Bytes::new(state.live), Bytes::new(state.step_peak))
    }

    pub(crate) fn live(&self) -> u64 {
        self.state.borrow().live
    }

    pub(crate) fn with_state<R>(&self, read: impl FnOnce(&mut State) -> R) -> R {
        read(&mut self.state.borrow_mut())
    }
}

impl State {
    fn allocate(&mut self, bytes: u64, source: Source) -> usize {
        let id = self.allocated;
        let born = self.step;
        self.allocated += 1;
        self.buffers.insert(id, Record { bytes, source, born, died: None, tensors: Vec::new() });
        self.live += bytes;
        self.step_peak = self.step_peak.max(self.live);
        self.peak_beside_kept = self.peak_beside_kept.max(self.live - self.kept);
        if self.live > self.peak {
            self.peak = self.live;
            self.allocated_at_peak = self.allocated;
            self.peak_step = born;
            for dead in self.dead.drain(..) {
                self.buffers.remove(&dead);
            }
        }
        id
    }

    /// Forgets a buffer that did not exist at the peak. A buffer of the peak is kept until the next
    /// peak.
    fn free(&mut self, id: usize, bytes: u64) {
        self.live -= bytes;
        if id >= self.allocated_at_peak {
            self.buffers.remove(&id);
        } else {
            self.buffer(id).died = Some(self.step);
            self.dead.push(id);
        }
    }

    /// A buffer that is alive.
    pub(crate) fn buffer(&mut self, id: usize) -> &mut Record {
        self.buffers.get_mut(&id).expect("it is alive")
    }

    /// The buffers that were alive at the peak.
    pub(crate) fn at_peak(&self) -> impl Iterator<Item = &Record> {
        let were_there = |(id, _): &(&usize, &Record)| **id < self.allocated_at_peak;
        self.buffers.iter().filter(were_there).map(|(_, buffer)| buffer)
    }
}

impl View {
    /// The bytes of the view's own elements.
    pub(crate) fn bytes(&self) -> u64 {
        bytes_of(self.layout.elements(), self.dtype)
    }

    pub(crate) fn elements(&self) -> usize {
        self.layout.elements()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.layout.shape
    }

    /// Whether nobody else holds the buffer, so it may be written in place.
    pub(crate) fn is_unique(&self) -> bool {
        Rc::strong_count(&self.buffer) == 1
    }

    /// Whether the view can be written in place element by element.
    pub(crate) fn is_unique_from_start(&self) -> bool {
        self.is_unique() && self.layout.is_contiguous_from_start()
    }

    /// Whether the view covers its whole buffer.
    pub(crate) fn covers_buffer(&self) -> bool {
        self.buffer.bytes == self.bytes()
    }

    /// The same buffer with another layout.
    pub(crate) fn with_layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// A copy in row-major order, or a shared handle if the view already is the whole buffer in
    /// that order.
    ///
    /// Takes the view by reference, as the backend does. The original stays alive alongside the
    /// copy until its owner goes out of scope. A handle that was not copied makes the buffer shared
    /// until then.
    pub(crate) fn to_contiguous(&self, arena: &Arena) -> Self {
        if self.layout.is_contiguous_from_start() && self.covers_buffer() {
            return self.clone();
        }
        arena.tensor(self.shape(), self.dtype)
    }

    /// Another shape: a view, or a copy if the elements are not in row-major order from the start.
    pub(crate) fn reshape(&self, arena: &Arena, shape: &[usize]) -> Self {
        match self.layout.reshape(shape) {
            Some(layout) => self.clone().with_layout(layout),
            None => {
                let copy = self.to_contiguous(arena);
                let layout = Layout::contiguous(shape);
                copy.with_layout(layout)
            }
        }
    }

    pub(crate) fn expand(self, shape: &[usize]) -> Self {
        let layout = self.layout.expand(shape);
        self.with_layout(layout)
    }
}

/// The bytes of `elements` elements of `dtype`.
pub(crate) fn bytes_of(elements: usize, dtype: DType) -> u64 {
    match dtype {
        DType::QFloat(scheme) => (elements as u64 * scheme.size_bits_stored() as u64).div_ceil(8),
        dtype => elements as u64 * dtype.size() as u64,
    }
}
