//! The tensor of the decorator: a tensor of the backend, or the promise of one.
//!
//! A [`LazyTensor`] is a shared pointer to a node. The node holds the backend's tensor. If a
//! recording made it, the node is empty until the recording runs. Clones of a tensor share the
//! node, and only the node holds the backend's tensor. A backend that checks whether a buffer is
//! shared therefore finds what it would find without the decorator.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use firebox_trace::{Bytes, TensorIndex};

use crate::kind::{Kind, Value};
use crate::record::parking::Parked;
use crate::record::{arrival, session};
use crate::threads::deferred::{self, Place};
use crate::threads::handover;
use crate::threads::loaders::Prepared;
use crate::threads::making::Made;
use crate::threads::streams;

/// A tensor of [`Lazy<B>`](crate::Lazy).
pub struct LazyTensor<B: Backend, K: Kind<B>> {
    pub(crate) node: Arc<Node<B, K>>,
}

/// What clones of a tensor share.
pub(crate) struct Node<B: Backend, K: Kind<B>> {
    /// Zero until a recording asks for it. Threads that compute therefore share no counter.
    id: AtomicU64,
    value: OnceLock<K::Primitive>,
    promise: Option<Promise<B>>,
    /// If the value belongs to a batch that is being made.
    of_batch: Option<OfBatch>,
    /// The last session that met this tensor, and the tensor's number there. Packed into one word,
    /// because two recording threads may meet the same tensor at the same time.
    place: AtomicU64,
}

/// What counts a tensor of a batch.
enum OfBatch {
    /// A loader thread has computed it.
    Prepared(Prepared),
    /// The thread that trains has.
    Made { _counts: Made },
}

impl OfBatch {
    #[inline]
    fn here(bytes: impl Fn() -> Bytes) -> Option<Self> {
        let made = || Made::here(&bytes).map(|made| Self::Made { _counts: made });
        Prepared::here(&bytes).map(Self::Prepared).or_else(made)
    }
}

/// How many bits of [`Node::place`] number the tensor. The other bits number the session.
const INDEX_BITS: u32 = 28;

fn place(session: u64, index: TensorIndex) -> u64 {
    assert!(
        index.0 < 1 << INDEX_BITS,
        "a recording has at most 2^28 tensors: record fewer steps at once"
    );
    session << INDEX_BITS | u64::from(index.0)
}

fn placed(place: u64) -> (u64, TensorIndex) {
    (place >> INDEX_BITS, TensorIndex(place as u32 & ((1 << INDEX_BITS) - 1)))
}

/// What is known about a tensor that a recording will make.
struct Promise<B: Backend> {
    shape: Shape,
    dtype: DType,
    device: B::Device,
    call: &'static str,
    ticket: Arc<Ticket>,
    /// If a loader thread asked for the tensor: the deferred call that makes it.
    deferred: Option<Place<B>>,
    /// Where its values are, if not on the device.
    parked: OnceLock<Arc<dyn Parked>>,
}

/// The state of a recording, as seen by the tensors it promised.
#[derive(Debug)]
pub(crate) struct Ticket(AtomicU8);

/// The states of a [`Ticket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    Recording,
    Recorded,
    Discarded,
    Failed,
    Run,
}

impl Ticket {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU8::new(Stage::Recording as u8)))
    }

    pub(crate) fn set(&self, stage: Stage) {
        self.0.store(stage as u8, Ordering::Release);
    }

    pub(crate) fn get(&self) -> Stage {
        match self.0.load(Ordering::Acquire) {
            0 => Stage::Recording,
            1 => Stage::Recorded,
            2 => Stage::Discarded,
            3 => Stage::Failed,
            _ => Stage::Run,
        }
    }
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl<B: Backend, K: Kind<B>> Node<B, K> {
    fn new(value: OnceLock<K::Primitive>, promise: Option<Promise<B>>, place: u64) -> Self {
        let (id, place) = (AtomicU64::new(0), AtomicU64::new(place));
        let mut node = Self { id, value, promise, of_batch: None, place };
        if node.value.get().is_some() {
            node.of_batch = OfBatch::here(|| node.bytes());
        }
        node
    }

    /// A number unique among all nodes, past and present.
    pub(crate) fn id(&self) -> u64 {
        let id = self.id.load(Ordering::Relaxed);
        if id != 0 {
            return id;
        }
        let new = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        match self.id.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => new,
            Err(given_meanwhile) => given_meanwhile,
        }
    }

    /// The tensor's number in `session`, if no other session has met the tensor since.
    pub(crate) fn index_in(&self, session: u64) -> Option<TensorIndex> {
        let (last, index) = placed(self.place.load(Ordering::Relaxed));
        (last == session).then_some(index)
    }

    pub(crate) fn enter(&self, session: u64, index: TensorIndex) {
        self.place.store(place(session, index), Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> Option<&K::Primitive> {
        self.value.get()
    }

    /// Takes the backend's tensor out of a node without other owners. The session is not told that
    /// the tensor has ended.
    pub(crate) fn consume(mut self) -> Option<K::Primitive> {
        *self.place.get_mut() = 0;
        self.value.take()
    }

    /// The deferred call that will compute the value. `None` if the node has a value or no loader
    /// thread asked for it.
    pub(crate) fn deferred(&self) -> Option<&Place<B>> {
        let promise = self.promise.as_ref().filter(|_| self.value.get().is_none())?;
        promise.deferred.as_ref()
    }

    /// The bytes of its elements.
    pub(crate) fn bytes(&self) -> Bytes {
        match (self.value.get(), &self.promise) {
            (Some(value), _) => Bytes::of_elements(&value.shape(), value.dtype()),
            (None, Some(promise)) => Bytes::of_elements(&promise.shape, promise.dtype),
            (None, None) => Bytes::ZERO,
        }
    }

    /// Where the values are, if not on the device.
    pub(crate) fn parked(&self) -> Option<&Arc<dyn Parked>> {
        self.promise.as_ref()?.parked.get()
    }

    /// Takes the deferred call out of a node without other owners.
    pub(crate) fn forget_deferred(&mut self) -> Option<Place<B>> {
        self.promise.as_mut()?.deferred.take()
    }

    fn refuse(&self) -> ! {
        let promise = self.promise.as_ref().expect("a tensor without value is a promise");
        let what = format!(
            "a tensor of shape {:?} that a recording made with `{}`",
            promise.shape.as_slice(),
            promise.call
        );
        match promise.ticket.get() {
            Stage::Recording => panic!(
                "{what} was used on another thread while that recording goes on: its values do not exist yet; \
                 use it on the recording thread, or outside the recording"
            ),
            Stage::Discarded => panic!(
                "{what} was used after that recording was discarded: its values were never computed; do not keep \
                 tensors of a planned step (a module that stores them, say behind an `Arc<Mutex<…>>`, has to be \
                 restored after planning)"
            ),
            Stage::Failed => panic!(
                "{what} was used after that recording failed: an operation panicked before this tensor was \
                 computed; load the model from the last good state"
            ),
            Stage::Recorded | Stage::Run => {
                panic!("{what} was used before that recording was run: call `Recording::run` first")
            }
        }
    }
}

impl<B: Backend, K: Kind<B>> Drop for Node<B, K> {
    fn drop(&mut self) {
        let (session, index) = placed(*self.place.get_mut());
        if session != 0 {
            session::tensor_freed::<B>(session, index);
        }
        if handover::is_elsewhere::<B>() {
            if let Some(value) = self.value.take() {
                handover::leave(session, value);
            }
        } else if streams::is_loader_thread() {
            // burn's fusion registers the end of a tensor on the stream of the thread that drops
            // it.
            let value = self.value.take();
            streams::on_stream::<B, _>(|| drop(value));
        }
    }
}

/// A node of any kind that waits for its value.
pub(crate) trait Settle<B: Backend>: Send + Sync {
    /// Gives the node its value.
    fn settle(&self, value: Value<B>);
    /// Tells the node where its values are.
    fn park(&self, parked: Arc<dyn Parked>);
    /// The bytes of its elements.
    fn bytes(&self) -> Bytes;
}

/// A tensor of a session that waits for its value while somebody holds it.
pub(crate) type Promised<B> = (TensorIndex, Weak<dyn Settle<B>>);

impl<B: Backend, K: Kind<B>> Settle<B> for Node<B, K> {
    fn settle(&self, value: Value<B>) {
        // A node keeps its first value.
        let _ = self.value.set(K::restore(value));
    }

    fn park(&self, parked: Arc<dyn Parked>) {
        if let Some(promise) = &self.promise {
            let _ = promise.parked.set(parked);
        }
    }

    fn bytes(&self) -> Bytes {
        Node::bytes(self)
    }
}

impl<B: Backend, K: Kind<B>> LazyTensor<B, K> {
    /// Decorates a tensor of the backend.
    pub fn new(primitive: K::Primitive) -> Self {
        Self { node: Arc::new(Node::new(OnceLock::from(primitive), None, 0)) }
    }

    /// Another owner of the same node.
    pub(crate) fn share(&self) -> Self {
        Self { node: self.node.clone() }
    }

    /// Whether a loader thread asked for this tensor. `false` for tensors that other threads
    /// compute from it.
    pub fn is_prepared(&self) -> bool {
        let is_deferred = |promise: &Promise<B>| promise.deferred.is_some();
        matches!(self.node.of_batch, Some(OfBatch::Prepared(_)))
            || self.node.promise.as_ref().is_some_and(is_deferred)
    }

    /// Notes that this thread needs a tensor that a loader thread has computed.
    #[inline]
    fn note_need(&self) {
        if let Some(OfBatch::Prepared(prepared)) = &self.node.of_batch {
            prepared.note_need();
        }
    }

    /// The promise of a tensor that the running session will make.
    pub(crate) fn promise(
        shape: Shape,
        dtype: DType,
        device: B::Device,
        call: &'static str,
        (ticket, deferred): (Arc<Ticket>, Option<Place<B>>),
        (session, index): (u64, TensorIndex),
    ) -> Self {
        let parked = OnceLock::new();
        let promise = Promise { shape, dtype, device, call, ticket, deferred, parked };
        let node = Node::new(OnceLock::new(), Some(promise), place(session, index));
        Self { node: Arc::new(node) }
    }

    /// A tensor whose values are not on the device.
    pub(crate) fn parked(
        (shape, dtype): (Shape, DType),
        device: B::Device,
        call: &'static str,
        parked: Arc<dyn Parked>,
    ) -> Self {
        let (ticket, parked) = (Ticket::new(), OnceLock::from(parked));
        ticket.set(Stage::Run);
        let promise = Promise { shape, dtype, device, call, ticket, deferred: None, parked };
        Self { node: Arc::new(Node::new(OnceLock::new(), Some(promise), 0)) }
    }

    /// The tensor of the backend.
    ///
    /// # Panics
    ///
    /// If a recording made this tensor and has not run. The message says what happened to the
    /// recording.
    pub fn into_inner(self) -> K::Primitive {
        match self.forced() {
            Ok(own) => own,
            Err(tensor) => tensor.into_value(),
        }
    }

    /// Like [`into_inner`](Self::into_inner), for a tensor that already has its value or is parked.
    pub(crate) fn into_value(self) -> K::Primitive {
        self.note_need();
        let tensor = match self.is_parked() {
            true => match self.forced() {
                Ok(own) => return own,
                Err(tensor) => tensor,
            },
            false => self,
        };
        let node = tensor.node;
        let (recording, _) = placed(node.place.load(Ordering::Relaxed));
        let value = match Arc::try_unwrap(node) {
            Ok(node) if node.value.get().is_none() => node.refuse(),
            Ok(node) => node.consume().expect("checked above"),
            Err(node) => node.value.get().unwrap_or_else(|| node.refuse()).clone(),
        };
        if handover::is_elsewhere::<B>() {
            handover::hold(recording, value.clone());
        }
        value
    }

    /// Computes a tensor that a loader thread asked for. Does nothing on loader threads. Must be
    /// called before the session is borrowed.
    #[inline]
    pub(crate) fn settle(&self) {
        self.note_need();
        // On a loader thread the session computes it when it needs it.
        if self.node.deferred().is_some()
            && streams::current_worker().is_none()
            && !session::with::<B, _>(|session| session.options.looks).unwrap_or(false)
        {
            drop(self.clone().forced());
        }
    }

    /// Makes sure that the tensor has its value.
    ///
    /// Returns the tensor, which has its value unless a recording promised it. On a loader thread,
    /// a tensor without a value keeps none; the value is returned instead, for this thread alone.
    /// So is that of a parked tensor, which stays parked for its other owners.
    fn forced(self) -> Result<K::Primitive, Self> {
        match (self.node.value.get(), self.node.parked().cloned()) {
            (Some(_), _) => Err(self),
            (None, Some(parked)) => {
                let device = self.device();
                drop(self);
                let _turn = handover::wait_for_turn::<B>();
                Ok(streams::on_stream::<B, _>(|| K::from_data(parked.fetch(), &device)))
            }
            (None, None) => deferred::force(self),
        }
    }

    /// The tensor of the backend. This tensor stays usable.
    ///
    /// # Panics
    ///
    /// As [`into_inner`](Self::into_inner).
    pub(crate) fn value(&self) -> K::Primitive {
        self.note_need();
        match self.node.value.get() {
            Some(value) => value.clone(),
            None => match self.clone().forced() {
                Ok(own) => own,
                Err(_) => self.ready().clone(),
            },
        }
    }

    /// A reference to the tensor of the backend.
    ///
    /// # Panics
    ///
    /// As [`into_inner`](Self::into_inner).
    pub(crate) fn ready(&self) -> &K::Primitive {
        self.node.value.get().unwrap_or_else(|| self.node.refuse())
    }

    /// Whether the tensor has no value yet: the recording that promised it has not run, or a loader
    /// thread asked for it and nobody has needed it.
    pub fn is_promise(&self) -> bool {
        let has_none = self.node.promise.is_some() && self.node.value.get().is_none();
        has_none && !self.is_parked()
    }

    /// Whether the values are not on the device, see [`Recording::park`](crate::Recording::park).
    pub fn is_parked(&self) -> bool {
        self.node.parked().is_some()
    }

    /// The device on which the tensor lives or will live.
    pub(crate) fn device(&self) -> B::Device {
        match (self.node.value.get(), &self.node.promise) {
            (Some(value), _) => K::device(value),
            (None, Some(promise)) => promise.device.clone(),
            (None, None) => unreachable!("a tensor without value is a promise"),
        }
    }

    /// The tensor's index in the trace this thread is recording. `None` outside a recording.
    ///
    /// A tensor that the recording has not met becomes one of its existing tensors.
    pub fn trace_index(&self) -> Option<TensorIndex> {
        self.settle();
        session::with::<B, _>(|session| session.meet(self))
    }
}

impl<B: Backend, K: Kind<B>> Clone for LazyTensor<B, K> {
    fn clone(&self) -> Self {
        arrival::copy_of(self).unwrap_or_else(|| self.share())
    }
}

impl<B: Backend, K: Kind<B>> fmt::Debug for LazyTensor<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node.value.get() {
            Some(value) => f.debug_tuple("LazyTensor").field(value).finish(),
            None => f
                .debug_struct("LazyTensor")
                .field("shape", &self.shape())
                .field("dtype", &self.dtype())
                .finish_non_exhaustive(),
        }
    }
}

impl<B: Backend, K: Kind<B>> TensorMetadata for LazyTensor<B, K> {
    fn dtype(&self) -> DType {
        match (self.node.value.get(), &self.node.promise) {
            (Some(value), _) => value.dtype(),
            (None, Some(promise)) => promise.dtype,
            (None, None) => unreachable!("a tensor without value is a promise"),
        }
    }

    fn shape(&self) -> Shape {
        match (self.node.value.get(), &self.node.promise) {
            (Some(value), _) => value.shape(),
            (None, Some(promise)) => promise.shape.clone(),
            (None, None) => unreachable!("a tensor without value is a promise"),
        }
    }
}
