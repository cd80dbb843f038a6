//! Rules for views: operations that return another layout on the same buffer. Flex copies if the
//! layout cannot express the result.
//!
//! The model of other backends (`generic.rs`) also takes its views from this list.

use burn_ir::BaseOperationIr as Base;

use crate::arena::{Arena, View};
use crate::call::{Invocation, Made, Rule};

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("_reshape", reshape),
    ("_expand", expand),
    ("_transpose", transpose),
    ("_swap_dims", swap_dims),
    ("_permute", permute),
    ("_flip", flip),
    ("_slice", slice),
    ("_unfold", unfold),
    ("_to_device", identity),
    ("float_detach", identity),
    ("float_set_require_grad", identity),
];

/// The tensor itself.
pub(crate) fn identity(_arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    Ok(vec![tensor])
}

/// A view if the tensor is contiguous from the start of its buffer, a copy otherwise. The tensor
/// lives alongside the copy until the call is over.
fn reshape(arena: &Arena, call: Invocation<'_>) -> Made {
    let shape = call.output()?.shape;
    let [tensor] = call.take()?;
    Ok(vec![tensor.reshape(arena, &shape)])
}

fn expand(_arena: &Arena, call: Invocation<'_>) -> Made {
    let shape = call.output()?.shape;
    let [tensor] = call.take()?;
    Ok(vec![tensor.expand(&shape)])
}

fn transpose(_arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    let rank = tensor.layout.rank();
    Ok(vec![if rank < 2 { tensor } else { swapped(tensor, rank - 2, rank - 1) }])
}

fn swap_dims(_arena: &Arena, call: Invocation<'_>) -> Made {
    let (dim1, dim2) = call.base(|op| match op {
        Base::SwapDims(op) => Some((op.dim1, op.dim2)),
        _ => None,
    })?;
    let [tensor] = call.take()?;
    Ok(vec![swapped(tensor, dim1, dim2)])
}

fn permute(_arena: &Arena, call: Invocation<'_>) -> Made {
    let axes = call.base(|op| match op {
        Base::Permute(op) => Some(op.axes.clone()),
        _ => None,
    })?;
    let [tensor] = call.take()?;
    let layout = tensor.layout.permute(&axes);
    Ok(vec![tensor.with_layout(layout)])
}

fn flip(_arena: &Arena, call: Invocation<'_>) -> Made {
    let axes = call.base(|op| match op {
        Base::Flip(op) => Some(op.axes.clone()),
        _ => None,
    })?;
    let [tensor] = call.take()?;
    let layout = tensor.layout.clone().flip(&axes);
    Ok(vec![tensor.with_layout(layout)])
}

/// A view for positive steps, a copy if any step is negative.
fn slice(arena: &Arena, call: Invocation<'_>) -> Made {
    let ranges = call.base(|op| match op {
        Base::Slice(op) => Some(op.ranges.clone()),
        _ => None,
    })?;
    let [tensor] = call.take()?;
    let (layout, copies) = tensor.layout.slice(&ranges);
    Ok(vec![match copies {
        true => arena.tensor(layout.shape, tensor.dtype),
        false => tensor.with_layout(layout),
    }])
}

fn unfold(_arena: &Arena, call: Invocation<'_>) -> Made {
    let (dim, size, step) = call.base(|op| match op {
        Base::Unfold(op) => Some((op.dim, op.size, op.step)),
        _ => None,
    })?;
    let [tensor] = call.take()?;
    let layout = tensor.layout.unfold(dim, size, step);
    Ok(vec![tensor.with_layout(layout)])
}

/// `tensor` with two dimensions exchanged.
pub(super) fn swapped(tensor: View, dim1: usize, dim2: usize) -> View {
    let layout = tensor.layout.clone().swap(dim1, dim2);
    tensor.with_layout(layout)
}
