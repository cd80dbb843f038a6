//! Joins the outputs of micro-batches into the output of their batch, for metrics. The strategy and
//! the rehearsal both use it, so that the plan counts the same outputs.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;

use firebox_trace::{Bytes, Mark, Step, Trace};

use crate::planner::overhead::{earlier_outputs, outputs_alive};
use crate::reduction::Reduction;

/// Joins the outputs of micro-batches into one. Each comes with its share in the batch's loss.
pub(crate) type Join<T> = Box<dyn Fn(Vec<(T, f64)>) -> T + Send + Sync>;

/// The functions that join outputs, by output type. Outputs of other types go to the metrics one by
/// one.
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

    /// The function that joins outputs of this type, if there is one.
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

/// Joins the outputs of a batch from those of its micro-batches and their weights. `None` if there
/// are none. A single output is returned unchanged.
pub(crate) fn joined<T>(
    join: &Join<T>,
    reduction: Reduction,
    mut parts: Vec<(T, f64)>,
) -> Option<T> {
    if parts.len() < 2 {
        return parts.pop().map(|(output, _)| output);
    }
    let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let share = |weight| match reduction {
        Reduction::Mean => weight / total,
        Reduction::Sum => 1.0,
    };
    Some(join(parts.into_iter().map(|(output, weight)| (output, share(weight))).collect()))
}

/// Adds to a rehearsal the memory of the outputs of `missing` micro-batches that it does not run:
/// once as parts, once joined.
pub(crate) fn add_outputs_of_others(trace: &mut Trace, missing: usize) {
    let is_end = |step: &Step| step.is_mark(&Mark::IterationEnd);
    let ends = trace.steps.iter().enumerate().filter(|(_, step)| is_end(step));
    let ends: Vec<usize> = ends.map(|(at, _)| at).collect();
    // The last iteration, or all of a validation.
    let begin = ends.len().checked_sub(2).map_or(0, |last| ends[last]);
    let marks = trace.steps.iter().enumerate().skip(begin);
    let marks = marks.filter(|(_, step)| step.is_mark(&Mark::MicroStep));
    let alive: Vec<Bytes> = marks.map(|(at, _)| outputs_alive(trace, at)).collect();
    let part = alive.windows(2).map(|two| two[1] - two[0]).max().unwrap_or_default();
    let others = earlier_outputs(part * missing as u64 * 2);
    trace.tensors.extend(others);
}
