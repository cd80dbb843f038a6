//! Rules for operations that select elements by position: gather, scatter, select, slice
//! assignment, concatenation.
//!
//! None writes in place: even an owned tensor is copied before it is written to.

use std::rc::Rc;

use burn_std::DType;

use crate::arena::{Arena, Buffer, View};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::compare::int_cast_to;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("_gather", gather),
    ("_gather_nd", gather),
    ("_select", gather),
    ("_scatter_add", scatter),
    ("bool_scatter_or", scatter),
    ("_scatter_nd", scatter),
    ("_select_add", scatter),
    ("bool_select_or", scatter),
    ("_slice_assign", slice_assign),
    ("_cat", cat),
    ("_repeat_dim", repeat_dim),
    ("float_cross", cross),
    ("bool_argwhere", argwhere),
    ("embedding", embedding),
    ("embedding_backward", embedding_backward),
];

/// The positions as machine words: a copy unless they already are 64-bit integers.
fn words(arena: &Arena, indices: &View) -> Option<Rc<Buffer>> {
    (indices.dtype != DType::I64).then(|| arena.workspace(8 * indices.elements() as u64))
}

fn gather(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor, indices] = call.take()?;
    Ok(vec![gathered(arena, tensor, indices, out.shape)])
}

fn gathered(arena: &Arena, tensor: View, indices: View, shape: Vec<usize>) -> View {
    let _tensor = tensor.to_contiguous(arena);
    let indices = indices.to_contiguous(arena);
    let _words = words(arena, &indices);
    arena.tensor(shape, tensor.dtype)
}

fn scatter(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor, indices, value] = call.take()?;
    Ok(vec![scattered(arena, tensor, indices, value)])
}

fn scattered(arena: &Arena, tensor: View, indices: View, value: View) -> View {
    let tensor = tensor.to_contiguous(arena);
    let indices = indices.to_contiguous(arena);
    let _value = value.to_contiguous(arena);
    let _words = words(arena, &indices);
    arena.tensor(tensor.shape(), tensor.dtype)
}

/// A copy of the tensor, into which the value is written. A value that is one broadcast element is
/// read in its layout.
fn slice_assign(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor, value] = call.take()?;
    let one_element = value.elements() > 0 && value.layout.strides.iter().all(|s| *s == 0);
    let _value = (!one_element).then(|| value.to_contiguous(arena));
    Ok(vec![arena.tensor(tensor.shape(), tensor.dtype)])
}

/// The output first, then contiguous copies of the parts. Each copy replaces its original.
fn cat(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let out = call.output()?;
    let mut parts = call.inputs;
    if parts.len() == 1 {
        return Ok(parts);
    }
    let made = arena.tensor(out.shape, out.dtype);
    if dim > 0 || parts.iter().any(|part| !part.layout.is_contiguous()) {
        for part in &mut parts {
            *part = part.to_contiguous(arena);
        }
    }
    Ok(vec![made])
}

fn repeat_dim(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    if tensor.shape() == out.shape {
        return Ok(vec![tensor]);
    }
    let _tensor = tensor.to_contiguous(arena);
    Ok(vec![arena.tensor_from_bytes(out.shape, out.dtype)])
}

/// Three components, each from two products of a third of the elements, then their concatenation.
fn cross(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    let third = lhs.bytes() / 3;
    let components = [arena.workspace(third), arena.workspace(third)];
    drop(arena.workspace(2 * third));
    let last = arena.workspace(third);
    drop(rhs);
    let made = arena.tensor(lhs.shape(), lhs.dtype);
    drop((components, last));
    Ok(vec![made])
}

fn argwhere(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    let contiguous = tensor.to_contiguous(arena);
    let indices = arena.tensor(out.shape, DType::I64);
    let made = int_cast_to(arena, indices, out.dtype);
    drop((tensor, contiguous));
    Ok(vec![made])
}

/// A selection of rows.
fn embedding(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [weights, indices] = call.take()?;
    let flat = indices.reshape(arena, &[indices.elements()]);
    drop(indices);
    Ok(vec![gathered(arena, weights, flat, out.shape)])
}

/// Zeros, and a copy of them to which the gradient is added row by row.
fn embedding_backward(arena: &Arena, call: Invocation<'_>) -> Made {
    let [weights, grad, indices] = call.take()?;
    let flat_indices = indices.reshape(arena, &[indices.elements()]);
    drop(indices);
    let width = weights.shape().last().copied().ok_or(NoRule)?;
    let flat_grad = grad.reshape(arena, &[grad.elements() / width.max(1), width]);
    let zeros = arena.tensor_from_bytes(weights.shape(), grad.dtype);
    drop(grad);
    Ok(vec![scattered(arena, zeros, flat_indices, flat_grad)])
}
