//! The recording scope: what users of the decorator call.
//!
//! [`Recorder`] sets the options, [`Recorder::record`] opens a session for the program, and
//! [`Recording`] runs or discards what was recorded.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use firebox_trace::{Bytes, Category, Label, Mark, OpIndex, Origin, Step, TensorIndex, Trace};

use crate::kind::Kind;
use crate::module::rehearsing_as_before;
use crate::record::draws::Draws;
use crate::record::inputs::{Input, Rows};
use crate::record::limits::{ReadLimit, Refused};
use crate::record::session::{self, Session};
use crate::tensor::{LazyTensor, Stage};
use crate::threads::progress;

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
    /// The limit on the host memory of the recording itself.
    pub(crate) host_limit: Option<Bytes>,
    pub(crate) draws: Draws,
    /// The rows that stand in for those of tensors that existed before, by [`Input::id`].
    pub(crate) rows: Option<Arc<Rows>>,
    /// Whether to keep host data that becomes tensors.
    pub(crate) keeps_uploads: bool,
    /// Whether to refuse every read.
    pub(crate) refuse_reads: bool,
    /// Whether this is not a step. Calls remembered from steps then do not age.
    pub(crate) glances: bool,
    /// Whether only shapes are looked at: tensors that loader threads asked for are not computed.
    pub(crate) looks: bool,
    /// Whether the program will certainly not run and need not be kept.
    pub(crate) never_runs: bool,
    /// Whether tensors promised by another recording may be used. What is computed on them never
    /// runs.
    pub(crate) salvage: bool,
}

/// Why nothing was recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The thread is already recording.
    #[error(
        "this thread records already, and recordings do not nest: end the outer recording first, or record on \
         another thread"
    )]
    Nested,
    /// The program reads a value, and what it recorded before the read does not fit.
    #[error(
        "step {at} reads a value, and running what comes before it needs {needed} where {budget} are allowed: \
         record fewer items at once, or do not read values inside the step"
    )]
    ReadTooLarge {
        /// The position of the read.
        at: OpIndex,
        /// The footprint of the steps before it.
        needed: Bytes,
        /// The limit.
        budget: Bytes,
    },
    /// The recording takes more host memory than allowed. See [`Recorder::limit_host`].
    #[error(
        "writing down the first {calls} operations of the step, with the tensors that they begin with, takes {needed} of the \
         host's memory, more than {budget}: take a larger budget, or a shorter step, such as one of shorter sequences"
    )]
    TooLong {
        /// The operations so far.
        calls: usize,
        /// The host memory they take.
        needed: Bytes,
        /// The limit.
        budget: Bytes,
    },
}

impl Recorder {
    /// A recorder without limits: every read runs what it needs.
    pub fn new() -> Self {
        Self::default()
    }

    /// A recorder for a program that never runs and may use tensors without values.
    pub(crate) fn salvage() -> Self {
        Self { salvage: true, never_runs: true, ..Self::default() }
    }

    /// Refuses a read if running what comes before it needs more than `budget`. Default: no limit.
    ///
    /// Reading a value inside a recording forces all steps before it to run. `footprint` returns
    /// the bytes that a trace needs.
    ///
    /// A refused read returns zeros, so that a program that holds a lock is not unwound through it.
    /// From then on every read returns zeros and [`is_rehearsal`](crate::is_rehearsal) is true. The
    /// recording ends in an error once the program is done.
    ///
    /// Two kinds of programs are unwound: one that reads 64 more times, because it may be waiting
    /// for another value, and one that asks for the positions of non-zero elements, whose number is
    /// unknown.
    pub fn limit_reads(
        mut self,
        budget: Bytes,
        footprint: impl Fn(&Trace) -> Bytes + Send + Sync + 'static,
    ) -> Self {
        self.read_limit = Some(ReadLimit { budget, footprint: Arc::new(footprint) });
        self
    }

    /// Limits the host memory that the recording may take, including the tensors that the program
    /// begins with. Default: no limit.
    ///
    /// Checked every 1,024 operations. A program whose tensors alone exceed `budget` when it begins
    /// is not refused.
    pub fn limit_host(mut self, budget: Bytes) -> Self {
        self.host_limit = Some(budget);
        self
    }

    /// Refuses every read. [`rehearse`](crate::rehearse) then does not keep the program, which
    /// could not run anyway.
    pub fn refuse_reads(mut self) -> Self {
        self.refuse_reads = true;
        self.limit_reads(Bytes::ZERO, |_| Bytes::MAX)
    }

    /// Records only to look at something, for example the shapes of a batch. Calls remembered from
    /// steps do not age. Refuses every read. What loader threads asked for stays on the host.
    ///
    /// The recording must not be run.
    pub fn glance(mut self) -> Self {
        (self.glances, self.looks, self.never_runs) = (true, true, true);
        self.refuse_reads()
    }

    /// Whether every read is refused. Nothing runs before the recording does.
    pub fn refuses_reads(&self) -> bool {
        self.refuse_reads
    }

    /// Draws random numbers from a generator of the recording's own. A read, which makes the draws
    /// before it, then leaves the backend's random state untouched. Default: the backend's
    /// generator.
    pub fn substitute_random(mut self) -> Self {
        self.draws = Draws::Substitute;
        self
    }

    /// Replaces every random number by one fixed number of its distribution: the probability for
    /// Bernoulli, the middle for uniform, one deviation above the mean for normal.
    ///
    /// Recordings of parts of a batch then draw what the recording of the whole batch draws. The
    /// backend's generator is left alone.
    pub fn fixed_draws(mut self) -> Self {
        self.draws = Draws::Fixed;
        self
    }

    /// Makes some rows of existing tensors stand in for all of them: by [`Input::id`], along the
    /// first dimension, in the order given.
    ///
    /// The recording still sees the original shapes. Rows beyond those given do not exist.
    pub fn with_rows(mut self, rows: impl IntoIterator<Item = (u64, Vec<usize>)>) -> Self {
        self.rows = Some(Arc::new(rows.into_iter().collect()));
        self
    }

    /// Keeps host data that becomes tensors, for [`Recording::value_of`]. Default: the data is gone
    /// once it is uploaded.
    pub fn keep_uploads(mut self) -> Self {
        self.keeps_uploads = true;
        self
    }

    /// Records what `program` does with tensors of `Lazy<B>` on this thread.
    ///
    /// Tensors that existed before are inputs of the recording. Host data stays on the host until
    /// the recording runs. Operations of other threads and of other backends run immediately.
    ///
    /// # Errors
    ///
    /// - [`RecordError::Nested`] inside another recording
    /// - [`RecordError::ReadTooLarge`] if a read is refused
    /// - [`RecordError::TooLong`] if the recording itself takes too much host memory
    ///
    /// # Panics
    ///
    /// If `program` panics. The tensors it made are lost; all others stay usable.
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
        // After a refused read the program computes with zeros. What it does then, even a panic,
        // means nothing.
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

/// A recorded program and the result it promises. Dropping it discards it.
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
    /// The method that would have made it.
    pub call: String,
    /// The labelled parameter from which the fewest calls lead to it, by path. `None` if there is
    /// none.
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
    /// Tensors of the recording that somebody still holds. They have no values and will never have
    /// any.
    pub survivors: Vec<Survivor>,
}

impl<B: Backend, T> Recording<B, T> {
    /// The recorded operations.
    pub fn trace(&self) -> &Trace {
        &self.parts.as_ref().expect("a recording has its parts until it ends").1.trace
    }

    /// The promised result. Its tensors have shapes but no values.
    pub fn result(&self) -> &T {
        &self.parts.as_ref().expect("a recording has its parts until it ends").0
    }

    /// The tensors that existed before the recording and are used in it.
    pub fn inputs(&self) -> Vec<Input> {
        self.parts.as_ref().map(|(_, session)| session.inputs()).unwrap_or_default()
    }

    /// The values of the first `rows` rows of an input. `None` if there is no such input, or it has
    /// no rows.
    pub fn rows_of_input(&self, input: &Input, rows: usize) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.rows_of_input(input, rows))
    }

    /// The value of a tensor that existed before the recording, or was made from host data and
    /// [kept](Recorder::keep_uploads). `None` if the value is gone, for example because a read used
    /// it up.
    ///
    /// # Panics
    ///
    /// If the trace has no such tensor.
    pub fn value_of(&self, tensor: TensorIndex) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.value_of(tensor))
    }

    /// Runs the recording on `B` and returns the result with real tensors.
    ///
    /// # Panics
    ///
    /// If an operation panics on `B`. The tensors of the recording are lost; all others stay
    /// usable.
    pub fn run(self) -> T {
        self.run_observed(|_| ())
    }

    /// Runs the recording as [`run`](Self::run) does, and calls `done` after each step of the
    /// trace. Use it to measure what a step takes and to compare that with a footprint's timeline.
    ///
    /// `done` is not called for steps before a read, which have already run, or for marks.
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

    /// Throws the recording away. Tensors that it took over from the program are freed. Nothing is
    /// computed.
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

/// The labelled parameter from which the fewest calls lead to a tensor.
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

/// Labels a tensor in the trace that this thread is recording on `B`. Does nothing outside a
/// recording.
pub fn label<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>, label: Label) {
    tensor.settle();
    session::with::<B, _>(|session| {
        let index = session.meet(tensor);
        session.label(index, label);
    });
}

/// The index of a tensor in the trace that this thread is recording on `B`. `None` outside a
/// recording.
pub fn index_in_trace<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>) -> Option<TensorIndex> {
    tensor.trace_index()
}

/// Adds a mark to the trace that this thread is recording on `B`: a [`Mark`] that memory models
/// know, or a text, which changes nothing. Does nothing outside a recording.
pub fn mark<B: Backend>(mark: impl Into<Mark>) {
    session::with::<B, _>(|session| session.mark(mark.into()));
}
