//! Joins the outputs of micro-batches into the output of their batch, for metrics. The strategy and
//! the rehearsal both use it, so that the plan counts the same outputs.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use firebox_trace::{Bytes, Mark, Step, Trace};

use crate::planner::overhead::{other_outputs, outputs_alive};
use crate::reduction::LossReduction;

/// Joins the outputs of micro-batches into one. Each comes with its share in the batch's loss.
/// Gives them back if they do not go together.
pub(crate) type Join<T> = Box<dyn Fn(Vec<(T, f64)>) -> Result<T, Vec<(T, f64)>> + Send + Sync>;

/// Which outputs are joined where a batch is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joining {
    /// Those of the types that the user has given functions for.
    Asked,
    /// Those of burn's types, too.
    OfBurn,
    /// As [`Asked`](Self::Asked), because a batch's output of burn's types does not fit, or is of
    /// too many micro-batches.
    NoRoom,
}

/// The functions that join outputs, by output type. Outputs of other types go to the metrics one by
/// one.
#[derive(Clone, Default)]
pub(crate) struct Joins(Vec<Known>);

#[derive(Clone)]
struct Known {
    of: TypeId,
    /// Whether the user has asked for it.
    is_asked: bool,
    join: Arc<dyn Any + Send + Sync>,
}

impl Joins {
    /// Adds a function of the user's.
    pub(crate) fn with<T: 'static>(
        mut self,
        join: impl Fn(Vec<(T, f64)>) -> T + Send + Sync + 'static,
    ) -> Self {
        self.0.retain(|known| known.of != TypeId::of::<T>());
        self.add::<T>(true, Box::new(move |parts| Ok(join(parts))));
        self
    }

    /// Adds a function for an output of burn's, unless the user has one. Outputs whose `sizes`
    /// differ are not joined.
    pub(crate) fn of_burn<T: 'static>(
        mut self,
        join: fn(Vec<(T, f64)>) -> T,
        sizes: fn(&T) -> Vec<usize>,
    ) -> Self {
        if self.0.iter().any(|known| known.of == TypeId::of::<T>()) {
            return self;
        }
        let is_told = AtomicBool::new(false);
        let join = move |parts: Vec<(T, f64)>| {
            if parts.windows(2).all(|two| sizes(&two[0].0) == sizes(&two[1].0)) {
                return Ok(join(parts));
            }
            if !is_told.swap(true, Relaxed) {
                log::warn!("metrics see micro-batches: their outputs are not equally wide or long");
            }
            Err(parts)
        };
        self.add::<T>(false, Box::new(join));
        self
    }

    fn add<T: 'static>(&mut self, is_asked: bool, join: Join<T>) {
        self.0.push(Known { of: TypeId::of::<T>(), is_asked, join: Arc::new(join) });
    }

    fn known<T: 'static>(&self) -> Option<&Known> {
        self.0.iter().find(|known| known.of == TypeId::of::<T>())
    }

    /// Which outputs are to be joined, if that fits, where a step has outputs of this type.
    pub(crate) fn wanted<T: 'static>(&self) -> Joining {
        match self.known::<T>() {
            Some(Known { is_asked: false, .. }) => Joining::OfBurn,
            _ => Joining::Asked,
        }
    }

    /// The function that joins outputs of this type, if they are joined.
    pub(crate) fn of<T: 'static>(&self, joining: Joining) -> Option<&Join<T>> {
        let known = self.known::<T>()?;
        match known.is_asked || joining == Joining::OfBurn {
            true => known.join.downcast_ref(),
            false => None,
        }
    }
}

impl fmt::Debug for Joins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Joins({})", self.0.len())
    }
}

/// Joins the outputs of a batch from those of its micro-batches and their weights. Returns them
/// unchanged if there is only one, or if they do not go together.
pub(crate) fn joined<T>(join: &Join<T>, reduction: LossReduction, parts: Vec<(T, f64)>) -> Vec<T> {
    let unchanged = |parts: Vec<(T, f64)>| parts.into_iter().map(|(output, _)| output).collect();
    if parts.len() < 2 {
        return unchanged(parts);
    }
    let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let share = |weight| match reduction {
        LossReduction::Mean => weight / total,
        LossReduction::Sum => 1.0,
    };
    let shares = parts.into_iter().map(|(output, weight)| (output, share(weight)));
    join(shares.collect()).map_or_else(unchanged, |output| vec![output])
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
    trace.tensors.extend(other_outputs(part * missing as u64 * 2));
}
