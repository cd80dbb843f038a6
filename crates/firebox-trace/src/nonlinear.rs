//! Finds gradients that a step has changed after its backward pass in a way that is not linear,
//! such as by clipping. The gradients of micro-batches then do not add up to that of the batch.
//!
//! Everything in a backward pass is linear in the one that it begins with. So each tensor behind it
//! does not depend on it, is linear in it, or neither. A returned gradient must be linear.

use burn_std::DType;

use crate::{Call, Category, Mark, OpIndex, Step, TensorIndex, Trace};

/// A gradient that is not linear in the loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nonlinear {
    /// The operation that makes a number of gradients, or `read`.
    pub operation: String,
    /// The path of the parameter whose gradient depends on that number. `None` if it was read, so
    /// that every gradient may.
    pub parameter: Option<String>,
}

/// How a tensor depends on the one that a backward pass begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depends {
    Not,
    Linearly,
    /// In another way, since this operation.
    Otherwise(OpIndex),
}

/// Operations that are linear in no input. Comparisons and roundings are among them; what has other
/// values than floats is never linear.
const NEVER: [&str; 58] = [
    "abs",
    "acos",
    "acosh",
    "argmax",
    "argmin",
    "argsort",
    "argtopk",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "cosh",
    "cummax",
    "cummin",
    "cumprod",
    "erf",
    "exp",
    "floor",
    "log",
    "log1p",
    "max",
    "max_abs",
    "max_abs_dim",
    "max_dim",
    "max_dim_with_indices",
    "min",
    "min_dim",
    "min_dim_with_indices",
    "powf",
    "powf_scalar",
    "powf_scalar_impl",
    "powi",
    "powi_scalar",
    "powi_scalar_impl",
    "prod",
    "prod_dim",
    "recip",
    "remainder",
    "remainder_scalar",
    "round",
    "sign",
    "sin",
    "sinh",
    "sort",
    "sort_with_indices",
    "sqrt",
    "tan",
    "tanh",
    "topk",
    "trunc",
    "relu",
    "sigmoid",
];

/// Operations that multiply their inputs: linear in one, if the others do not depend.
const PRODUCTS: [&str; 4] = ["mul", "matmul", "cross", "div"];

impl Trace {
    /// The first gradient of a micro-step that is not linear in its loss. Gradients are those with
    /// such a label: one that an optimizer takes over as its first state has none. `None` also if
    /// no step has a backward pass.
    ///
    /// An operation that is not known counts as linear.
    pub fn nonlinear_gradient(&self) -> Option<Nonlinear> {
        let is_end = |step: &Step| matches!(step, Step::Mark(Mark::MicroStepEnd(_)));
        let is_begin = |at: &usize| self.steps[*at].is_mark(&Mark::MicroStep);
        let mut begins = (0..self.steps.len()).filter(is_begin);
        begins.find_map(|begin| {
            let end = begin + self.steps[begin..].iter().position(is_end)?;
            self.nonlinear_between(begin, end)
        })
    }

    fn nonlinear_between(&self, begin: usize, end: usize) -> Option<Nonlinear> {
        let seed = self.seed_of_backward(begin, end)?;
        let mut depends = vec![Depends::Not; self.tensors.len()];
        for (at, step) in self.iter().take(end).skip(seed) {
            match step {
                Step::Call(call) => {
                    let found = match at.0 as usize == seed {
                        true => Depends::Linearly,
                        false => self.dependence(at, call, &depends),
                    };
                    for output in &call.outputs {
                        depends[output.0 as usize] = found;
                        if let (Depends::Otherwise(cause), Some(parameter)) =
                            (found, self.gradient_of(*output))
                        {
                            let operation = self.steps[cause.0 as usize].name().to_owned();
                            let parameter = Some(parameter.to_owned());
                            return Some(Nonlinear { operation, parameter });
                        }
                    }
                }
                Step::Read(read) if depends[read.tensor.0 as usize] != Depends::Not => {
                    return Some(Nonlinear { operation: "read".to_owned(), parameter: None });
                }
                _ => {}
            }
        }
        None
    }

    /// The step at which the backward pass begins: the last one that makes ones on which a gradient
    /// depends. They have the shape of the loss.
    pub(crate) fn seed_of_backward(&self, begin: usize, end: usize) -> Option<usize> {
        let mut leads = vec![false; self.tensors.len()];
        for (at, step) in self.steps[begin..end].iter().enumerate().rev() {
            let Step::Call(call) = step else { continue };
            let is_used = |output: &TensorIndex| {
                leads[output.0 as usize] || self.gradient_of(*output).is_some()
            };
            if !call.outputs.iter().any(is_used) {
                continue;
            }
            if call.name == "float_ones" {
                return Some(begin + at);
            }
            call.inputs.iter().for_each(|input| leads[input.tensor.0 as usize] = true);
        }
        None
    }

    /// The path of the parameter whose gradient a tensor is.
    fn gradient_of(&self, tensor: TensorIndex) -> Option<&str> {
        let label = self.tensor(tensor).label.as_deref()?;
        (label.category == Category::Gradient).then_some(&label.name)
    }

    fn dependence(&self, at: OpIndex, call: &Call, depends: &[Depends]) -> Depends {
        let of = |place: usize| depends[call.inputs[place].tensor.0 as usize];
        let inputs = (0..call.inputs.len()).map(of);
        if let Some(otherwise) = inputs.clone().find(|of| matches!(of, Depends::Otherwise(_))) {
            return otherwise;
        }
        let linear = inputs.filter(|of| *of == Depends::Linearly).count();
        if linear == 0 {
            return Depends::Not;
        }
        let method = call.name.split_once('_').map_or(&*call.name, |(_, method)| method);
        let is_float = |output: &TensorIndex| {
            let dtype = self.tensor(*output).dtype;
            dtype.is_float() && !matches!(dtype, DType::QFloat(_))
        };
        let is_product = PRODUCTS.contains(&method);
        let divides = method == "div" && of(call.inputs.len() - 1) == Depends::Linearly;
        let multiplies = is_product && linear > 1;
        let is_other = NEVER.contains(&method) || multiplies || divides;
        match call.outputs.iter().all(is_float) && !is_other {
            true => Depends::Linearly,
            false => Depends::Otherwise(at),
        }
    }
}
