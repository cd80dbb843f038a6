//! The recording scope: what users of the decorator call.
//!
//! [`StepRecorder::record`] opens a session for the program, and [`Recording`] runs or discards
//! what was recorded. The options are in `recorder.rs`.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn_backend::{Backend, TensorData};
use burn_std::{DType, Shape};
use firebox_trace::{Bytes, Category, Label, Mark, Origin, Step, TensorIndex, Trace};

use crate::kind::Kind;
use crate::record::arrival::looking;
use crate::record::inputs::{Input, rows_of, values_of};
use crate::record::limits::Refused;
use crate::record::recorder::{AtMarks, RecordError, StepRecorder};
use crate::record::rehearsing::rehearsing_as_before;
use crate::record::session::{self, Session};
use crate::record::values::push;
use crate::tensor::{LazyTensor, Stage};
use crate::threads::deferred::bytes_to_make;
use crate::threads::progress;

impl StepRecorder {
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
        session::install(Box::new(Session::<B>::new(self)));
        let looks = self.looks;
        let program = || match looks {
            true => looking(|| progress::recording(program)),
            false => progress::recording(program),
        };
        let result = rehearsing_as_before(|| catch_unwind(AssertUnwindSafe(program)));
        let session = *session::take::<B>();
        // After a refused read the program computes with zeros. What it does then, even a panic,
        // means nothing.
        if let Some(refused) = session.limits.refused.clone() {
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

impl<B: Backend> Session<B> {
    /// The tensors that existed before the session and were met in it, in the order of their
    /// indices.
    pub(crate) fn inputs(&self) -> Vec<Input> {
        let existed = |(_, index): &(&u64, &TensorIndex)| {
            self.trace.tensor(**index).origin == Origin::Existing
        };
        let mut inputs: Vec<_> = self.met.iter().filter(existed).collect();
        inputs.sort_by_key(|(_, index)| **index);
        let input = |(id, index): (&u64, &TensorIndex)| {
            let (shape, dtype) = self.form(*index);
            Input { id: *id, tensor: *index, shape, dtype }
        };
        inputs.into_iter().map(input).collect()
    }

    /// The value of a tensor that nothing has used up: one that existed before the session, or host
    /// data that was kept.
    pub(crate) fn value_of(&self, tensor: TensorIndex) -> Option<TensorData> {
        if let Some(data) = self.described.uploads.as_ref().and_then(|uploads| uploads.get(&tensor))
        {
            return Some(data.clone());
        }
        values_of(self.values.get(tensor)?.clone())
    }

    /// The first rows of an input.
    pub(crate) fn rows_of_input(&self, input: &Input, rows: usize) -> Option<TensorData> {
        let index = self.met.get(&input.id)?;
        let value = self.values.get(*index)?;
        rows_of(value.clone(), rows.min(*input.shape.first()?))
    }
}

/// A recorded program and the result it promises. Dropping it discards it.
#[must_use = "a recording that is dropped never runs"]
pub struct Recording<B: Backend, T> {
    pub(crate) parts: Option<(T, Session<B>)>,
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

    /// The most bytes of tensors that are alive at once while the calls of loader threads are made
    /// that lead to tensors which the program has used or cloned, if the recording only
    /// [looks](StepRecorder::glance) at them. These tensors are included. A call's inputs count
    /// until its results are there, a view like any other tensor. What an operation takes while it
    /// runs does not count.
    pub fn bytes_to_make(&self) -> Bytes {
        let wanted = self.parts.as_ref().map(|(_, session)| &session.loading.wanted);
        wanted.map_or(Bytes::ZERO, |wanted| bytes_to_make(wanted))
    }

    /// The tensors made by the recording that somebody holds now, such as those of its result.
    pub fn held(&self) -> Vec<TensorIndex> {
        self.parts.as_ref().map(|(_, session)| session.survivors()).unwrap_or_default()
    }

    /// The values of the first `rows` rows of an input. `None` if there is no such input, or it has
    /// no rows.
    pub fn rows_of_input(&self, input: &Input, rows: usize) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.rows_of_input(input, rows))
    }

    /// The value of a tensor that existed before the recording, or was made from host data and
    /// [kept](StepRecorder::keep_uploads). `None` if the value is gone, for example because a read
    /// used it up.
    ///
    /// # Panics
    ///
    /// If the trace has no such tensor.
    pub fn value_of(&self, tensor: TensorIndex) -> Option<TensorData> {
        self.parts.as_ref().and_then(|(_, session)| session.value_of(tensor))
    }

    /// Lets these numbers take the place of what the recording would compute for a tensor. They are
    /// uploaded once the call that makes the tensor has run, into the memory of its result.
    ///
    /// False, and nothing changes, if no step of the recording makes the tensor, or reads have run
    /// a part of the recording, or the tensor has another shape, or is quantized.
    pub fn give(&mut self, tensor: TensorIndex, data: TensorData) -> bool {
        let Some((_, session)) = &mut self.parts else { return false };
        let info = session.trace.tensor(tensor);
        let Origin::Made(at) = info.origin else { return false };
        let is_dense = !matches!(info.dtype, DType::QFloat(_));
        if session.program.ran > 0 || !is_dense || data.shape != info.shape {
            return false;
        }
        let made = session.trace.steps[at.0 as usize].outputs();
        let Some(output) = made.iter().position(|made| *made == tensor) else { return false };
        let data = data.convert_dtype(info.dtype);
        session.program.given.entry(at).or_default().push((output, data));
        true
    }

    /// Runs the recording on `B` and returns the result with real tensors.
    ///
    /// # Panics
    ///
    /// If an operation panics on `B`. The tensors of the recording are lost; all others stay
    /// usable.
    pub fn run(mut self) -> T {
        let (result, mut session) =
            self.parts.take().expect("a recording has its parts until it ends");
        session.end(Stage::Failed);
        session.run();
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

/// The label of a tensor in the trace that this thread is recording on `B`, if it has one.
pub fn label_of<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>) -> Option<Label> {
    tensor.settle();
    session::with::<B, _>(|session| {
        let index = session.meet(tensor);
        session.trace.tensor(index).label.as_deref().cloned()
    })?
}

/// The index of a tensor in the trace that this thread is recording on `B`. `None` outside a
/// recording.
pub fn index_in_trace<B: Backend, K: Kind<B>>(tensor: &LazyTensor<B, K>) -> Option<TensorIndex> {
    tensor.trace_index()
}

/// Adds a mark to the trace that this thread is recording on `B`: a [`Mark`] that memory models
/// know, or a text, which changes nothing. Does nothing outside a recording.
pub fn mark<B: Backend>(mark: impl Into<Mark>) {
    let mark = mark.into();
    session::with::<B, _>(|session| {
        if let Some(AtMarks(pass)) = session.options.at_marks.clone() {
            let mark = mark.clone();
            session.push_effect(move |_| pass(&mark));
        }
        push(&mut session.trace.steps, Step::Mark(mark));
    });
}
