//! Where the items of a batch first depend on each other: the first operation that gives some items other values together with others.
//!
//! A step on some items and one on more of them are computed on the host, and compared call by call. What has a row for each item
//! is compared by its rows, which may differ by the share of the weight, as losses of items do that are divided by their number.

use std::borrow::Cow;
use std::ops::Range;

use burn::module::AutodiffModule;
use burn::tensor::TensorData;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{LearningComponentsTypes, TrainStep};
use firebox_lazy::LazyBackend;
use firebox_trace::{Call, Category, TensorIndex, Trace};

use super::choice::Choice;
use super::host::{Host, Observe};
use super::verdict::Weighed;
use super::{Check, Failure, Rows};
use crate::splitter::Splitter;

/// What is told from rounding, relative to the largest number of a tensor.
const TOLERANCE: f32 = 1e-3;

/// What a call of the smaller step made.
struct Seen {
    name: Cow<'static, str>,
    made: Option<Made>,
}

struct Made {
    shape: Vec<usize>,
    numbers: Vec<f32>,
}

impl Made {
    /// What a call made, if it made one tensor of floats.
    fn of(trace: &Trace, call: &Call, read: &dyn Fn(TensorIndex) -> TensorData) -> Option<Self> {
        let [tensor] = call.outputs[..] else { return None };
        trace.tensor(tensor).dtype.is_float().then(|| {
            let data = read(tensor);
            Self { shape: data.shape.to_vec(), numbers: data.iter::<f32>().collect() }
        })
    }

    /// Whether the first rows of `whole`, of `groups` times as many items, are these, or these times `share`. What has no row for each
    /// item says nothing; what has a column for each as well compares items with each other.
    fn is_in(&self, whole: &Self, groups: usize, share: f32) -> bool {
        let more = |dim: usize| whole.shape[dim] == groups * self.shape[dim];
        let has_rows = self.shape.len() == whole.shape.len() && !self.shape.is_empty() && more(0);
        if !has_rows || self.numbers.is_empty() {
            return true;
        }
        if self.shape[1..] != whole.shape[1..] {
            return !(1..self.shape.len()).any(more);
        }
        let is_all = |factor: f32| {
            let largest = self.numbers.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let tolerance = TOLERANCE * largest * factor + f32::EPSILON;
            let rows = self.numbers.iter().zip(&whole.numbers);
            rows.into_iter().all(|(own, other)| (own * factor - other).abs() <= tolerance)
        };
        is_all(1.0) || is_all(share)
    }
}

impl<LC, S, M, I> Check<'_, LC, S, I>
where
    LC: LearningComponentsTypes<TrainingModel = M>,
    LC::Backend: LazyBackend,
    <LC::Backend as AutodiffBackend>::InnerBackend:
        LazyBackend<Base = <LC::Backend as LazyBackend>::Base>,
    M: TrainStep<Input = I> + AutodiffModule<LC::Backend> + core::fmt::Display + 'static,
    S: Splitter<I>,
{
    /// The first operation that gives the first of `groups` groups of `size` items other values than by themselves, where the first
    /// weighs `share` of them. None if there is none before the loss, or the host cannot compute the step.
    pub(super) fn first_difference(
        &self,
        (groups, size): (usize, usize),
        choice: &Choice,
        share: f64,
    ) -> Option<String> {
        let host = Host::new();
        let (tensors, _) = self.look(groups * size, true);
        let rows = Rows {
            tensors: &tensors,
            chosen: &choice.rows,
            in_a_row: choice.in_a_row,
            same: choice.rows.first().copied().unwrap_or(0),
        };
        let run = |range: Range<usize>, observe: &mut Observe<'_>| -> Result<Weighed, Failure> {
            self.gradient_by(range, &rows, |range| self.run_on_host(&host, range, &rows, observe))
        };
        // What the smaller step made is kept to compare with, in a quarter of what may be used.
        let most = self.budget.scale(0.25).get() as usize / size_of::<f32>();
        let (mut seen, mut kept) = (Vec::new(), 0);
        run(0..size, &mut |trace, call, read| {
            let made = if kept < most { Made::of(trace, call, read) } else { None };
            kept += made.as_ref().map_or(0, |made| made.numbers.len());
            seen.push(Seen { name: call.name.clone(), made });
        })
        .ok()?;
        let mut seen = seen.into_iter();
        let (mut first, mut module, mut is_backward) = (None, None, false);
        run(0..groups * size, &mut |trace, call, read| {
            let Some(Seen { name, made }) = seen.next() else { return };
            if first.is_some() || is_backward {
                return;
            }
            for input in &call.inputs {
                let label = trace.tensor(input.tensor).label.as_ref();
                let of = label.filter(|label| label.category == Category::Parameter);
                let path = of.and_then(|label| label.name.rsplit_once('.'));
                module = path.map(|(module, _)| module.to_owned()).or(module.take());
            }
            let differs = name != call.name
                || made.is_some_and(|made| {
                    let whole = Made::of(trace, call, read);
                    whole.is_some_and(|whole| !made.is_in(&whole, groups, share as f32))
                });
            if differs {
                let behind = module.as_ref().map(|module| format!(" behind `{module}`"));
                first = Some(format!("`{}`{}", call.name, behind.unwrap_or_default()));
            }
            // Where the backward pass begins, with the gradient of the loss.
            is_backward = call.name == "float_ones"
                && call.outputs.iter().all(|made| is_number(trace, *made));
        })
        .ok()?;
        first
    }
}

fn is_number(trace: &Trace, tensor: TensorIndex) -> bool {
    trace.tensor(tensor).shape.num_elements() == 1
}
