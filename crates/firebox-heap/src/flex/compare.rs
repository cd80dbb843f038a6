//! Rules for comparisons, predicates, masks and conversions: elementwise operations that never
//! write in place.

use burn_std::DType;

use crate::arena::{Arena, View, bytes_of};
use crate::call::{Invocation, Made, Rule};
use crate::flex::elementwise::{broadcast_both, converted, stretched};
use crate::layout::broadcast;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("_equal", compare),
    ("_not_equal", compare),
    ("_greater", compare),
    ("_greater_equal", compare),
    ("_lower", compare),
    ("_lower_equal", compare),
    ("bool_not_equal", compare_contiguous),
    ("_equal_elem", compare_scalar),
    ("_not_equal_elem", compare_scalar),
    ("_greater_elem", compare_scalar),
    ("_greater_equal_elem", compare_scalar),
    ("_lower_elem", compare_scalar),
    ("_lower_equal_elem", compare_scalar),
    ("bool_not_equal_elem", convert),
    ("float_is_nan", convert),
    ("float_is_inf", convert),
    ("_into_int", convert),
    ("_into_float", convert),
    ("int_cast", int_cast),
    ("float_cast", float_cast),
    ("_mask_fill", mask_fill),
    ("_mask_where", mask_where),
];

fn compare(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [lhs, rhs] = call.take()?;
    let (lhs, rhs) = broadcast_both(lhs, rhs);
    let row = lhs.layout.rank() == 2 && rhs.layout.strides.first() == Some(&0);
    let _row = row.then(|| arena.workspace_at_most(bytes_of(rhs.shape()[1], rhs.dtype)));
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

/// As [`compare`], but operands that are not contiguous are copied.
fn compare_contiguous(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [lhs, rhs] = call.take()?;
    let (lhs, rhs) = broadcast_both(lhs, rhs);
    let plain = lhs.layout.is_contiguous() && rhs.layout.is_contiguous();
    let _copies = (!plain).then(|| (lhs.to_contiguous(arena), rhs.to_contiguous(arena)));
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

fn compare_scalar(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [_tensor] = call.take::<1>()?;
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

fn convert(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    Ok(vec![converted(arena, tensor, out.dtype)])
}

fn int_cast(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    Ok(vec![int_cast_to(arena, tensor, out.dtype)])
}

/// An integer tensor in another type, or the tensor itself if it already has that type.
pub(super) fn int_cast_to(arena: &Arena, tensor: View, dtype: DType) -> View {
    if tensor.dtype == dtype { tensor } else { converted(arena, tensor, dtype) }
}

/// Converts through 64-bit floats.
fn float_cast(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    if tensor.dtype == out.dtype {
        return Ok(vec![tensor]);
    }
    let tensor = tensor.to_contiguous(arena);
    let wide = arena.tensor(tensor.shape(), DType::F64);
    Ok(vec![if out.dtype == DType::F64 { wide } else { arena.tensor(tensor.shape(), out.dtype) }])
}

fn mask_fill(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor, mask] = call.take()?;
    let (tensor, mask) = broadcast_both(tensor, mask);
    let tensor = tensor.to_contiguous(arena);
    let _mask = mask.to_contiguous(arena);
    Ok(vec![arena.tensor(tensor.shape(), tensor.dtype)])
}

fn mask_where(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor, _mask, _value] = contiguous_in_one_shape(arena, call.take()?);
    Ok(vec![arena.tensor(tensor.shape(), tensor.dtype)])
}

/// Contiguous copies of all three. The originals end here.
fn contiguous_in_one_shape(arena: &Arena, [tensor, mask, value]: [View; 3]) -> [View; 3] {
    let shape = broadcast(&broadcast(tensor.shape(), mask.shape()), value.shape());
    let expanded = [tensor, mask, value].map(|view| stretched(view, &shape));
    [0, 1, 2].map(|i: usize| expanded[i].to_contiguous(arena))
}
