//! The recording scope: what a user of the decorator calls.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use firebox_trace::{Bytes, Category, Label, OpIndex, Origin, Step, TensorIndex, Trace};

use crate::draws::Draws;
use crate::inputs::{Input, Rows};
use crate::kind::Kind;
use crate::limits::{ReadLimit, Refused};
use crate::module::rehearsing_as_before;
use crate::progress;
use crate::session::{self, Session};
use crate::tensor::{LazyTensor, Stage};

/// Records operations of [`Lazy<B>`](crate::Lazy) on the calling thread.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Lazy, Recorder};
///
/// let device = Default::default();
/// let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &device);
/// let recording = Recorder::new().record::<Flex, _>(|| x.clone().exp().sum())?;
/// assert_eq!(recording.trace().calls().count(), 2);
/// let sum = recording.run();
/// assert_eq!(sum.into_scalar(), 1f32.exp() + 2f32.exp());
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    pub(crate) read_limit: Option<ReadLimit>,
    /// What the recording itself may take of the host's memory.
    pub(crate) host_limit: Option<Bytes>,
    pub(crate) draws: Draws,
    /// The rows that stand for those of tensors that exist before, by the number of the tensor.
    pub(crate) rows: Option<Arc<Rows>>,
    /// Whether host data that becomes tensors is kept.
    pub(crate) keeps_uploads: bool,
    /// Whether every read is refused.
    pub(crate) refuse_reads: bool,
    /// Whether this is no step, so that what is remembered of steps grows no older.
    pub(crate) glances: bool,
    /// Whether what is recorded will certainly not run, so that it need not be kept.
    pub(crate) never_runs: bool,
    /// Whether tensors that another recording promised may be used: what is computed on them is never run.
    pub(crate) salvage: bool,
}

/// Why nothing was recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The thread records already.
    #[error(
        "this thread records already, and recordings do not nest: end the outer recording first, or record on \
         another thread"
    )]
    Nested,
    /// The program reads a value, and what it recorded before does not fit.
    #[error(
        "step {at} reads a value, and running what comes before it needs {needed} where {budget} are allowed: \
         record fewer items at once, or do not read values inside the step"
    )]
    ReadTooLarge {
        /// The position of the read.
        at: OpIndex,
        /// What the steps before it need.
        needed: Bytes,
        /// The limit.
        budget: Bytes,
    },
    /// Writing the program down takes more of the host's memory than it may: see [`Recorder::limit_host`].
    #[error(
        "writing down the first {calls} operations of the step, with the tensors that they begin with, takes {needed} of the \
         host's memory, more than {budget}: take a larger budget, or a shorter step, such as one of shorter sequences"
    )]
    TooLong {
        /// The operations so far.
        calls: usize,
        /// What they take.
        needed: Bytes,
        /// The limit.
        budget: Bytes,
    },
}

impl Recorder {
    /// A recorder that runs whatever a read asks for.
    pub fn new() -> Self {
        Self::default()
    }

    /// A recorder for a program that is never run and may use tensors without values.
    pub(crate) fn salvage() -> Self {
        Self { salvage: true, never_runs: true, ..Self::default() }
    }

    /// Refuses a read whose prefix has a footprint above `budget`. Default: no limit.
    ///
    /// A value that is read inside a recording forces all steps before it to run. `footprint` gives the bytes that
    /// a trace needs. Where a read is refused, it gives zeros, so that a program that holds a lock there is not unwound through it;
    /// so does every later one, [`is_rehearsal`](crate::is_rehearsal) is true, and the recording is an error once the program is done.
    /// A program that reads 64 times more, as one that waits for another value, is unwound, and so is one that asks for the positions
    /// of non-zero elements, whose number is not known.
    pub fn limit_reads(
        mut self,
        budget: Bytes,
        footprint: impl Fn(&Trace) -> Bytes + Send + Sync + 'static,
    ) -> Self {
        self.read_limit = Some(ReadLimit { budget, footprint: Arc::new(footprint) });
        self
    }

    /// Refuses to write down more than `budget` of the host's memory holds, the tensors that the program begins with included.
    pub fn limit_host(mut self, budget: Bytes) -> Self {
        self.host_limit = Some(budget);
        self
    }

    /// Refuses every read. [`rehearse`](crate::rehearse) then keeps no program, which could not run anyway.
    pub fn refuse_reads(mut self) -> Self {
        self.refuse_reads = true;
        self.limit_reads(Bytes::ZERO, |_| Bytes::MAX)
    }

    /// Records only to look at something, such as the shapes of a batch: what is remembered of the calls of steps grows no older by it.
    pub fn glance(mut self) -> Self {
        self.glances = true;
        self.refuse_reads()
    }

    /// Whether every read is refused, so that nothing of what is recorded runs.
    pub fn refuses_reads(&self) -> bool {
        self.refuse_reads
    }

    /// Draws random numbers that a read forces from a generator of the recorder's own, so that a recording that is
    /// discarded leaves the backend's random state untouched. Default: the backend's generator.
    pub fn substitute_random(mut self) -> Self {
        self.draws = Draws::Substitute;
        self
    }

    /// Makes each random number one fixed number of its distribution: the probability of a Bernoulli one, the middle of a uniform
    /// one, a deviation above the mean of a normal one. Recordings of parts of a batch then draw what that of the whole batch
    /// draws. The backend's generator is left alone.
    pub fn fixed_draws(mut self) -> Self {
        self.draws = Draws::Fixed;
        self
    }

    /// Lets some of the rows of tensors that exist before stand for all of them, in the order given: by [`Input::id`], and along
    /// the first dimension. Their shapes stay what they are, and rows beyond those given are not there.
    pub fn with_rows(mut self, rows: impl IntoIterator<Item = (u64, Vec<usize>)>) -> Self {
        self.rows = Some(Arc::new(rows.into_iter().collect()));
        self
    }

    /// Keeps host data that becomes tensors, so that [`Recording::value_of`] has it. Default: it is gone once it was uploaded.
    pub fn keep_uploads(mut self) -> Self {
        self.keeps_uploads = true;
        self
    }

    /// Records what `program` does with tensors of `Lazy<B>` on this thread.
    ///
    /// Tensors that existed before are inputs of the recording; host data stays on the host until the recording is
    /// run. Operations of other threads run at once meanwhile, and so do operations of other backends.
    ///
    /// # Errors
    ///
    /// [`RecordError::Nested`] inside another recording, [`RecordError::ReadTooLarge`] where a read is refused,
    /// [`RecordError::TooLong`] where the recording itself is.
    ///
    /// # Panics
    ///
    /// If `program` panics; tensors that it made are lost, all others stay usable.
    pub fn record<B: Backend, T>(
        &self,
        program: impl FnOnce() -> T,
    ) -> Result<Recording<B, T>, RecordError> {
        if session::is_recording() {
            return Err(RecordError::Nested);
        }
        session::install(Session::<B>::new(self));
        let program = || progress::recording(program);
        let result = rehearsing_as_before(|| catch_unwind(AssertUnwindSafe(program)));
        let session = session::take::<B>();
        // What a program does behind a read that was refused, a panic included, says nothing.
        if let Some(refused) = session.refused.clone() {
            session.end(Stage::Failed);
            return Err(refused);
        }
        match result {
            Ok(result) => {
                session.end(Stage::Recorded);
                Ok(Recording { parts: Some((result, session)) })
            }
            Err(panic) => {
                session.end(Stage::Failed);
                match panic.downcast::<Refused>() {
                    Ok(refused) => Err(refused.0),
                    Err(panic) => resume_unwind(panic),
                }
            }
        }
    }
}

/// What was recorded, and the result that it promises. Dropping it discards it.
#[must_use = "a recording that is dropped never runs"]
pub struct Recording<B: Backend, T> {
    parts: Option<(T, Session<B>)>,
}

impl<B: Backend, T: fmt::Debug> fmt::Debug for Recording<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let result = self.parts.as_ref().map(|(result, _)| result);
        f.debug_struct("Recording").field("result", &result).finish_non_exhaustive()
    }
}

/// A tensor that outlived the recording that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// Its dimensions.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// The method that was to make it.
    pub call: String,
    /// The path of the parameter that was used last to make it, where parameters are labelled.
    pub parameter: Option<String>,
}

impl fmt::Display for Survivor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} of `{}`", self.shape.as_slice(), self.dtype, self.call)?;
        match &self.parameter {
            Some(parameter) => write!(f, " behind `{parameter}`"),
            None => Ok(()),
        }
    }
}

/// What is left of a discarded recording.
#[derive(Clone, Debug)]
pub struct Discarded {
    /// The trace.
    pub trace: Trace,
    /// Tensors of the recording that somebody still holds. They have no values and will never have any.
    pub survivors: Vec<Survivor>,
}

impl<B: Backend, T> Recording<B, T> {
    /// What was recorded.
    pub fn trace(&self) -> &Trace {
        &self.parts.as_ref().expect("a recording has its parts until it ends").1.trace
    }

    /// The promised result. Its tensors have shapes and no values.
    pub fn result(&self) -> &T {
        &self.parts.as_ref().expect("a recording has its parts until it ends").0
    }

    /// The tensors that existed before the recording and are used in it.
    pub fn inputs(&self) -> Vec<Input> {
        self.parts.as_ref().map(|(_, session)| session.inputs()).unwrap_or_default()
    }

    /// The values of the first `rows` rows of an input; none if there is no such input, or it has no rows.
    pub fn rows_of_input(&self, input: &Input, rows: usize) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.rows_of_input(input, rows))
    }

    /// The value of a tensor that existed before the recording, or was made from host data and
    /// [kept](Recorder::keep_uploads); none if it is not there, such as where a read has used it up.
    ///
    /// # Panics
    ///
    /// If the trace has no such tensor.
    pub fn value_of(&self, tensor: TensorIndex) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.value_of(tensor))
    }

    /// Runs the recording on `B` and gives the result with real tensors.
    ///
    /// # Panics
    ///
    /// If an operation panics on `B`. Tensors of the recording are lost then, all others stay usable.
    pub fn run(self) -> T {
        self.run_observed(|_| ())
    }

    /// Computes everything that was recorded, as [`run`](Self::run) does, and calls `done` behind each step of the
    /// trace: to measure what a step takes, and to compare it with a footprint's timeline.
    ///
    /// Steps before a read have run already, and marks take no time: of these it is not told.
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run), and if `done` panics.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::tensor::Tensor;
    /// use firebox_lazy::{Lazy, Recorder};
    ///
    /// let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
    /// let recording = Recorder::new().record::<Flex, _>(|| x.exp().sum())?;
    /// let mut steps = 0;
    /// recording.run_observed(|_| steps += 1);
    /// assert_eq!(steps, 2);
    /// # Ok::<(), firebox_lazy::RecordError>(())
    /// ```
    pub fn run_observed(mut self, mut done: impl FnMut(OpIndex)) -> T {
        let (result, mut session) =
            self.parts.take().expect("a recording has its parts until it ends");
        session.end(Stage::Failed);
        session.run_observed(&mut done);
        session.settle();
        session.end(Stage::Run);
        result
    }

    /// Throws the recording away. Tensors that it took over from the program are freed, nothing is computed.
    pub fn discard(mut self) -> Discarded {
        let (result, session) = self.parts.take().expect("a recording has its parts until it ends");
        discard(result, session)
    }
}

impl<B: Backend, T> Drop for Recording<B, T> {
    fn drop(&mut self) {
        if let Some((result, session)) = self.parts.take() {
            discard(result, session);
        }
    }
}

fn discard<B: Backend, T>(result: T, session: Session<B>) -> Discarded {
    session.end(Stage::Discarded);
    drop(result);
    let trace = &session.trace;
    let survivors = session.survivors().into_iter().map(|index| {
        let tensor = trace.tensor(index);
        let call = match tensor.origin {
            Origin::Made(at) => match &trace.steps[at.0 as usize] {
                Step::Call(call) => call.name.to_string(),
                _ => "from_data".to_owned(),
            },
            Origin::Existing => unreachable!("survivors were made"),
        };
        let parameter = nearest_parameter(trace, index);
        Survivor { shape: tensor.shape.clone(), dtype: tensor.dtype, call, parameter }
    });
    Discarded { survivors: survivors.collect(), trace: session.trace }
}

/// The parameter from which the fewest calls lead to a tensor.
fn nearest_parameter(trace: &Trace, tensor: TensorIndex) -> Option<String> {
    let (mut seen, mut next) = (vec![false; trace.tensors.len()], VecDeque::from([tensor]));
    while let Some(tensor) = next.pop_front() {
        let info = trace.tensor(tensor);
        if let Some(label) = info.label.as_ref().filter(|l| l.category == Category::Parameter) {
            return Some(label.name.clone());
        }
        if let Origin::Made(at) = info.origin
            && let Step::Call(call) = &trace.steps[at.0 as usize]
        {
            let inputs = call.inputs.iter().map(|input| input.tensor);
            next.extend(inputs.filter(|t| !std::mem::replace(&mut seen[t.0 as usize], true)));
        }
    }
    None
}

/// Says what a tensor is for, in the trace that this thread records on `B`. Does nothing outside a recording.
pub fn label<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>, label: Label) {
    tensor.settle();
    session::with::<B, _>(|session| {
        let index = session.meet(tensor);
        session.label(index, label);
    });
}

/// The number of a tensor in the trace that this thread records on `B`. `None` outside a recording.
pub fn index_in_trace<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>) -> Option<TensorIndex> {
    tensor.trace_index()
}

/// Sets a mark in the trace that this thread records on `B`. Does nothing outside a recording.
pub fn mark<B: Backend>(text: impl Into<String>) {
    session::with::<B, _>(|session| session.mark(text.into()));
}
