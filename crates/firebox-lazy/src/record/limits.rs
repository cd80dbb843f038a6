//! Limits of a recording: what its reads may run, and how much host memory it may take.

use std::sync::Arc;

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_ir::OperationIr;
use burn_std::{DType, Shape};
use firebox_trace::{Bytes, Description, OpIndex, Step, Trace};

use crate::kind::Kind;
use crate::record::recorder::RecordError;
use crate::record::rehearsing::read_is_refused;
use crate::record::session::{Limits, Session};
use crate::record::values::push;
use crate::tensor::LazyTensor;
use crate::threads::progress;

/// How many refused reads a program gets zeros for. The next one unwinds.
const PATIENCE: usize = 64;
/// The host memory of a recording is checked every so many operations.
const LOOK: usize = 1024;

/// The host memory of a recorded call until its recording has run. Heuristic.
///
/// Covers its place in the trace and in the program, the graph of automatic differentiation while
/// it is recorded, and its result while it runs. Measured on 64-bit Linux with the LSTMs of
/// `tests/memory`, rounded up.
pub const HOST_BYTES_PER_CALL: Bytes = Bytes::new(416);

/// The host memory of the descriptions of `trace`. Heuristic.
///
/// Counts them three times: for the trace, which shares them with the calls that the thread
/// remembers for the next step, and twice for those of earlier recordings of other sizes. Once was
/// too little for the LSTMs of `tests/memory`.
pub fn host_bytes_of_descriptions(trace: &Trace) -> Bytes {
    const REST: usize = 512;
    let operations = |description: &Arc<Description>| description.operations.len();
    let bytes = |count: usize| 3 * (count * size_of::<OperationIr>() + REST) as u64;
    Bytes::new(trace.descriptions.iter().map(operations).map(bytes).sum())
}

/// The host memory of `trace` while a program that never runs is recorded and its footprint is
/// computed. Heuristic.
///
/// Covers the entries of operations and tensors, lists that grow, and the descriptions. Measured on
/// 64-bit Linux with the LSTMs of `tests/memory`, rounded up.
pub fn host_bytes_of_rehearsal(trace: &Trace) -> Bytes {
    of_rehearsal(trace, trace.calls().count())
}

fn of_rehearsal(trace: &Trace, calls: usize) -> Bytes {
    const PER_CALL: u64 = 288;
    Bytes::new(PER_CALL * calls as u64) + host_bytes_of_descriptions(trace)
}

/// The panic payload that carries a refusal to
/// [`StepRecorder::record`](crate::StepRecorder::record).
pub(crate) struct Refused(pub(crate) RecordError);

impl Refused {
    /// Unwinds without calling the panic hook, because nothing is wrong with the program.
    fn unwind(error: RecordError) -> ! {
        std::panic::resume_unwind(Box::new(Self(error)))
    }
}

impl<B: Backend> Session<B> {
    /// Reads a tensor of the session by running what has been recorded so far. `None` if the read
    /// is refused.
    pub(crate) fn read<K: Kind<B>>(&mut self, tensor: LazyTensor<B, K>) -> Option<K::Primitive> {
        if self.limits.refused.is_some() {
            self.unwind_if_impatient();
            return None;
        }
        if self.options.zero_reads && self.limits.refusals < PATIENCE {
            self.limits.refusals += 1;
            read_is_refused();
            let used = self.take(tensor);
            push(&mut self.trace.steps, Step::Read(used));
            return None;
        }
        // Computing a footprint takes time during which the program is not standing still.
        let limit = self.options.read_limit.clone();
        let refused = limit.and_then(|limit| progress::running(|| limit.refuses(&self.trace)));
        if let Some((needed, budget)) = refused {
            self.refuse_read(needed, budget);
            return None;
        }
        progress::running(|| self.run());
        let used = self.take(tensor);
        self.trace.steps.push(Step::Read(used));
        self.program.ran = self.trace.steps.len();
        Some(K::restore(self.values.fetch(used)))
    }

    /// Refuses a read that would run more than is allowed.
    ///
    /// The program goes on with zeros, because it may hold a lock or be built to abort on a panic.
    /// Nothing it records will run, and it can [tell](crate::is_rehearsal).
    pub(crate) fn refuse_read(&mut self, needed: Bytes, budget: Bytes) {
        let at = OpIndex(self.trace.steps.len() as u32);
        self.limits.refused = Some(RecordError::ReadTooLarge { at, needed, budget });
        read_is_refused();
        self.unwind_if_impatient();
    }

    /// A program that reads zeros over and over may be waiting for another value and is unwound.
    fn unwind_if_impatient(&mut self) {
        self.limits.refusals += 1;
        if self.limits.refusals > PATIENCE {
            self.unwind_refused();
        }
    }

    /// Unwinds after a refused read.
    fn unwind_refused(&self) {
        if let Some(error) = &self.limits.refused {
            Refused::unwind(error.clone());
        }
    }

    /// Unwinds a program that asks for a number of elements that is unknown.
    pub(crate) fn refuse_positions(&mut self) {
        self.unwind_refused();
        self.refuse_read(Bytes::MAX, Bytes::ZERO);
        self.unwind_refused();
    }

    /// Unwinds if the recording takes more host memory than allowed. A recording whose existing
    /// tensors alone exceed the limit goes on, because it did not cause that.
    pub(crate) fn refuse_long_recording(&mut self) {
        self.limits.calls += 1;
        let Limits { calls, existing, .. } = self.limits;
        if let Some(budget) = self.options.host_limit
            && calls.is_multiple_of(LOOK)
        {
            let needed = existing + of_rehearsal(&self.trace, calls);
            if needed > budget && existing <= budget {
                Refused::unwind(RecordError::TooLong { calls, needed, budget });
            }
        }
    }
}

/// Stands in for the values of a tensor that must not be computed.
pub(crate) struct Zeros(Shape, DType);

impl Zeros {
    pub(crate) fn of(tensor: &impl TensorMetadata) -> Self {
        Self(tensor.shape(), tensor.dtype())
    }

    pub(crate) fn data(self) -> TensorData {
        let Self(shape, dtype) = self;
        let bytes = Bytes::of_elements(&shape, dtype);
        TensorData::from_bytes_vec(vec![0; bytes.get() as usize], shape, dtype)
    }
}
