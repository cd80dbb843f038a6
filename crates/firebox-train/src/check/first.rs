//! Finds where the items of a batch first depend on each other: the first operation that gives some
//! items other values when they are together with others. The error about a coupled batch names it.
//!
//! A step on some items and a step on more items are computed on the host and compared call by
//! call. Tensors with a row for each item are compared by rows. The rows may differ by the share of
//! the weight, like losses of items that are divided by their number.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::TensorData;
use firebox_trace::{Call, Category, TensorIndex, Trace};

use super::choice::Choice;
use super::host::{Host, Observe};
use super::verdict::Weighed;
use super::{Check, Failure, Rows};
use crate::components::{LazyComponents, TrainBatch};
use crate::splitter::Splitter;

/// The difference that counts as rounding, relative to the largest number of a tensor.
const TOLERANCE: f32 = 1e-3;

/// The result of a call in the smaller step.
struct Seen {
    name: Cow<'static, str>,
    made: Option<Made>,
}

struct Made {
    shape: Vec<usize>,
    numbers: Vec<f32>,
}

impl Made {
    /// The result of a call, if it is a single tensor of floats.
    fn of(trace: &Trace, call: &Call, read: &dyn Fn(TensorIndex) -> TensorData) -> Option<Self> {
        let [tensor] = call.outputs[..] else { return None };
        trace.tensor(tensor).dtype.is_float().then(|| {
            let data = read(tensor);
            Self { shape: data.shape.to_vec(), numbers: data.iter::<f32>().collect() }
        })
    }

    /// Whether the first rows of `whole`, which has `groups` times as many items, equal these rows
    /// or these rows times `share`. A tensor without a row for each item says nothing. A tensor
    /// that also has a column for each item compares items with each other.
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

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// The first operation that gives the first of `groups` groups of `size` items other values
    /// than the group has alone. The first group weighs `share` of all. `None` if there is no such
    /// operation before the loss, or if the host cannot compute the step.
    pub(super) fn first_difference(
        &self,
        (groups, size): (usize, usize),
        choice: &Choice,
        share: f64,
    ) -> Option<String> {
        let host = Host::new(false);
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
        // Keeps the results of the smaller step for comparison, in at most a quarter of the budget.
        let most = self.means.budget.scale(0.25).get() as usize / size_of::<f32>();
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
            // The backward pass begins here, with the gradient of the loss.
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
