//! Finds the steps of one recording in another, of other items, by what they work on: two backward
//! passes may run independent steps in another order.

use std::collections::{HashMap, HashSet, VecDeque};

use burn_std::Shape;
use firebox_trace::{Mark, Origin, Step, TensorIndex, Trace};

use crate::{CUT, Recording};

/// A recording whose batch was cut in its first steps. Tensors that were cut from an input stand
/// for the input.
pub(crate) struct Cut<'a> {
    pub(crate) trace: &'a Trace,
    /// The steps behind the cut.
    pub(crate) steps: &'a [Step],
    /// The position of the first of these.
    pub(crate) first: usize,
    /// What stands for a tensor.
    stands_for: HashMap<TensorIndex, TensorIndex>,
    shapes: HashMap<TensorIndex, Shape>,
}

impl<'a> Cut<'a> {
    /// # Errors
    ///
    /// If the batch was cut by something else than slices.
    pub(crate) fn of(recording: &Recording<'a>) -> Result<Self, String> {
        let trace = recording.trace;
        let is_cut = |step: &Step| step.is_mark(&Mark::from(CUT));
        let first = trace.steps.iter().position(is_cut).map_or(0, |at| at + 1);
        let (mut stands_for, mut shapes) = (HashMap::new(), HashMap::<_, Shape>::new());
        for step in &trace.steps[..first] {
            let Step::Call(call) = step else { continue };
            let (Some(input), [made]) = (call.inputs.first(), &call.outputs[..]) else {
                return Err(format!("the batch is cut by `{}`", call.name));
            };
            let shape = &trace.tensor(*made).shape;
            let is_slice = call.name.ends_with("_slice")
                && trace.tensor(input.tensor).origin == Origin::Existing
                && shapes.get(&input.tensor).is_none_or(|known| known == shape);
            if !is_slice {
                return Err(format!("the batch is cut by `{}`", call.name));
            }
            stands_for.insert(*made, input.tensor);
            shapes.insert(input.tensor, shape.clone());
        }
        let cut = Self { trace, steps: &trace.steps[first..], first, stands_for, shapes };
        let mut used = cut.steps.iter().flat_map(inputs);
        match used.any(|tensor| cut.shapes.contains_key(&tensor)) {
            true => Err("a tensor of the batch is used in part and whole".to_owned()),
            false => Ok(cut),
        }
    }

    pub(crate) fn of_which(&self, tensor: TensorIndex) -> TensorIndex {
        self.stands_for.get(&tensor).copied().unwrap_or(tensor)
    }

    pub(crate) fn shape(&self, tensor: TensorIndex) -> &Shape {
        let tensor = self.of_which(tensor);
        self.shapes.get(&tensor).unwrap_or(&self.trace.tensor(tensor).shape)
    }
}

fn inputs(step: &Step) -> impl Iterator<Item = TensorIndex> {
    step.inputs().iter().map(|input| input.tensor)
}

/// Whether a step computes.
pub(crate) fn computes(step: &Step) -> bool {
    matches!(step, Step::Call(_) | Step::Upload { .. } | Step::Read(_))
}

/// The counterpart of a step.
pub(crate) enum Found<'a> {
    Step(&'a Step),
    /// The sum over a dimension of one, which autodiff leaves out: of this shape.
    Itself(Shape),
    /// Part of a sum of several that is added up in another order: of this shape.
    Partial(Shape),
}

/// A sum of three or more tensors, in one of its orders.
struct Sum {
    made: TensorIndex,
    /// The sums of some of them on the way.
    within: Vec<TensorIndex>,
}

pub(crate) const ADD: &str = "float_add";
const SUM: &str = "float_sum_dim";

/// The sums of three or more, by what they add up.
fn sums(of: &Cut<'_>) -> HashMap<Vec<TensorIndex>, Sum> {
    let mut uses = HashMap::<TensorIndex, usize>::new();
    for tensor in of.steps.iter().flat_map(inputs) {
        *uses.entry(of.of_which(tensor)).or_default() += 1;
    }
    let mut parts = HashMap::<TensorIndex, (Vec<TensorIndex>, Vec<TensorIndex>)>::new();
    let mut sums = HashMap::new();
    for step in of.steps.iter().filter(|step| step.name() == ADD) {
        let (mut added, mut within) = (Vec::new(), Vec::new());
        for input in inputs(step).map(|tensor| of.of_which(tensor)) {
            match parts.get(&input).filter(|_| uses[&input] == 1) {
                Some((of, inner)) => {
                    added.extend(of);
                    within.extend(inner.iter().chain([&input]));
                }
                None => added.push(input),
            }
        }
        added.sort_unstable();
        let made = step.outputs()[0];
        if added.len() > 2 {
            sums.insert(added.clone(), Sum { made, within: within.clone() });
        }
        parts.insert(made, (added, within));
    }
    sums
}

/// The steps of the other recording that have no counterpart yet.
pub(crate) struct Others<'a> {
    of: &'a Cut<'a>,
    steps: HashMap<(&'a str, Vec<TensorIndex>), VecDeque<&'a Step>>,
    /// The tensors of the other recording.
    pub(crate) to_other: HashMap<TensorIndex, TensorIndex>,
    sums: HashMap<Vec<TensorIndex>, Sum>,
    /// What sums without a counterpart add up, in tensors of the other.
    partial: HashMap<TensorIndex, Vec<TensorIndex>>,
    /// Sums of the other recording that are found with what they are part of.
    found: HashSet<TensorIndex>,
}

impl<'a> Others<'a> {
    /// `inputs`: the tensors of the other recording that existed before.
    pub(crate) fn new(of: &'a Cut<'a>, inputs: HashMap<TensorIndex, TensorIndex>) -> Self {
        let mut steps = HashMap::<_, VecDeque<_>>::new();
        for step in of.steps.iter().filter(|step| computes(step)) {
            let works_on = self::inputs(step).map(|tensor| of.of_which(tensor));
            steps.entry((step.name(), works_on.collect())).or_default().push_back(step);
        }
        let (sums, partial, found) = (sums(of), HashMap::new(), HashSet::new());
        Self { of, steps, to_other: inputs, sums, partial, found }
    }

    /// The counterpart of `step`, which works on `n[0]` items where the other has `n[1]`.
    pub(crate) fn take(&mut self, own: &Trace, step: &'a Step, n: [usize; 2]) -> Option<Found<'a>> {
        let works_on: Option<Vec<TensorIndex>> =
            inputs(step).map(|tensor| self.to_other.get(&tensor).copied()).collect();
        let made = step.outputs();
        let Some(works_on) = works_on else { return self.sum(step) };
        let commutes = matches!(step.name(), "float_add" | "float_mul" | "int_add" | "int_mul");
        let mut orders = vec![works_on.clone()];
        if let ([one, other], true) = (&works_on[..], commutes) {
            orders.push(vec![*other, *one]);
        }
        for order in orders {
            let Some(found) = self.steps.get_mut(&(step.name(), order)) else { continue };
            // Autodiff leaves out sums, but no other step.
            let can_be_missing = step.name() == SUM;
            let is_only = found.len() == 1 && !works_on.is_empty() && !can_be_missing;
            let fits = |other: &&Step| {
                made.iter().zip(other.outputs()).all(|(a, b)| {
                    let (a, b) = (&own.tensor(*a).shape, &self.of.trace.tensor(*b).shape);
                    let same = |(a, b): (&usize, &usize)| a == b || a * n[1] == b * n[0];
                    a.num_dims() == b.num_dims() && (is_only || a.iter().zip(b.iter()).all(same))
                })
            };
            // Of several whose sizes do not say, the first.
            let at = found.iter().position(fits).or((!can_be_missing).then_some(0));
            let Some(other) = at.and_then(|at| found.remove(at)) else { continue };
            self.to_other.extend(made.iter().copied().zip(other.outputs().iter().copied()));
            return Some(Found::Step(other));
        }
        let (SUM, [input], [made]) = (step.name(), &works_on[..], made) else {
            return self.sum(step);
        };
        // Of the own shape, with ones where the other has ones.
        let (shape, own) = (self.of.shape(*input), &own.tensor(*made).shape);
        let summed = own.iter().zip(shape.iter()).all(|(own, other)| *own != 1 || *other == 1);
        if !summed {
            return None;
        }
        self.to_other.insert(*made, *input);
        Some(Found::Itself(shape.clone()))
    }

    /// The counterpart of a sum in another order.
    fn sum(&mut self, step: &Step) -> Option<Found<'a>> {
        if step.name() != ADD {
            return None;
        }
        let added = inputs(step).map(|tensor| match self.partial.get(&tensor) {
            Some(partial) => Some(partial.clone()),
            None => Some(vec![*self.to_other.get(&tensor)?]),
        });
        let mut added = added.collect::<Option<Vec<_>>>()?.concat();
        added.sort_unstable();
        let made = step.outputs()[0];
        let shape = self.of.shape(added[0]).clone();
        match self.sums.get(&added) {
            Some(sum) => {
                self.to_other.insert(made, sum.made);
                self.found.extend(sum.within.iter().chain([&sum.made]));
            }
            None => {
                self.partial.insert(made, added);
            }
        }
        Some(Found::Partial(shape))
    }

    /// What only the other recording has.
    pub(crate) fn rest(&self) -> Option<&'a str> {
        let is_found = |step: &&&Step| step.outputs().iter().any(|made| self.found.contains(made));
        let mut rest = self.steps.values().flatten().filter(|step| !is_found(step));
        rest.next().map(|step| step.name())
    }
}
