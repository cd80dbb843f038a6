//! Batches that arrive during a rehearsal. Only one batch exists while a step is planned, but in
//! training each iteration has its own, and metrics may hold parts of earlier ones.
//!
//! `LazyTensor::clone` asks here whether a batch is being cut.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn_backend::{Backend, TensorMetadata};
use firebox_trace::{Bytes, Category, Label, OpIndex, Origin, Step, TensorIndex};
use rustc_hash::FxHashMap;

use crate::kind::Kind;
use crate::record::session::{self, Session};
use crate::record::values::push;
use crate::tensor::LazyTensor;

/// A batch that arrives while this thread records: a copy of one that exists.
///
/// Its tensors are uploaded when they are first used in [`cut`](Self::cut), and end once nobody
/// holds them, neither the arrival nor the program.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Arrival, Lazy, StepRecorder};
///
/// let batch = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
/// let recording = StepRecorder::new().record::<Flex, _>(|| {
///     let mut kept = Vec::new();
///     for _ in 0..2 {
///         let arrival = Arrival::new();
///         kept.push(arrival.cut(|| batch.clone()));
///     }
/// })?;
/// // Two batches of their own, although only one exists.
/// assert_eq!(recording.trace().tensors.len(), 2);
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
#[derive(Default)]
pub struct Arrival {
    tensors: Rc<Tensors>,
}

/// The tensors of an arrival, by the node of the tensor that each is a copy of.
type Tensors = RefCell<FxHashMap<u64, Box<dyn Any>>>;

thread_local! {
    /// Whether a batch is being cut on this thread.
    static CUTS: Cell<bool> = const { Cell::new(false) };
    static CURRENT: RefCell<Option<Rc<Tensors>>> = const { RefCell::new(None) };
}

impl Arrival {
    /// A batch without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `cut` on the batch that exists. What it clones are this arrival's tensors.
    ///
    /// Outside a recording they are the tensors of the batch itself.
    pub fn cut<R>(&self, cut: impl FnOnce() -> R) -> R {
        let _before = Before(CUTS.replace(true), CURRENT.replace(Some(self.tensors.clone())));
        cut()
    }
}

/// What this thread did before it cut a batch.
struct Before(bool, Option<Rc<Tensors>>);

impl Drop for Before {
    fn drop(&mut self) {
        CUTS.set(self.0);
        CURRENT.set(self.1.take());
    }
}

impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrival").field("tensors", &self.tensors.borrow().len()).finish()
    }
}

/// The arrival's copy of a tensor, if this thread is cutting a batch.
#[inline]
pub(crate) fn copy_of<B: Backend, K: Kind<B>>(
    tensor: &LazyTensor<B, K>,
) -> Option<LazyTensor<B, K>> {
    if CUTS.get() { arrived(tensor) } else { None }
}

/// Runs a program that only looks. What it clones is noted, as what it uses is.
pub(crate) fn looking<R>(program: impl FnOnce() -> R) -> R {
    let _before = Before(CUTS.replace(true), CURRENT.replace(None));
    program()
}

#[cold]
fn arrived<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>) -> Option<LazyTensor<B, K>> {
    let Some(tensors) = CURRENT.with_borrow(Clone::clone) else {
        session::with::<B, _>(|session| session.want(tensor));
        return None;
    };
    let id = tensor.node.id();
    let known = |known: &Box<dyn Any>| known.downcast_ref().map(LazyTensor::share);
    if let Some(copy) = tensors.borrow().get(&id).and_then(known) {
        return Some(copy);
    }
    // Its value is the one that exists, and that is cloned as usual.
    CUTS.set(false);
    tensor.settle();
    let copy = session::with::<B, _>(|session| session.arrive(tensor)).flatten();
    CUTS.set(true);
    let copy = copy?;
    tensors.borrow_mut().insert(id, Box::new(copy.share()));
    Some(copy)
}

impl<B: Backend> Session<B> {
    /// A copy of a tensor that existed before the session. `None` for other tensors.
    fn arrive<K: Kind<B>>(&mut self, tensor: &LazyTensor<B, K>) -> Option<LazyTensor<B, K>> {
        let is_made = |index: TensorIndex| self.trace.tensor(index).origin != Origin::Existing;
        if tensor.is_promise() || tensor.node.index_in(self.id).is_some_and(is_made) {
            return None;
        }
        let at = OpIndex(self.trace.steps.len() as u32);
        let output = self.add(tensor.shape(), tensor.dtype(), Origin::Made(at));
        self.trace.tensors[output.0 as usize].prepared = tensor.is_prepared();
        self.label(output, Label { category: Category::Input, name: String::new() });
        let value = tensor.value();
        self.values.store(output, K::erase(value.clone()));
        push(&mut self.trace.steps, Step::Upload { output, host: Bytes::ZERO });
        let copy = LazyTensor::new(value);
        copy.node.enter(self.id, output);
        Some(copy)
    }
}
