//! The rules of burn's Flex backend, release 0.21, one file per group of operations.
//!
//! Each rule follows the code that it models, with the same clones and the same scopes, so it
//! copies, shares and frees where that code does. `run.rs` looks rules up with [`model`].
//!
//! In the tables, `_reshape` stands for `float_reshape`, `int_reshape` and `bool_reshape`, for
//! those that have no row of their own.

mod views;

mod elementwise;

mod compare;

mod reductions;

mod gemm;

mod matmul;

mod conv;

mod conv_backward;

mod conv_transpose;

mod pool;

mod indexing;

mod creation;

mod attention;

use std::iter;
use std::sync::LazyLock;

pub(super) use gemm::kept_per_thread;
use rustc_hash::FxHashMap;

use crate::call::Rule;

/// How a method is modelled.
#[derive(Clone, Copy)]
pub(super) enum Model {
    /// As the backend's own code, or as burn's default implementation.
    Whole(Rule),
    /// As the decomposition in the trace, because the backend has only burn's default.
    Decomposed,
}

/// Methods that Flex leaves to burn's defaults, or whose own code is the default.
const DECOMPOSED: &[&str] = &[
    "_powi_scalar",
    "float_powf_scalar",
    "log_softmax",
    "softmin",
    "conv_transpose1d_x_backward",
    "conv_transpose2d_x_backward",
    "conv_transpose3d_x_backward",
    "conv_transpose1d_weight_backward",
    "conv_transpose2d_weight_backward",
    "conv_transpose3d_weight_backward",
    "conv_transpose1d_bias_backward",
    "conv_transpose2d_bias_backward",
    "conv_transpose3d_bias_backward",
];

/// The rules by method.
static MODELS: LazyLock<FxHashMap<&'static str, Model>> = LazyLock::new(|| {
    let whole = groups().into_iter().flatten().map(|(name, rule)| (*name, Model::Whole(*rule)));
    let decomposed = DECOMPOSED.iter().map(|name| (*name, Model::Decomposed));
    whole.chain(decomposed).collect()
});

/// The tables of all groups.
fn groups() -> [&'static [(&'static str, Rule)]; 12] {
    [
        views::RULES,
        elementwise::RULES,
        compare::RULES,
        reductions::RULES,
        matmul::RULES,
        conv::RULES,
        conv_backward::RULES,
        conv_transpose::RULES,
        pool::RULES,
        indexing::RULES,
        creation::RULES,
        attention::RULES,
    ]
}

/// The names under which `method` may be in a table: its own, and the one of all kinds.
fn names(method: &str) -> impl Iterator<Item = &str> {
    let kinds = ["float", "int", "bool"].into_iter();
    iter::once(method).chain(kinds.filter_map(move |kind| method.strip_prefix(kind)))
}

/// The model of `method`.
pub(super) fn model(method: &str) -> Option<Model> {
    names(method).find_map(|name| MODELS.get(name).copied())
}

fn has(rules: &[(&str, Rule)], method: &str) -> bool {
    names(method).any(|name| rules.iter().any(|(row, _)| *row == name))
}

/// Whether `method` returns another layout on the same buffer.
pub(super) fn is_view(method: &str) -> bool {
    has(views::RULES, method)
}

/// Whether `method` computes each element of its output from the same element of each operand.
pub(super) fn is_elementwise(method: &str) -> bool {
    has(elementwise::RULES, method)
}
