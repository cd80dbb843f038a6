//! The options of a recording, and why there is none.

use std::fmt;
use std::sync::Arc;

use firebox_trace::{Bytes, Mark, OpIndex, Trace};

use crate::record::draws::Draws;
use crate::record::inputs::Rows;

/// Records operations of [`Lazy<B>`](crate::Lazy) on the calling thread.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Lazy, StepRecorder};
///
/// let device = Default::default();
/// let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &device);
/// let recording = StepRecorder::new().record::<Flex, _>(|| x.clone().exp().sum())?;
/// assert_eq!(recording.trace().calls().count(), 2);
/// let sum = recording.run();
/// assert_eq!(sum.into_scalar(), 1f32.exp() + 2f32.exp());
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StepRecorder {
    pub(crate) read_limit: Option<ReadLimit>,
    /// What to do where the program passes a mark while it runs.
    pub(crate) at_marks: Option<AtMarks>,
    /// The limit on the host memory of the recording itself.
    pub(crate) host_limit: Option<Bytes>,
    pub(crate) draws: Draws,
    /// The rows that stand in for those of tensors that existed before, by [`Input::id`].
    pub(crate) rows: Option<Arc<Rows>>,
    /// Whether to keep host data that becomes tensors.
    pub(crate) keeps_uploads: bool,
    /// Whether to refuse every read.
    pub(crate) refuse_reads: bool,
    /// Whether reads give zeros and nothing runs.
    pub(crate) zero_reads: bool,
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
#[non_exhaustive]
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
    /// The recording takes more host memory than allowed. See [`StepRecorder::limit_host`].
    #[error(
        "writing down the first {calls} operations of the step, with the tensors that they begin with, takes {needed} of the \
         host's memory, more than the {budget} that may be used for it: take a larger budget, or a shorter step, such as one of shorter sequences"
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

impl StepRecorder {
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

    /// Calls `pass` at each mark that the program passes while it runs, in order with its
    /// operations. Default: marks are only written down.
    ///
    /// A read inside a recording runs the program up to it, marks included.
    pub fn at_marks(mut self, pass: impl Fn(&Mark) + Send + Sync + 'static) -> Self {
        self.at_marks = Some(AtMarks(Arc::new(pass)));
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

    /// Computes what loader threads asked for after all, so that
    /// [`Recording::value_of`](crate::Recording::value_of) has it.
    pub fn with_values(mut self) -> Self {
        self.looks = false;
        self
    }

    /// Gives zeros for every read, and goes on: to look at what a program does apart from what it
    /// makes of values. A program that reads many times is refused, because it may be waiting for
    /// another value.
    ///
    /// The recording must not be run.
    pub fn zero_reads(mut self) -> Self {
        (self.zero_reads, self.never_runs) = (true, true);
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

    /// Records every random number as one fixed number of its distribution: the probability for
    /// Bernoulli, the middle for uniform, one deviation above the mean for normal.
    ///
    /// Recordings of parts of a batch then use what the recording of the whole batch uses. The
    /// backend's generator is left alone.
    pub fn fixed_draws(mut self) -> Self {
        self.draws = Draws::Fixed;
        self
    }

    /// Makes some rows of existing tensors stand in for all of them: by
    /// [`Input::id`](crate::Input::id), along the first dimension, in the order given.
    ///
    /// The recording still sees the original shapes. Rows beyond those given do not exist.
    pub fn with_rows(mut self, rows: impl IntoIterator<Item = (u64, Vec<usize>)>) -> Self {
        self.rows = Some(Arc::new(rows.into_iter().collect()));
        self
    }

    /// Keeps host data that becomes tensors, for
    /// [`Recording::value_of`](crate::Recording::value_of). Default: the data is gone once it is
    /// uploaded.
    pub fn keep_uploads(mut self) -> Self {
        self.keeps_uploads = true;
        self
    }
}

/// What to do at the marks of a program that runs. See
/// [`StepRecorder::at_marks`](crate::StepRecorder::at_marks).
#[derive(Clone)]
pub(crate) struct AtMarks(pub(crate) Arc<dyn Fn(&Mark) + Send + Sync>);

impl fmt::Debug for AtMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AtMarks").finish_non_exhaustive()
    }
}

/// Empties the queue of a backend that fuses operations.
pub(crate) type Drain = Arc<dyn Fn() + Send + Sync>;

/// What a read inside a recording may run. See
/// [`StepRecorder::limit_reads`](crate::StepRecorder::limit_reads).
#[derive(Clone)]
pub(crate) struct ReadLimit {
    pub(crate) budget: Bytes,
    pub(crate) footprint: Arc<dyn Fn(&Trace) -> Bytes + Send + Sync>,
}

impl ReadLimit {
    /// What running `trace` needs and the limit, if that is too little.
    pub(crate) fn refuses(&self, trace: &Trace) -> Option<(Bytes, Bytes)> {
        let needed = (self.footprint)(trace);
        (needed > self.budget).then_some((needed, self.budget))
    }
}

impl fmt::Debug for ReadLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadLimit").field("budget", &self.budget).finish_non_exhaustive()
    }
}
