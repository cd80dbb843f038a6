//! The session of a recording thread: the trace so far, the program that will run, and the values
//! that reads have already computed.
//!
//! Every operation of [`Lazy<B>`](crate::Lazy) asks here whether its thread is recording. Outside a
//! recording that costs one read of a thread-local number.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_ir::{OperationIr, TensorId};
use burn_std::{DType, Shape};
use firebox_trace::{
    Bytes, Call, Description, DescriptionIndex, Label, OpIndex, Origin, Step, TensorIndex,
    TensorInfo, TensorType, Trace, Use,
};
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use crate::kind::Kind;
use crate::record::draws::{Draws, Generator};
use crate::record::inputs::select_rows;
use crate::record::known::{self, Form, Known};
use crate::record::parking::Parking;
use crate::record::recorder::{RecordError, StepRecorder};
use crate::record::rewriting::Rewriting;
use crate::record::values::{Frame, Given, Instruction, Values, push};
use crate::tensor::{LazyTensor, Promised, Settle, Stage, Ticket};
use crate::threads::deferred::{Awaited, Deferred, Place};
use crate::threads::progress;

thread_local! {
    /// The number of this thread's session. Zero outside a recording.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    /// The number of the latest session that ran to its end on this thread.
    static LATEST: Cell<u64> = const { Cell::new(0) };
    static SESSION: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
    /// A session whose lists can be used again, for the next call of a loader thread.
    static SPARE: Cell<Option<Box<dyn Any>>> = const { Cell::new(None) };
}

/// So many calls of loader threads count as a recording, by which calls that are remembered age.
const CALLS: u64 = 1024;

static NEXT_SESSION: AtomicU64 = AtomicU64::new(1);

/// Whether this thread is recording, on any backend. What it computes now runs later, or never.
pub fn is_recording() -> bool {
    CURRENT.get() != 0
}

/// Whether random numbers are recorded as one number each.
pub(crate) fn draws_are_fixed<B: Backend>() -> bool {
    with::<B, _>(|session| session.options.draws == Draws::Fixed).unwrap_or(false)
}

/// The number of the latest recording that this thread ran to its end. Zero if there is none.
pub fn latest_recording() -> u64 {
    LATEST.get()
}

/// Whether this thread is recording operations of `Lazy<B>`.
#[inline]
pub(crate) fn records<B: Backend>() -> bool {
    CURRENT.get() != 0 && with::<B, _>(|_| ()).is_some()
}

/// Runs `f` on this thread's session. `None` if it is not recording operations of `Lazy<B>`.
pub(crate) fn with<B: Backend, R>(f: impl FnOnce(&mut Session<B>) -> R) -> Option<R> {
    if CURRENT.get() == 0 {
        return None;
    }
    SESSION.with_borrow_mut(|session| session.as_mut()?.downcast_mut::<Session<B>>().map(f))
}

/// Records that the last owner of a tensor is gone.
pub(crate) fn tensor_freed<B: Backend>(session: u64, tensor: TensorIndex) {
    // Two cases are ignored: a thread that is ending has no session any more, and the session may
    // be borrowed while a tensor is dropped. The trace then keeps the tensor until the end. It may
    // live longer there than in the program, never shorter.
    let current = CURRENT.try_with(Cell::get).unwrap_or(0);
    if current == session {
        let _ = SESSION.try_with(|current| {
            if let Ok(mut current) = current.try_borrow_mut()
                && let Some(current) = current.as_mut().and_then(|s| s.downcast_mut::<Session<B>>())
            {
                current.free(tensor);
            }
        });
    }
}

/// Makes `session` the session of this thread until it is taken back.
pub(crate) fn install<B: Backend>(session: Box<Session<B>>) {
    CURRENT.set(session.id);
    SESSION.set(Some(session));
}

/// Ends the session of this thread.
pub(crate) fn take<B: Backend>() -> Box<Session<B>> {
    CURRENT.set(0);
    let session = SESSION.take().expect("a session was installed on this thread");
    session.downcast::<Session<B>>().expect("the session keeps its backend")
}

/// An instruction, and the step that it runs, if it is not an effect.
pub(crate) type Deed<B> = (Option<Step>, Instruction<B>);

/// A recording in progress or at its end.
pub(crate) struct Session<B: Backend> {
    pub(crate) id: u64,
    pub(crate) options: StepRecorder,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) trace: Trace,
    pub(crate) described: Described,
    pub(crate) program: Steps<B>,
    pub(crate) values: Values<B>,
    pub(crate) parks: Parks,
    /// Tensors that existed before the session, by the id of their node. Needed where another
    /// thread's recording has met the same tensor since.
    pub(crate) met: FxHashMap<u64, TensorIndex>,
    /// The tensors that wait for their values. An entry is cleared when its tensor ends, because a
    /// weak pointer keeps the memory of its target allocated.
    pub(crate) born: Vec<Option<Weak<dyn Settle<B>>>>,
    pub(crate) limits: Limits,
    pub(crate) loading: Loading<B>,
}

/// What is known of calls while they are described.
#[derive(Default)]
pub(crate) struct Described {
    /// The tensor types used so far, so that equal types are stored once.
    types: FxHashSet<Arc<TensorType>>,
    /// The description of the call being recorded, and the next number in it.
    operations: Vec<OperationIr>,
    next_local: u64,
    /// The descriptions of the trace, by hash.
    known: FxHashMap<u64, Vec<DescriptionIndex>>,
    /// The descriptions of known calls, by signature.
    known_calls: FxHashMap<u64, (DescriptionIndex, Arc<Known>)>,
    /// Host data that became tensors. `None` if it is not kept.
    pub(crate) uploads: Option<FxHashMap<TensorIndex, TensorData>>,
    /// The host data of the call being described, by its numbers in the description.
    data: Vec<(u64, TensorData)>,
}

/// What runs.
pub(crate) struct Steps<B: Backend> {
    /// The instructions to run, in order, each with its step in the trace. An effect has the step
    /// that comes after it.
    pub(crate) instructions: Vec<(OpIndex, Instruction<B>)>,
    /// How many steps have run.
    pub(crate) ran: usize,
    /// What runs instead of the recorded steps.
    pub(crate) rewriting: Option<Rewriting>,
    /// What takes the place of what steps make.
    pub(crate) given: Given,
}

/// What is parked while a session runs, and what was parked before.
#[derive(Default)]
pub(crate) struct Parks {
    pub(crate) parking: Option<Parking>,
    /// What was parked and is uploaded.
    pub(crate) brought: Vec<TensorIndex>,
}

/// What a recording is held to.
#[derive(Default)]
pub(crate) struct Limits {
    /// Why the recording must not run, and how many reads were refused for that reason.
    pub(crate) refused: Option<RecordError>,
    pub(crate) refusals: usize,
    /// The calls so far, and the bytes of the tensors that existed before the session.
    pub(crate) calls: usize,
    pub(crate) existing: Bytes,
}

/// If a session holds one deferred call of a loader thread: the call, the tensors it takes, and the
/// bytes of its host data.
#[derive(Default)]
pub(crate) struct Loading<B: Backend> {
    pub(crate) deferred: Option<Arc<Deferred<B>>>,
    pub(crate) awaited: Vec<(TensorIndex, Arc<dyn Awaited<B>>)>,
    pub(crate) uploaded: Bytes,
    /// The deferred calls that a session has found which only looks.
    pub(crate) wanted: Vec<Place<B>>,
}

impl<B: Backend> Session<B> {
    pub(crate) fn new(options: &StepRecorder) -> Self {
        if !options.glances {
            known::begin();
        }
        let uploads = options.keeps_uploads.then(FxHashMap::default);
        Self {
            id: NEXT_SESSION.fetch_add(1, Ordering::Relaxed),
            options: options.clone(),
            ticket: Ticket::new(),
            trace: Trace::default(),
            described: Described { uploads, ..Described::default() },
            program: Steps {
                instructions: Vec::new(),
                ran: 0,
                rewriting: None,
                given: Given::default(),
            },
            values: Values::drawing_from(Generator::of(options.draws)),
            parks: Parks::default(),
            met: FxHashMap::default(),
            born: Vec::new(),
            limits: Limits::default(),
            loading: Loading::default(),
        }
    }

    pub(crate) fn add(&mut self, shape: Shape, dtype: DType, origin: Origin) -> TensorIndex {
        let index = TensorIndex(self.trace.tensors.len() as u32);
        let ty = TensorType { shape, dtype };
        let ty = match self.described.types.get(&ty) {
            Some(known) => known.clone(),
            None => {
                let new = Arc::new(ty);
                // One call has few.
                if self.loading.deferred.is_none() {
                    self.described.types.insert(new.clone());
                }
                new
            }
        };
        push(&mut self.trace.tensors, TensorInfo::new(ty, origin));
        self.values.add();
        push(&mut self.born, None);
        index
    }

    /// The number of a tensor. A tensor new to the session is added as one that existed before, or
    /// uploaded if it is parked.
    pub(crate) fn meet<K: Kind<B>>(&mut self, tensor: &LazyTensor<B, K>) -> TensorIndex {
        if let Some(index) = tensor.node.index_in(self.id) {
            return index;
        }
        if let Some(index) = self.met.get(&tensor.node.id()) {
            return *index;
        }
        // A deferred call gets its value when it is made.
        if let Some(parked) = tensor.node.parked().filter(|_| self.loading.deferred.is_none()) {
            let index = self.bring_back(tensor, parked.clone());
            self.met.insert(tensor.node.id(), index);
            tensor.node.enter(self.id, index);
            return index;
        }
        let index = self.add(tensor.shape(), tensor.dtype(), Origin::Existing);
        let info = &mut self.trace.tensors[index.0 as usize];
        info.prepared = tensor.is_prepared();
        self.limits.existing += info.bytes();
        let looks = (self.options.salvage || self.options.looks) && tensor.is_promise();
        let has_none = self.loading.deferred.is_some() || looks;
        self.want(tensor);
        if !has_none {
            let value = K::erase(tensor.value());
            let rows = self.options.rows.as_ref().and_then(|rows| rows.get(&tensor.node.id()));
            self.values.store(
                index,
                match rows {
                    Some(rows) => select_rows(value, rows, &tensor.device()),
                    None => value,
                },
            );
        }
        self.met.insert(tensor.node.id(), index);
        tensor.node.enter(self.id, index);
        index
    }

    /// Notes the call of a loader thread that makes a tensor, if the session only looks.
    pub(crate) fn want<K: Kind<B>>(&mut self, tensor: &LazyTensor<B, K>) {
        let place = tensor.node.deferred().filter(|_| self.options.looks);
        self.loading.wanted.extend(place.cloned());
    }

    /// Takes a tensor as an argument of a call.
    pub(crate) fn take<K: Kind<B>>(&mut self, tensor: LazyTensor<B, K>) -> Use {
        let index = self.meet(&tensor);
        if self.loading.deferred.is_some() {
            return Use { tensor: index, last: self.wait_for(index, tensor.node) };
        }
        match Arc::try_unwrap(tensor.node) {
            Ok(node) => {
                node.consume();
                self.born[index.0 as usize] = None;
                Use { tensor: index, last: true }
            }
            Err(_shared) => Use { tensor: index, last: false },
        }
    }

    /// The shape and element type of a tensor.
    pub(crate) fn form(&self, tensor: TensorIndex) -> Form {
        let info = self.trace.tensor(tensor);
        (info.shape.clone(), info.dtype)
    }

    /// Starts the description of a call. Its `inputs` inputs get the first numbers.
    pub(crate) fn open_call(&mut self, inputs: usize) {
        self.described.operations.clear();
        self.described.next_local = inputs as u64;
    }

    /// The next free number in the description.
    pub(crate) fn next_local(&mut self) -> TensorId {
        self.described.next_local += 1;
        TensorId::new(self.described.next_local - 1)
    }

    /// Adds an operation to the description of the current call.
    pub(crate) fn describe(&mut self, operation: OperationIr) {
        self.described.operations.push(operation);
    }

    /// Ends the description of a call. `outputs` are the numbers of its results.
    pub(crate) fn close_call(&mut self, outputs: Vec<u64>) -> DescriptionIndex {
        let operations = self.described.operations.drain(..).collect();
        let description = Description { operations, outputs, workspace: None };
        let hash = hash_of(&description);
        self.share(Arc::new(description), hash)
    }

    /// Keeps host data that the call turns into a tensor, if uploads are kept.
    pub(crate) fn keep_described(&mut self, local: TensorId, data: &TensorData) {
        if self.described.uploads.is_some() {
            self.described.data.push((local.value(), data.clone()));
        }
    }

    /// Maps the results of the described call to tensors of the trace.
    pub(crate) fn place_described(&mut self, locals: &[u64], outputs: &[TensorIndex]) {
        let Some(uploads) = &mut self.described.uploads else { return };
        for (local, data) in self.described.data.drain(..) {
            let output = locals.iter().position(|output| *output == local);
            if let Some(output) = output.and_then(|at| outputs.get(at)) {
                uploads.insert(*output, data);
            }
        }
    }

    /// The index of a description in the trace. Equal descriptions share one index.
    pub(crate) fn share(&mut self, description: Arc<Description>, hash: u64) -> DescriptionIndex {
        let alike = self.described.known.entry(hash).or_default();
        let descriptions = &mut self.trace.descriptions;
        for index in alike.iter() {
            let known = &descriptions[index.0 as usize];
            if Arc::ptr_eq(known, &description) || *known == description {
                return *index;
            }
        }
        let index = DescriptionIndex(descriptions.len() as u32);
        descriptions.push(description);
        alike.push(index);
        index
    }

    /// A call described before, in this session or in another one of this thread.
    pub(crate) fn known_call(&mut self, signature: u64) -> Option<(DescriptionIndex, Arc<Known>)> {
        // Host data is kept where a call is described.
        let keeps = self.described.uploads.is_some();
        let is_whole = |known: &Known| !(keeps && known.has_data);
        if let Some(found) = self.described.known_calls.get(&signature) {
            return Some(found.clone()).filter(|(_, known)| is_whole(known));
        }
        let known = known::find(signature).filter(|known| is_whole(known))?;
        if self.loading.deferred.is_some() {
            // Nobody reads its trace.
            return Some((DescriptionIndex(0), known));
        }
        let description = self.share(known.description.clone(), known.hash);
        self.described.known_calls.insert(signature, (description, known.clone()));
        Some((description, known))
    }

    pub(crate) fn remember_call(
        &mut self,
        signature: u64,
        description: DescriptionIndex,
        call: Arc<Known>,
    ) {
        self.described.known_calls.insert(signature, (description, call.clone()));
        known::remember(signature, call);
    }

    /// The promise of a result of the current call.
    pub(crate) fn promise<K: Kind<B>>(
        &mut self,
        (shape, dtype): Form,
        device: B::Device,
        call: &'static str,
    ) -> (LazyTensor<B, K>, TensorIndex) {
        let origin = Origin::Made(OpIndex(self.trace.steps.len() as u32));
        let index = self.add(shape.clone(), dtype, origin);
        let place = (self.id, index);
        let ticket = (self.ticket.clone(), self.place_of(index));
        let tensor = LazyTensor::promise(shape, dtype, device, call, ticket, place);
        let settle: Arc<dyn Settle<B>> = tensor.node.clone();
        self.born[index.0 as usize] = Some(Arc::downgrade(&settle));
        (tensor, index)
    }

    /// Appends a call to the trace and to the program.
    pub(crate) fn push_call(&mut self, call: Call, instruction: Instruction<B>) {
        self.instruct(instruction);
        push(&mut self.trace.steps, Step::Call(Box::new(call)));
        if self.loading.deferred.is_none() {
            progress::tick();
        }
        self.refuse_long_recording();
    }

    /// Appends work that makes no tensor, for example seeding.
    pub(crate) fn push_effect(&mut self, run: impl FnOnce(&mut Frame<'_, B>) + Send + 'static) {
        self.instruct(Instruction::Once(Box::new(run)));
    }

    /// Appends the instruction for the next step of the trace.
    pub(crate) fn instruct(&mut self, instruction: Instruction<B>) {
        if !self.options.never_runs {
            self.program.instructions.push((OpIndex(self.trace.steps.len() as u32), instruction));
        }
    }

    /// Turns host data into a tensor. The data stays on the host until the program runs.
    pub(crate) fn upload<K: Kind<B>>(
        &mut self,
        data: TensorData,
        device: &B::Device,
        call: &'static str,
    ) -> LazyTensor<B, K> {
        let host = Bytes::new(data.bytes.len() as u64);
        self.loading.uploaded += host;
        let form = (data.shape.clone(), data.dtype);
        let (tensor, output) = self.promise(form, device.clone(), call);
        let device = device.clone();
        if let Some(uploads) = &mut self.described.uploads {
            uploads.insert(output, data.clone());
        }
        self.instruct(Instruction::Once(Box::new(move |frame| {
            frame.store(0, K::erase(K::from_data(data, &device)));
        })));
        push(&mut self.trace.steps, Step::Upload { output, host });
        tensor
    }

    /// Appends the end of a tensor.
    ///
    /// Tensors freed in a row are sorted into the order in which they were made. burn keeps
    /// gradients in hash maps, whose order changes from run to run, and the order of frees decides
    /// where later buffers are placed.
    fn free(&mut self, tensor: TensorIndex) {
        self.born[tensor.0 as usize] = None;
        push(&mut self.trace.steps, Step::Free(tensor));
        // Frees that have already run, or that an effect follows, stay in place.
        let instructed = self.program.instructions.last().map_or(0, |(at, _)| at.0 as usize);
        let steps = &mut self.trace.steps[self.program.ran.max(instructed)..];
        let before = steps[..steps.len() - 1].iter().rev();
        let later = before.take_while(|step| matches!(step, Step::Free(t) if *t > tensor)).count();
        let from = steps.len() - 1 - later;
        steps[from..].rotate_right(1);
    }

    /// Hands the values to the tensors that wait for them.
    pub(crate) fn settle(&mut self) {
        LATEST.set(self.id);
        for (index, waiting) in self.born.drain(..).enumerate() {
            if let Some(waiting) = waiting.and_then(|waiting| waiting.upgrade())
                && let Some(value) = self.values.remove(TensorIndex(index as u32))
            {
                waiting.settle(*value);
            }
        }
    }

    /// The session of one call of a loader thread. A spare one is used again, because most of what
    /// such a call takes is room for lists.
    pub(crate) fn deferring(options: &StepRecorder, call: Arc<Deferred<B>>) -> Box<Self> {
        let spare = SPARE.take().and_then(|spare| spare.downcast::<Self>().ok());
        let mut session = spare.unwrap_or_else(|| Box::new(Self::new(options)));
        session.id = NEXT_SESSION.fetch_add(1, Ordering::Relaxed);
        session.ticket = Ticket::new();
        session.loading.deferred = Some(call);
        // What a loader thread no longer asks for is forgotten.
        if session.id.is_multiple_of(CALLS) {
            known::begin();
        }
        session
    }

    /// Keeps the session of a call that is over for another one.
    pub(crate) fn spare(mut self: Box<Self>) {
        self.trace.tensors.clear();
        self.trace.steps.clear();
        self.trace.descriptions.clear();
        self.described.known.clear();
        self.described.known_calls.clear();
        self.values.resize(0);
        self.met.clear();
        (self.limits, self.loading.deferred) = (Limits::default(), None);
        (self.loading.uploaded, self.program.ran) = (Bytes::ZERO, 0);
        SPARE.set(Some(self));
    }

    /// Takes the steps out of the session, with the instruction that runs each, and the tensors
    /// that wait for values. Without the ends of tensors.
    pub(crate) fn take_program(&mut self) -> (Vec<Deed<B>>, Vec<Promised<B>>) {
        let mut deeds: Vec<Deed<B>> = Vec::with_capacity(self.program.instructions.len());
        // From the last one: an effect has the step that comes after it, which is another's.
        let mut before = self.trace.steps.len();
        for (at, instruction) in self.program.instructions.drain(..).rev() {
            let at = at.0 as usize;
            let step = (at < before).then(|| {
                before = at;
                std::mem::replace(&mut self.trace.steps[at], Step::Free(TensorIndex(0)))
            });
            deeds.push((step, instruction));
        }
        deeds.reverse();
        let promised = self.born.drain(..).enumerate();
        let promised =
            promised.filter_map(|(index, waiting)| Some((TensorIndex(index as u32), waiting?)));
        (deeds, promised.collect())
    }

    /// The tensors of this session that somebody still holds.
    pub(crate) fn survivors(&self) -> Vec<TensorIndex> {
        let is_held = |waiting: &Weak<dyn Settle<B>>| waiting.strong_count() > 0;
        let born = self.born.iter().enumerate();
        born.filter(|(_, waiting)| waiting.as_ref().is_some_and(is_held))
            .map(|(index, _)| TensorIndex(index as u32))
            .collect()
    }

    pub(crate) fn label(&mut self, tensor: TensorIndex, label: Label) {
        self.trace.tensors[tensor.0 as usize].label = Some(label.into());
    }

    pub(crate) fn end(&self, stage: Stage) {
        self.ticket.set(stage);
    }
}

/// A hash of what a description does.
pub(crate) fn hash_of(description: &Description) -> u64 {
    let mut hasher = FxHasher::default();
    description.operations.hash(&mut hasher);
    description.workspace.hash(&mut hasher);
    hasher.finish()
}

/// The value of a tensor. A promise of this recording is computed now, or `None` if refused.
pub(crate) fn read<B: Backend, K: Kind<B>>(tensor: LazyTensor<B, K>) -> Option<K::Primitive> {
    let id = CURRENT.get();
    if id != 0 && tensor.is_promise() && tensor.node.index_in(id).is_some() {
        with::<B, _>(|session| session.read(tensor)).expect("the tensor belongs to the session")
    } else {
        Some(tensor.into_inner())
    }
}
