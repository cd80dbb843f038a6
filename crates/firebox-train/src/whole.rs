//! Outputs of a whole batch for metrics, joined from those of its micro-batches.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;

use firebox_trace::{Bytes, OpIndex, Step, TensorInfo, Trace};

use crate::beside::{earlier_outputs, is_output};
use crate::labels::{ITERATION_END, MICRO_STEP};

/// Makes one output of those of the micro-batches, each with what its micro-batch weighs.
pub(crate) type Join<T> = Box<dyn Fn(Vec<(T, f64)>) -> T + Send + Sync>;

/// How outputs are joined, by their type; those of other types go to the metrics one by one.
#[derive(Clone, Default)]
pub(crate) struct Joins(Vec<(TypeId, Arc<dyn Any + Send + Sync>)>);

impl Joins {
    pub(crate) fn with<T: 'static>(
        mut self,
        join: impl Fn(Vec<(T, f64)>) -> T + Send + Sync + 'static,
    ) -> Self {
        self.0.retain(|(of, _)| *of != TypeId::of::<T>());
        let join: Join<T> = Box::new(join);
        self.0.push((TypeId::of::<T>(), Arc::new(join)));
        self
    }

    /// How outputs of this type are joined, if they are.
    pub(crate) fn of<T: 'static>(&self) -> Option<&Join<T>> {
        let (_, join) = self.0.iter().find(|(of, _)| *of == TypeId::of::<T>())?;
        join.downcast_ref()
    }
}

impl fmt::Debug for Joins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Joins({})", self.0.len())
    }
}

/// The output of a batch, of those of its micro-batches; none if it has none. A single one stays as it is.
pub(crate) fn joined<T>(join: &Join<T>, mut parts: Vec<(T, f64)>) -> Option<T> {
    match parts.len() {
        0 | 1 => parts.pop().map(|(output, _)| output),
        _ => Some(join(parts)),
    }
}

/// Adds to a rehearsal, which runs few of the `micro_batches` of a batch, what the outputs of the others take: as parts and joined.
pub(crate) fn add_outputs_of_others(trace: &mut Trace, micro_batches: usize) {
    let is_end = |step: &Step| step.is_mark(ITERATION_END);
    let iterations: Vec<&[Step]> = trace.steps.split(is_end).collect();
    let mut begin = 0;
    let mut marks: Vec<usize> = Vec::new();
    for steps in iterations {
        let of = steps.iter().enumerate().filter(|(_, step)| step.is_mark(MICRO_STEP));
        let of: Vec<usize> = of.map(|(at, _)| begin + at).collect();
        begin += steps.len() + 1;
        // What comes behind the last iteration has none.
        if !of.is_empty() {
            marks = of;
        }
    }
    let missing = micro_batches.saturating_sub(marks.len()) as u64;
    let alive = |mark: &usize| -> Bytes {
        let alive = trace.alive_before(OpIndex(*mark as u32)).into_iter();
        let outputs = alive.map(|tensor| trace.tensor(tensor)).filter(|tensor| is_output(tensor));
        outputs.map(TensorInfo::bytes).sum()
    };
    let alive: Vec<Bytes> = marks.iter().map(alive).collect();
    let part = alive.windows(2).map(|two| two[1] - two[0]).max().unwrap_or_default();
    let others = earlier_outputs(part * missing * 2);
    trace.tensors.extend(others);
}
