//! A call as the rules see it, and the parameters that they read from its intermediate
//! representation.
//!
//! `run.rs` makes an [`Invocation`] for each call and passes it to a rule.

use std::fmt::{self, Write};

use burn_ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
};
use burn_std::DType;

use crate::arena::{Arena, View};

/// The shape and the element type of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Form {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
}

/// One call as a rule sees it.
pub(super) struct Invocation<'a> {
    /// The backend method.
    pub(super) method: &'a str,
    /// The arguments, in the order of the method's parameters. Whoever takes one owns it.
    pub(super) inputs: Vec<View>,
    /// The outputs to make.
    pub(super) outputs: Vec<Form>,
    /// The call in burn's intermediate representation, for its parameters.
    pub(super) ir: &'a [OperationIr],
}

/// A call for which there is no rule.
#[derive(Debug)]
pub(super) struct NoRule;

/// The outputs that a rule makes.
pub(super) type Made = Result<Vec<View>, NoRule>;

/// Makes the outputs of a call from its inputs.
pub(super) type Rule = fn(&Arena, Invocation<'_>) -> Made;

impl Invocation<'_> {
    /// The arguments of a method that takes `N` tensors.
    pub(super) fn take<const N: usize>(self) -> Result<[View; N], NoRule> {
        self.inputs.try_into().map_err(|_| NoRule)
    }

    /// The first output.
    pub(super) fn output(&self) -> Result<Form, NoRule> {
        self.outputs.first().cloned().ok_or(NoRule)
    }

    /// The first of the call's basic operations that `select` understands.
    pub(super) fn base<T>(
        &self,
        select: impl Fn(&BaseOperationIr) -> Option<T>,
    ) -> Result<T, NoRule> {
        let base = self.ir.iter().filter_map(|op| match op {
            OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
                Some(op)
            }
            _ => None,
        });
        base.filter_map(select).next().ok_or(NoRule)
    }

    /// The first of the call's module operations that `select` understands.
    pub(super) fn module<T>(
        &self,
        select: impl Fn(&ModuleOperationIr) -> Option<T>,
    ) -> Result<T, NoRule> {
        let module = self.ir.iter().filter_map(|op| match op {
            OperationIr::Module(op) => Some(op),
            _ => None,
        });
        module.filter_map(select).next().ok_or(NoRule)
    }

    /// The dimension along which the call works: that of its first operation that has one.
    pub(super) fn dim(&self) -> Result<usize, NoRule> {
        self.ir.iter().find_map(dim).ok_or(NoRule)
    }
}

/// The dimension along which an operation works.
fn dim(op: &OperationIr) -> Option<usize> {
    use BaseOperationIr as Base;
    use NumericOperationIr as Numeric;
    match op {
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => match op {
            Numeric::MeanDim(op)
            | Numeric::SumDim(op)
            | Numeric::ProdDim(op)
            | Numeric::ArgMax(op)
            | Numeric::ArgMin(op)
            | Numeric::MaxDim(op)
            | Numeric::MinDim(op)
            | Numeric::MaxAbsDim(op) => Some(op.axis),
            Numeric::MaxDimWithIndices(op) | Numeric::MinDimWithIndices(op) => Some(op.dim),
            Numeric::CumSum(op)
            | Numeric::CumProd(op)
            | Numeric::CumMin(op)
            | Numeric::CumMax(op) => Some(op.axis),
            _ => None,
        },
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            match op {
                Base::Cat(op) => Some(op.dim),
                Base::RepeatDim(op) => Some(op.dim),
                _ => None,
            }
        }
        OperationIr::Float(_, FloatOperationIr::Cross(op)) => Some(op.dim),
        _ => None,
    }
}

/// The backend method that runs an operation of the intermediate representation.
///
/// Empty for operations that no decomposition of burn contains.
pub(super) fn method_of(op: &OperationIr) -> String {
    match op {
        OperationIr::BaseFloat(op) => format!("float_{}", base_method(op)),
        OperationIr::BaseInt(op) => format!("int_{}", base_method(op)),
        OperationIr::BaseBool(op) => format!("bool_{}", base_method(op)),
        OperationIr::NumericFloat(_, op) => format!("float_{}", numeric_method(op)),
        OperationIr::NumericInt(_, op) => format!("int_{}", numeric_method(op)),
        OperationIr::Float(_, op) => format!("float_{}", variant(op)),
        OperationIr::Int(op) => match variant(op).as_str() {
            name if name.starts_with("bitwise") => name.to_owned(),
            name => format!("int_{name}"),
        },
        OperationIr::Bool(op) => format!("bool_{}", variant(op)),
        OperationIr::Module(op) => module_method(op),
        _ => String::new(),
    }
}

fn base_method(op: &BaseOperationIr) -> String {
    match op {
        BaseOperationIr::SelectAssign(_) => "select_add".to_owned(),
        BaseOperationIr::Scatter(_) => "scatter_add".to_owned(),
        op => variant(op),
    }
}

fn numeric_method(op: &NumericOperationIr) -> String {
    match op {
        NumericOperationIr::Rem(_) => "remainder".to_owned(),
        NumericOperationIr::RemScalar(_) => "remainder_scalar".to_owned(),
        NumericOperationIr::PowiScalar(_) => "powi_scalar_impl".to_owned(),
        NumericOperationIr::IntRandom(_) => "random".to_owned(),
        NumericOperationIr::CumSum(_) => "cumsum".to_owned(),
        NumericOperationIr::CumProd(_) => "cumprod".to_owned(),
        NumericOperationIr::CumMin(_) => "cummin".to_owned(),
        NumericOperationIr::CumMax(_) => "cummax".to_owned(),
        NumericOperationIr::ArgMax(_) => "argmax".to_owned(),
        NumericOperationIr::ArgMin(_) => "argmin".to_owned(),
        op => variant(op),
    }
}

fn module_method(op: &ModuleOperationIr) -> String {
    match op {
        ModuleOperationIr::DeformableConv2d(_) => "deform_conv2d".to_owned(),
        ModuleOperationIr::DeformableConv2dBackward(_) => "deform_conv2d_backward".to_owned(),
        ModuleOperationIr::IRfft(_) => "irfft".to_owned(),
        op => variant(op),
    }
}

/// The name of an enum's variant in snake case. burn-ir names its variants after the methods, with
/// few exceptions.
fn variant(op: &impl fmt::Debug) -> String {
    let mut name = VariantName::default();
    // Formatting stops with an error at the end of the name.
    let _ = write!(name, "{op:?}");
    match name.0.as_str() {
        "powf_scalar" => "powf_scalar_impl".to_owned(),
        "grid_sample2d" => "grid_sample_2d".to_owned(),
        snake => match snake.strip_prefix("arc_") {
            Some(function) => format!("a{function}"),
            None => name.0,
        },
    }
}

/// Collects the first word of what is written to it, in snake case.
#[derive(Default)]
struct VariantName(String);

impl fmt::Write for VariantName {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if !c.is_ascii_alphanumeric() {
                return Err(fmt::Error);
            }
            if c.is_ascii_uppercase() && !self.0.is_empty() {
                self.0.push('_');
            }
            self.0.push(c.to_ascii_lowercase());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn_ir::{BoolOperationIr, TensorId, TensorIr, UnaryOpIr};
    use burn_std::Shape;

    use super::*;

    #[test]
    fn operations_are_named_after_the_methods_that_run_them() {
        let tensor = TensorIr::uninit(TensorId::new(0), Shape::new([2]), DType::F32);
        let unary = UnaryOpIr { input: tensor.clone(), out: tensor };
        let method = |op| method_of(&OperationIr::Float(DType::F32, op));
        assert_eq!(method(FloatOperationIr::ArcTanh(unary.clone())), "float_atanh");
        assert_eq!(method(FloatOperationIr::Log1p(unary.clone())), "float_log1p");
        assert_eq!(method(FloatOperationIr::IsNan(unary.clone())), "float_is_nan");
        assert_eq!(method_of(&OperationIr::Bool(BoolOperationIr::Not(unary))), "bool_not");
    }
}
