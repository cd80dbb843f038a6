//! Deferred calls: what loader threads ask for, kept with its host data until another thread needs
//! it.
//!
//! A loader thread computes nothing on the device. Each of its calls is recorded on its own, and
//! its results are promises that know the call. The first other thread that needs such a tensor
//! makes the calls that lead to it, in the order of their dependencies. A call that nobody needs is
//! never made. A batch that waits in a loader's queue therefore takes no device memory, and the
//! training thread finds its batches as if it had made them itself.
//!
//! If a loader thread reads a value, the calls are made on its own stream. What is still held of
//! their results goes back to the host and is uploaded again when it is needed.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn_backend::Backend;
use firebox_trace::{Bytes, Step, TensorIndex};
use parking_lot::{Condvar, Mutex};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::kind::{Kind, Value};
use crate::record::inputs::to_host;
use crate::record::recorder::StepRecorder;
use crate::record::session::{self, Deed, Session};
use crate::record::values::{Frame, Instruction, Values};
use crate::tensor::{LazyTensor, Node, Promised, Stage, Ticket};
use crate::threads::handover::{TrainingTurn, wait_for_turn};
use crate::threads::loaders::{Loaded, computes, note_reader, upload};
use crate::threads::locks;
use crate::threads::streams::{current_worker, meet, stream_of_worker};

/// A deferred call.
pub(crate) struct Deferred<B: Backend> {
    state: Mutex<State<B>>,
    /// Notified when a thread is done with the call.
    done: Condvar,
}

/// The state of a deferred call.
enum State<B: Backend> {
    /// Still being recorded.
    Open,
    /// Not made yet.
    Waiting(Pending<B>),
    /// Being made by this thread.
    Running(ThreadId),
    /// Made, or failed.
    Over,
}

/// A deferred call that has not been made yet.
struct Pending<B: Backend> {
    program: Vec<Deed<B>>,
    inputs: Vec<Input<B>>,
    /// The tensors that wait for the results.
    outputs: Vec<Promised<B>>,
    /// The number of tensors in the call's session.
    tensors: usize,
    ticket: Arc<Ticket>,
    /// The host memory of the call. Counted until the call is made.
    host: Option<Loaded>,
}

type Input<B> = (TensorIndex, Arc<dyn Awaited<B>>);

/// A result of a deferred call.
pub(crate) struct Place<B: Backend> {
    call: Arc<Deferred<B>>,
    index: TensorIndex,
}

impl<B: Backend> Clone for Place<B> {
    fn clone(&self) -> Self {
        Self { call: self.call.clone(), index: self.index }
    }
}

/// A tensor of any kind that a deferred call takes.
pub(crate) trait Awaited<B: Backend>: Send + Sync {
    /// The deferred call that will compute the tensor. `None` if it has a value.
    fn waits_for(&self) -> Option<&Place<B>>;
    /// The bytes of its elements.
    fn bytes(&self) -> Bytes;
    /// The tensor's value. Not shared if nobody else holds the tensor.
    fn take(self: Arc<Self>) -> Value<B>;
    /// The inputs of the call that computes the tensor, if nobody else holds tensor and call.
    /// Otherwise empty.
    fn unlink(self: Arc<Self>) -> Vec<Input<B>>;
}

impl<B: Backend, K: Kind<B>> Awaited<B> for Node<B, K> {
    fn waits_for(&self) -> Option<&Place<B>> {
        self.deferred()
    }

    fn bytes(&self) -> Bytes {
        Node::bytes(self)
    }

    fn take(self: Arc<Self>) -> Value<B> {
        K::erase(LazyTensor { node: self }.into_value())
    }

    fn unlink(self: Arc<Self>) -> Vec<Input<B>> {
        let call = Arc::into_inner(self).and_then(|mut node| node.forget_deferred());
        let call = call.and_then(|place| Arc::into_inner(place.call));
        call.map_or_else(Vec::new, |mut call| call.take_inputs())
    }
}

impl<B: Backend> Place<B> {
    /// Makes the call, and those it depends on, on this thread. Their results have values
    /// afterwards.
    fn force(&self) {
        let mut order = Order::new(self.call.clone());
        while let Some(call) = order.next(|_| false) {
            if let Some((claim, pending)) = Claim::of(call) {
                claim.run(pending);
            }
        }
    }

    /// Computes the tensor's value on this loader thread. What others still hold of the tensors
    /// that lead to it goes back to the host. `None` if another thread was faster or the call has
    /// failed.
    fn compute(&self, worker: u16) -> Option<Value<B>> {
        // A thread that computes for itself keeps all its calls claimed until the end. Two such
        // threads could wait for each other.
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock();
        let mut known = Known::default();
        let (mut made, mut mine) = (Vec::new(), FxHashSet::default());
        let mut order = Order::new(self.call.clone());
        while let Some(call) = order.next(|place| known.contains_key(&place.key())) {
            if mine.insert(Arc::as_ptr(&call))
                && let Some((claim, mut pending)) = Claim::of(call)
            {
                claim.compute(&mut pending, &mut known);
                made.push((claim, pending));
            }
        }
        for (claim, pending) in made {
            claim.go_to_host(pending, &known, self.key(), worker);
        }
        known.remove(&self.key())
    }

    fn key(&self) -> Key {
        self.call.key(self.index)
    }
}

/// The most bytes of tensors that are alive at once while the calls which lead to `wanted` are
/// made, the results included. A call's inputs count until its results are there, a view like any
/// other tensor. What an operation takes while it runs does not count.
pub(crate) fn bytes_to_make<B: Backend>(wanted: &[Place<B>]) -> Bytes {
    let (mut made, mut uses) = (FxHashSet::default(), FxHashMap::default());
    let (mut live, mut most) = (Bytes::ZERO, Bytes::ZERO);
    for place in wanted {
        let mut order = Order::new(place.call.clone());
        while let Some(call) = order.next(|place| made.contains(&Arc::as_ptr(&place.call))) {
            if !made.insert(Arc::as_ptr(&call)) {
                continue;
            }
            locks::taken();
            let State::Waiting(pending) = &*call.state.lock() else { continue };
            let outputs = pending.outputs.iter().filter_map(|(_, output)| output.upgrade());
            live += outputs.map(|output| output.bytes()).sum::<Bytes>();
            most = most.max(live);
            for (_, input) in &pending.inputs {
                let place = input.waits_for();
                let place = place.filter(|place| made.contains(&Arc::as_ptr(&place.call)));
                let Some(place) = place else { continue };
                let used: &mut usize = uses.entry(place.key()).or_default();
                *used += 1;
                // Nobody else holds it.
                if *used == Arc::strong_count(input) {
                    live -= input.bytes();
                }
            }
        }
    }
    most
}

type Key = (usize, TensorIndex);

/// Values that only the computing thread has.
type Known<B> = FxHashMap<Key, Value<B>>;

/// Deferred calls in the order of their dependencies. Iterative, because a chain may be long.
struct Order<B: Backend>(Vec<Arc<Deferred<B>>>);

impl<B: Backend> Order<B> {
    fn new(last: Arc<Deferred<B>>) -> Self {
        Self(vec![last])
    }

    /// The next call whose inputs all have values or are `known`.
    fn next(&mut self, known: impl Fn(&Place<B>) -> bool) -> Option<Arc<Deferred<B>>> {
        loop {
            let waits = self.0.last()?.waits_for(&known);
            if waits.is_empty() {
                return self.0.pop();
            }
            self.0.extend(waits);
        }
    }
}

impl<B: Backend> Deferred<B> {
    /// The calls to make before this one, the first of them last.
    fn waits_for(&self, known: impl Fn(&Place<B>) -> bool) -> Vec<Arc<Self>> {
        locks::taken();
        let state = self.state.lock();
        let State::Waiting(call) = &*state else { return Vec::new() };
        let waits = call.inputs.iter().rev().filter_map(|(_, input)| input.waits_for());
        // A failed call is not made again.
        let waits = waits.filter(|place| !known(place) && !place.call.is_over());
        waits.map(|place| place.call.clone()).collect()
    }

    fn is_over(&self) -> bool {
        locks::taken();
        matches!(*self.state.lock(), State::Over)
    }

    fn set(&self, state: State<B>) {
        locks::taken();
        *self.state.lock() = state;
        self.done.notify_all();
    }

    fn key(&self, index: TensorIndex) -> Key {
        (std::ptr::from_ref(self) as usize, index)
    }

    /// Ends the recording of the call. It now waits to be made.
    fn close(&self, mut session: Box<Session<B>>) {
        session.end(Stage::Recorded);
        let worker = current_worker().expect("this is a loader thread");
        let (program, outputs) = session.take_program();
        self.set(State::Waiting(Pending {
            program,
            inputs: std::mem::take(&mut session.loading.awaited),
            outputs,
            tensors: session.trace.tensors.len(),
            ticket: session.ticket.clone(),
            host: Some(Loaded::new(worker, session.loading.uploaded)),
        }));
        session.spare();
    }

    fn take_inputs(&mut self) -> Vec<Input<B>> {
        match self.state.get_mut() {
            State::Waiting(call) => std::mem::take(&mut call.inputs),
            _ => Vec::new(),
        }
    }
}

/// A call that this thread is making. Dropping it without [`end`](Self::end) marks the call as
/// failed.
struct Claim<B: Backend> {
    call: Arc<Deferred<B>>,
    ticket: Arc<Ticket>,
    has_ended: bool,
}

impl<B: Backend> Claim<B> {
    /// Claims the call for this thread. Waits while another thread makes it. `None` if it is over.
    ///
    /// # Panics
    ///
    /// If this thread is already making the call. That can happen while it waits for a thread pool.
    fn of(call: Arc<Deferred<B>>) -> Option<(Self, Pending<B>)> {
        let me = thread::current().id();
        locks::taken();
        let mut state = call.state.lock();
        while let State::Running(other) = *state {
            assert!(
                other != me,
                "a tensor that a loader thread has asked for was needed by a task that its own computation has started: use it \
                 once before it is shared with tasks of a thread pool"
            );
            call.done.wait(&mut state);
        }
        match std::mem::replace(&mut *state, State::Running(me)) {
            State::Waiting(pending) => {
                drop(state);
                Some((Self { call, ticket: pending.ticket.clone(), has_ended: false }, pending))
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// Makes the call and hands the results to the tensors that wait for them.
    fn run(self, pending: Pending<B>) {
        let mut values = Values::of(pending.tensors);
        pending.inputs.into_iter().for_each(|(index, input)| values.store(index, input.take()));
        perform(pending.program, &mut values);
        for (index, waiting) in pending.outputs {
            if let Some((waiting, value)) = waiting.upgrade().zip(values.remove(index)) {
                waiting.settle(*value);
            }
        }
        self.end(Stage::Run, State::Over);
    }

    /// Makes the call for this thread alone.
    fn compute(&self, pending: &mut Pending<B>, known: &mut Known<B>) {
        let mut values = Values::of(pending.tensors);
        for (index, input) in pending.inputs.drain(..) {
            let value = match input.waits_for().map(Place::key) {
                Some(key) if Arc::strong_count(&input) == 1 => known.remove(&key),
                Some(key) => known.get(&key).cloned(),
                None => None,
            };
            values.store(index, value.unwrap_or_else(|| input.take()));
        }
        perform(pending.program.drain(..), &mut values);
        for (index, _) in &pending.outputs {
            if let Some(value) = values.remove(*index) {
                known.insert(self.call.key(*index), *value);
            }
        }
    }

    /// Reads the results that somebody holds, not counting the holder that asks for `wanted`. They
    /// are uploaded again when they are needed. If one of them cannot be read, the call has failed.
    fn go_to_host(self, mut pending: Pending<B>, known: &Known<B>, wanted: Key, worker: u16) {
        let key = |index| self.call.key(index);
        pending
            .outputs
            .retain(|(index, waiting)| waiting.strong_count() > usize::from(key(*index) == wanted));
        let mut host = Bytes::ZERO;
        for (index, _) in &pending.outputs {
            let index = *index;
            let Some((data, device, make)) = known.get(&key(index)).and_then(to_host) else {
                return;
            };
            host += Bytes::new(data.bytes.len() as u64);
            let step = Step::Upload { output: index, host };
            let upload = move |frame: &mut Frame<'_, B>| frame.store(0, make(data, &device));
            pending.program.push((Some(step), Instruction::Once(Box::new(upload))));
        }
        // Stop counting the old host data before the new is counted.
        drop(pending.host.take());
        pending.host = Some(Loaded::new(worker, host));
        self.end(Stage::Recorded, State::Waiting(pending));
    }

    fn end(mut self, stage: Stage, state: State<B>) {
        self.has_ended = true;
        self.ticket.set(stage);
        self.call.set(state);
    }
}

impl<B: Backend> Drop for Claim<B> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.ticket.set(Stage::Failed);
            self.call.set(State::Over);
        }
    }
}

impl<B: Backend> Drop for Deferred<B> {
    /// Releases what the call depends on. Iterative, because a chain may be long.
    fn drop(&mut self) {
        let mut inputs = self.take_inputs();
        while let Some((_, input)) = inputs.pop() {
            inputs.extend(input.unlink());
        }
    }
}

/// Performs the program of a call.
fn perform<B: Backend>(program: impl IntoIterator<Item = Deed<B>>, values: &mut Values<B>) {
    for (step, instruction) in program {
        instruction.finish(&mut Frame::of(step.as_ref(), values));
    }
}

/// A tensor that was computed immediately. A loader thread gets it as host data.
pub(crate) fn on_host<B: Backend, K: Kind<B>>(primitive: K::Primitive) -> LazyTensor<B, K> {
    let value = K::erase(primitive);
    let host = current_worker().filter(|_| !computes()).and_then(|_| to_host(&value));
    match host {
        None => LazyTensor::new(K::restore(value)),
        Some((data, device, _)) => upload(data, &device, "from_data"),
    }
}

/// What happens to a call between [`begin`] and its end.
pub(crate) enum Scope<B: Backend> {
    /// It is recorded.
    Recorded,
    /// It is deferred, for another thread.
    Deferred(Arc<Deferred<B>>),
}

/// Whether a call on this thread is recorded or deferred instead of made now.
pub(crate) fn is_later<B: Backend>() -> bool {
    match session::is_recording() {
        true => session::records::<B>(),
        false => current_worker().is_some(),
    }
}

/// Begins a call that is recorded or deferred. `None` if the call must be made now.
#[inline]
pub(crate) fn begin<B: Backend>() -> Option<Scope<B>> {
    if session::is_recording() {
        return session::records::<B>().then_some(Scope::Recorded);
    }
    current_worker().map(|_| open())
}

/// Like [`begin`], for a call that a loader thread makes now if loader threads compute. Not if it
/// `waits` for a deferred call.
#[inline]
pub(crate) fn begin_unless_computed<B: Backend>(waits: impl FnOnce() -> bool) -> Option<Scope<B>> {
    let is_computed =
        computes() && !session::is_recording() && current_worker().is_some() && !waits();
    if is_computed { None } else { begin() }
}

#[cold]
fn open<B: Backend>() -> Scope<B> {
    let call = Arc::new(Deferred { state: Mutex::new(State::Open), done: Condvar::new() });
    let recorder = StepRecorder { glances: true, ..StepRecorder::default() };
    session::install(Session::<B>::deferring(&recorder, call.clone()));
    Scope::Deferred(call)
}

impl<B: Backend> Drop for Scope<B> {
    fn drop(&mut self) {
        if let Self::Deferred(call) = self {
            let session = session::take::<B>();
            match std::thread::panicking() {
                true => session.end(Stage::Failed),
                false => call.close(session),
            }
        }
    }
}

impl<B: Backend> Session<B> {
    /// The place of a result of the call. `None` if the session is not a deferred call.
    pub(crate) fn place_of(&self, index: TensorIndex) -> Option<Place<B>> {
        let call = self.loading.deferred.clone()?;
        Some(Place { call, index })
    }

    /// Keeps a tensor that the call takes. Returns whether this is its last use.
    pub(crate) fn wait_for<K: Kind<B>>(
        &mut self,
        index: TensorIndex,
        node: Arc<Node<B, K>>,
    ) -> bool {
        let has_it = self.loading.awaited.iter().any(|(other, _)| *other == index);
        let is_last = Arc::strong_count(&node) == 1 + usize::from(has_it);
        if !has_it {
            self.loading.awaited.push((index, node));
        }
        is_last
    }
}

/// Computes a tensor that a loader thread asked for, if it has no value.
///
/// Returns the tensor. On a loader thread that tensor stays without a value; the value is returned
/// instead, for this thread alone.
pub(crate) fn force<B: Backend, K: Kind<B>>(
    tensor: LazyTensor<B, K>,
) -> Result<K::Primitive, LazyTensor<B, K>> {
    if tensor.node.deferred().is_none() {
        return Err(tensor);
    }
    meet::<B>(&tensor.device());
    let _turn = (TrainingTurn::take(), wait_for_turn::<B>());
    // Another thread may have been faster.
    let Some(place) = tensor.node.deferred().cloned() else { return Err(tensor) };
    let value = match current_worker() {
        None => {
            place.force();
            None
        }
        Some(worker) => {
            note_reader(worker);
            stream_of_worker(worker).executes(|| place.compute(worker))
        }
    };
    value.map(K::restore).ok_or(tensor)
}
