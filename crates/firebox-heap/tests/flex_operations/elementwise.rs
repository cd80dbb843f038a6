//! Elementwise operations, in place or not.

use burn_backend::Scalar;
use burn_backend::ops::{ActivationOps, BoolTensorOps, FloatTensorOps};
use burn_flex::{Flex, FlexTensor};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, BoolOperationIr, CastOpIr, FloatOperationIr, MaskFillOpIr,
    MaskWhereOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, UnaryOpIr,
};
use burn_std::{BoolDType, BoolStore, DType, FloatDType};

use crate::scenario::{Arg, Handle, Scenario};
use crate::views::{expand, reshape, slice};
use burn_std::Slice;

pub fn add(s: &mut Scenario, lhs: Arg, rhs: Arg) -> Handle {
    binary(s, "float_add", lhs, rhs, Flex::float_add)
}

pub fn mul(s: &mut Scenario, lhs: Arg, rhs: Arg) -> Handle {
    binary(s, "float_mul", lhs, rhs, Flex::float_mul)
}

/// The rule of a binary method does not depend on which operation describes it.
pub fn binary(
    s: &mut Scenario,
    name: &'static str,
    lhs: Arg,
    rhs: Arg,
    run: impl FnOnce(FlexTensor, FlexTensor) -> FlexTensor,
) -> Handle {
    let [handle] = s.call(
        name,
        [lhs, rhs],
        |[lhs, rhs], new| {
            let op = BinaryOpIr::create(lhs, rhs, new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::Add(op))
        },
        |[lhs, rhs]| [run(lhs, rhs)],
    );
    handle
}

pub fn unary(
    s: &mut Scenario,
    name: &'static str,
    x: Arg,
    run: impl FnOnce(FlexTensor) -> FlexTensor,
) -> Handle {
    let [handle] = s.call(
        name,
        [x],
        |[x], new| OperationIr::Float(x.dtype, FloatOperationIr::Exp(UnaryOpIr::create(x, new))),
        |[x]| [run(x)],
    );
    handle
}

fn scaled(s: &mut Scenario, x: Arg) -> Handle {
    let [handle] = s.call(
        "float_mul_scalar",
        [x],
        |[x], new| {
            let op = ScalarOpIr::create(x, ScalarIr::Float(0.5), new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::MulScalar(op))
        },
        |[x]| [Flex::float_mul_scalar(x, Scalar::Float(0.5))],
    );
    handle
}

fn greater_zero(s: &mut Scenario, x: Arg) -> Handle {
    let [handle] = s.call(
        "float_greater_elem",
        [x],
        |[x], new| {
            let bool = DType::Bool(BoolStore::Native);
            let op = ScalarOpIr::create_comparison(x, ScalarIr::Float(0.5), bool, new);
            OperationIr::NumericFloat(op.lhs.dtype, NumericOperationIr::GreaterElem(op))
        },
        |[x]| [Flex::float_greater_elem(x, Scalar::Float(0.5), BoolDType::Native)],
    );
    handle
}

fn mask_fill(s: &mut Scenario, x: Arg, mask: Arg) -> Handle {
    let [handle] = s.call(
        "float_mask_fill",
        [x, mask],
        |[x, mask], new| {
            let op = MaskFillOpIr::create(x, mask, ScalarIr::Float(0.0), new);
            OperationIr::BaseFloat(BaseOperationIr::MaskFill(op))
        },
        |[x, mask]| [Flex::float_mask_fill(x, mask, Scalar::Float(0.0))],
    );
    handle
}

const SHAPE: [usize; 2] = [1024, 1024];

#[test]
fn an_owned_left_operand_is_overwritten() {
    let mut s = Scenario::new();
    let (a, b) = (s.existing(SHAPE), s.existing(SHAPE));
    add(&mut s, a.last(), b.keep());
    s.check();
}

#[test]
fn an_owned_right_operand_is_not() {
    let mut s = Scenario::new();
    let (a, b) = (s.existing(SHAPE), s.existing(SHAPE));
    let c = add(&mut s, a.keep(), b.last());
    let d = binary(&mut s, "float_powf", a.keep(), c.last(), Flex::float_powf);
    binary(&mut s, "float_sub", d.last(), a.last(), Flex::float_sub);
    s.check();
}

#[test]
fn a_square_is_not_computed_in_place() {
    let mut s = Scenario::new();
    let x = s.existing(SHAPE);
    mul(&mut s, x.keep(), x.last());
    s.check();
}

#[test]
fn rows_and_scalars_of_rows_are_added_in_place() {
    let mut s = Scenario::new();
    let (x, row, column) = (s.existing(SHAPE), s.existing([1, 1024]), s.existing([1024, 1]));
    let y = add(&mut s, x.last(), row.keep());
    let y = mul(&mut s, y.last(), column.keep());
    let z = mul(&mut s, y.keep(), column.keep());
    binary(&mut s, "float_powf", z.last(), column.keep(), Flex::float_powf);
    s.check();
}

#[test]
fn channels_are_not_added_in_place() {
    let mut s = Scenario::new();
    let (x, channel) = (s.existing([16, 64, 32, 32]), s.existing([1, 64, 1, 1]));
    add(&mut s, x.last(), channel.keep());
    s.check();
}

#[test]
fn a_transposed_left_operand_of_a_broadcast_is_copied() {
    let mut s = Scenario::new();
    let (x, row) = (s.existing(SHAPE), s.existing([1, 1024]));
    let t = s.transposed(x.keep());
    let y = add(&mut s, t.last(), row.keep());
    let t = s.transposed(y.last());
    add(&mut s, t.last(), row.keep());
    s.check();
}

#[test]
fn broadcast_left_operands_get_fresh_memory() {
    let mut s = Scenario::new();
    let (x, row) = (s.existing(SHAPE), s.existing([1, 1024]));
    add(&mut s, row.last(), x.last());
    s.check();
}

#[test]
fn views_of_one_buffer_are_not_overwritten() {
    let mut s = Scenario::new();
    let x = s.existing(SHAPE);
    let view = reshape(&mut s, x.keep(), [1024 * 1024]);
    let y = scaled(&mut s, view.last());
    let z = unary(&mut s, "float_exp", y.last(), Flex::float_exp);
    let z = unary(&mut s, "float_sqrt", z.keep(), Flex::float_sqrt);
    scaled(&mut s, z.keep());
    s.check();
}

#[test]
fn transposed_tensors_keep_their_layout_in_unary_operations() {
    let mut s = Scenario::new();
    let x = s.existing([512, 2048]);
    let t = s.transposed(x.keep());
    let y = unary(&mut s, "float_tanh", t.last(), Flex::float_tanh);
    let y = s.transposed(y.last());
    let y = unary(&mut s, "float_abs", y.last(), Flex::float_abs);
    reshape(&mut s, y.last(), [512 * 2048]);
    s.check();
}

#[test]
fn slices_are_computed_into_fresh_memory() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 4096]);
    let gate = slice(&mut s, x.keep(), &[Slice::new(0, None, 1), Slice::new(0, Some(1024), 1)]);
    let gate = unary(&mut s, "sigmoid", gate.last(), Flex::sigmoid);
    let head = slice(&mut s, x.keep(), &[Slice::new(0, Some(512), 1)]);
    let head = unary(&mut s, "float_tanh", head.last(), Flex::float_tanh);
    let rows = slice(&mut s, x.last(), &[Slice::new(0, Some(512), 1)]);
    let rows = unary(&mut s, "float_neg", rows.last(), Flex::float_neg);
    binary(&mut s, "sigmoid_backward", gate.keep(), gate.keep(), Flex::sigmoid_backward);
    mul(&mut s, head.last(), rows.last());
    s.check();
}

#[test]
fn activations_own_their_operands() {
    let mut s = Scenario::new();
    let (x, grad) = (s.existing(SHAPE), s.existing(SHAPE));
    let y = unary(&mut s, "relu", x.keep(), Flex::relu);
    let y = unary(&mut s, "gelu", y.last(), Flex::gelu);
    let g = binary(&mut s, "relu_backward", y.keep(), grad.keep(), Flex::relu_backward);
    binary(&mut s, "gelu_backward", x.last(), g.last(), Flex::gelu_backward);
    s.check();
}

#[test]
fn masks_cost_a_byte_and_filling_copies() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    let mask = greater_zero(&mut s, x.keep());
    let y = mask_fill(&mut s, x.keep(), mask.keep());
    mask_fill(&mut s, y.last(), mask.last());
    s.check();
}

#[test]
fn broadcast_masks_are_materialized() {
    let mut s = Scenario::new();
    let (x, row) = (s.existing([1024, 2048]), s.existing([1, 2048]));
    let mask = greater_zero(&mut s, row.keep());
    mask_fill(&mut s, x.last(), mask.last());
    s.check();
}

#[test]
fn choosing_between_transposed_tensors_copies_them() {
    let mut s = Scenario::new();
    let (x, y) = (s.existing(SHAPE), s.existing(SHAPE));
    let mask = greater_zero(&mut s, x.keep());
    let (x, y) = (s.transposed(x.last()), s.transposed(y.last()));
    s.call(
        "float_mask_where",
        [x.last(), mask.last(), y.last()],
        |[x, mask, y], new| {
            let op = MaskWhereOpIr::create(x, mask, y, new);
            OperationIr::BaseFloat(BaseOperationIr::MaskWhere(op))
        },
        |[x, mask, y]| [Flex::float_mask_where(x, mask, y)],
    );
    s.check();
}

#[test]
fn casts_go_through_wide_floats() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    s.call(
        "float_cast",
        [x.last()],
        |[x], new| {
            OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr::create(x, DType::F16, new)))
        },
        |[x]| [Flex::float_cast(x, FloatDType::F16)],
    );
    s.check();
}

#[test]
fn bools_become_floats() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    let mask = greater_zero(&mut s, x.keep());
    let [not] = s.call(
        "bool_not",
        [mask.last()],
        |[x], new| OperationIr::Bool(BoolOperationIr::Not(UnaryOpIr::create(x, new))),
        |[x]| [Flex::bool_not(x)],
    );
    s.call(
        "bool_into_float",
        [not.last()],
        |[x], new| {
            let op = CastOpIr::create(x, DType::F32, new);
            OperationIr::Bool(BoolOperationIr::IntoFloat(op))
        },
        |[x]| [Flex::bool_into_float(x, FloatDType::F32)],
    );
    s.check();
}

#[test]
fn expanded_gradients_are_written_out() {
    let mut s = Scenario::new();
    let (x, grad) = (s.existing([512, 2048]), s.existing([1, 1]));
    let grad = expand(&mut s, grad.last(), [512, 2048]);
    let y = mul(&mut s, grad.keep(), x.keep());
    mul(&mut s, y.last(), grad.last());
    s.check();
}

#[test]
fn powers_are_products() {
    let mut s = Scenario::new();
    let x = s.existing(SHAPE);
    s.call_decomposed(
        "float_powi_scalar",
        [x.last()],
        |[x], new| {
            let first = burn_ir::TensorIr { status: burn_ir::TensorStatus::ReadOnly, ..x.clone() };
            let op = BinaryOpIr::create(first, x, new);
            vec![OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::Mul(op))]
        },
        |[x]| [Flex::float_powi_scalar(x, Scalar::Int(2))],
    );
    s.check();
}
