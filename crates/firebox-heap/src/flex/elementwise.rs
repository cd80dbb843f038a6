//! Rules for elementwise operations: one element of the output from the same element of each
//! operand.
//!
//! An operand that owns its buffer and is row-major from its start is overwritten. Everything else
//! gets fresh memory.
//!
//! The model of other backends (`generic.rs`) also takes its elementwise operations from this list.

use burn_std::DType;

use crate::arena::{Arena, View};
use crate::call::{Invocation, Made, Rule};
use crate::layout::{Layout, broadcast};

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("float_add", vectorized),
    ("float_sub", vectorized),
    ("float_mul", vectorized),
    ("float_div", vectorized),
    ("_remainder", plain),
    ("float_powf", plain),
    ("float_atan2", plain),
    ("float_powi", powi),
    ("int_add", plain),
    ("int_sub", plain),
    ("int_mul", plain),
    ("int_div", plain),
    ("int_powi", plain),
    ("bitwise_and", plain),
    ("bitwise_or", plain),
    ("bitwise_xor", plain),
    ("bitwise_left_shift", plain),
    ("bitwise_right_shift", plain),
    ("relu_backward", plain),
    ("gelu_backward", plain),
    ("sigmoid_backward", plain),
    ("log_sigmoid_backward", plain),
    ("prelu", plain),
    ("_add_scalar", scalar),
    ("_sub_scalar", scalar),
    ("_mul_scalar", scalar),
    ("_div_scalar", scalar),
    ("_remainder_scalar", scalar),
    ("_powi_scalar_impl", scalar),
    ("float_powf_scalar_impl", scalar),
    ("int_neg", scalar),
    ("int_sign", scalar),
    ("int_clamp", scalar),
    ("int_clamp_min", scalar),
    ("int_clamp_max", scalar),
    ("bitwise_and_scalar", scalar),
    ("bitwise_or_scalar", scalar),
    ("bitwise_xor_scalar", scalar),
    ("bitwise_not", scalar),
    ("bitwise_left_shift_scalar", scalar),
    ("bitwise_right_shift_scalar", scalar),
    ("bool_not", scalar),
    ("float_exp", unary),
    ("float_log", unary),
    ("float_log1p", unary),
    ("float_sqrt", unary),
    ("float_abs", unary),
    ("float_recip", unary),
    ("float_neg", unary),
    ("float_sign", unary),
    ("float_clamp", unary),
    ("float_clamp_min", unary),
    ("float_clamp_max", unary),
    ("float_cos", unary),
    ("float_sin", unary),
    ("float_tan", unary),
    ("float_cosh", unary),
    ("float_sinh", unary),
    ("float_tanh", unary),
    ("float_acos", unary),
    ("float_acosh", unary),
    ("float_asin", unary),
    ("float_asinh", unary),
    ("float_atan", unary),
    ("float_atanh", unary),
    ("float_round", unary),
    ("float_floor", unary),
    ("float_ceil", unary),
    ("float_trunc", unary),
    ("float_erf", unary),
    ("int_abs", int_abs),
    ("relu", unary),
    ("leaky_relu", unary),
    ("gelu", unary),
    ("sigmoid", unary),
    ("hard_sigmoid", unary),
    ("log_sigmoid", unary),
    ("bool_and", logic),
    ("bool_or", logic),
    ("bool_xor", logic),
];

fn vectorized(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    Ok(vec![binary(arena, lhs, rhs, true)])
}

fn plain(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    Ok(vec![binary(arena, lhs, rhs, false)])
}

fn scalar(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    Ok(vec![map(arena, tensor)])
}

fn unary(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    Ok(vec![map_keeping_layout(arena, tensor)])
}

/// Returns a tensor of an unsigned type unchanged.
fn int_abs(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    let unsigned = matches!(tensor.dtype, DType::U64 | DType::U32 | DType::U16 | DType::U8);
    Ok(vec![if unsigned { tensor } else { map_keeping_layout(arena, tensor) }])
}

/// The exponent is first converted to a float tensor.
fn powi(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    let dtype = lhs.dtype;
    let rhs = converted(arena, rhs, dtype);
    Ok(vec![binary(arena, lhs, rhs, false)])
}

/// Overwrites either operand.
fn logic(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    let (lhs, rhs) = broadcast_both(lhs, rhs);
    let contiguous = lhs.layout.is_contiguous() && rhs.layout.is_contiguous();
    Ok(vec![if contiguous && lhs.is_unique_from_start() {
        lhs
    } else if contiguous && rhs.is_unique_from_start() {
        rhs
    } else {
        arena.tensor(lhs.shape(), lhs.dtype)
    }])
}

/// A binary operation. `vectorized` operations have two additional ways to write in place, on
/// 32-bit floats.
pub(super) fn binary(arena: &Arena, lhs: View, rhs: View, vectorized: bool) -> View {
    let (mut lhs, rhs) = broadcast_both(lhs, rhs);
    if vectorized && lhs.dtype == DType::F32 {
        if !lhs.layout.is_contiguous() && rhs.layout.strides.contains(&0) {
            lhs = lhs.to_contiguous(arena);
        }
        if lhs.is_unique_from_start() && repeats_rows_or_scalars(&lhs.layout, &rhs) {
            return lhs;
        }
    }
    if lhs.is_unique_from_start() && rhs.layout.is_contiguous() {
        return lhs;
    }
    arena.tensor(lhs.shape(), lhs.dtype)
}

/// An operation with scalars.
pub(super) fn map(arena: &Arena, tensor: View) -> View {
    if tensor.is_unique_from_start() {
        return tensor;
    }
    arena.tensor(tensor.shape(), tensor.dtype)
}

/// A unary operation. A tensor that covers its buffer, transposed or not, keeps its layout.
pub(super) fn map_keeping_layout(arena: &Arena, tensor: View) -> View {
    if tensor.is_unique_from_start() {
        return tensor;
    }
    let made = arena.tensor(tensor.shape(), tensor.dtype);
    let forward = tensor.layout.strides.iter().all(|stride| *stride >= 0);
    if forward && tensor.layout.offset == 0 && tensor.covers_buffer() {
        return made.with_layout(tensor.layout.clone());
    }
    made
}

/// Both operands in the shape of the result, as views.
pub(super) fn broadcast_both(lhs: View, rhs: View) -> (View, View) {
    if lhs.shape() == rhs.shape() {
        return (lhs, rhs);
    }
    let shape = broadcast(lhs.shape(), rhs.shape());
    (stretched(lhs, &shape), stretched(rhs, &shape))
}

/// `view` in `shape`.
pub(super) fn stretched(view: View, shape: &[usize]) -> View {
    if view.shape() == shape { view } else { view.expand(shape) }
}

/// The elements in another type: a copy, alongside a contiguous copy if the tensor is not
/// contiguous.
pub(super) fn converted(arena: &Arena, tensor: View, dtype: DType) -> View {
    let tensor = tensor.to_contiguous(arena);
    arena.tensor(tensor.shape(), dtype)
}

/// Whether `rhs` is one row for all rows of `lhs`, or one scalar for each row. Flex computes these
/// two broadcasts in place.
fn repeats_rows_or_scalars(lhs: &Layout, rhs: &View) -> bool {
    let rank = lhs.rank();
    if rank == 0 || lhs.elements() == 0 || rhs.layout.rank() != rank {
        return false;
    }
    let strides = &rhs.layout.strides;
    match strides[rank - 1] {
        1 => (0..rank - 1).all(|dim| strides[dim] == 0 || lhs.shape[dim] == 1),
        0 => {
            let outer = strides.iter().rposition(|stride| *stride != 0).map_or(0, |dim| dim + 1);
            let mut expected = 1;
            (0..outer).rev().all(|dim| {
                let walks = strides[dim] == expected;
                expected *= lhs.shape[dim] as isize;
                walks
            })
        }
        _ => false,
    }
}
