//! Rules for reductions, extremes, cumulative operations and sorting.

use burn_std::DType;

use crate::arena::{Arena, View, bytes_of};
use crate::call::{Invocation, Made, Rule};
use crate::flex::compare::int_cast_to;
use crate::flex::elementwise::map_keeping_layout;

/// The type in which Flex computes positions.
const INDEX: DType = DType::I64;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("_sum", to_scalar),
    ("_prod", to_scalar),
    ("float_mean", float_mean),
    ("_max", to_scalar),
    ("_min", to_scalar),
    ("_max_abs", max_abs),
    ("_any", to_scalar),
    ("_all", to_scalar),
    ("int_mean", to_scalar),
    ("bool_any", contiguous_to_output),
    ("bool_all", contiguous_to_output),
    ("_sum_dim", sum_dim),
    ("_prod_dim", prod_dim),
    ("_mean_dim", mean_dim),
    ("_max_dim", contiguous_to_output),
    ("_min_dim", contiguous_to_output),
    ("_max_abs_dim", max_abs),
    ("_any_dim", contiguous_to_output),
    ("_all_dim", contiguous_to_output),
    ("_max_dim_with_indices", with_indices),
    ("_min_dim_with_indices", with_indices),
    ("_argmax", arg_extreme),
    ("_argmin", arg_extreme),
    ("_cumsum", cumulative),
    ("_cumprod", cumulative),
    ("_cummin", cumulative),
    ("_cummax", cumulative),
    ("_sort", sort),
    ("_sort_with_indices", sort_with_indices),
    ("_argsort", argsort),
    ("_topk", topk),
];

/// Reads the tensor in its layout and makes one number.
fn to_scalar(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [_tensor] = call.take::<1>()?;
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

/// The mean. Half-precision floats are widened first.
fn float_mean(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    let _wide = is_half(tensor.dtype).then(|| {
        let tensor = tensor.to_contiguous(arena);
        let wide = arena.workspace(bytes_of(tensor.elements(), DType::F32));
        (tensor, wide)
    });
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

/// Copies the tensor if it is not contiguous, and makes the output.
pub(super) fn contiguous_to_output(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    let _contiguous = tensor.to_contiguous(arena);
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

/// The absolute values as a separate tensor, in place if possible, then the maximum.
fn max_abs(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    let absolute = map_keeping_layout(arena, tensor);
    let _contiguous = (out.shape.len() == absolute.layout.rank() && out.shape.len() > 1)
        .then(|| absolute.to_contiguous(arena));
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

fn sum_dim(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let [tensor] = call.take()?;
    Ok(vec![summed(arena, tensor, dim)])
}

fn prod_dim(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let [tensor] = call.take()?;
    Ok(vec![reduced(arena, tensor, dim, false)])
}

/// The sum, divided in place. Half-precision floats are widened first.
fn mean_dim(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let [tensor] = call.take()?;
    if !is_half(tensor.dtype) {
        return Ok(vec![summed(arena, tensor, dim)]);
    }
    let tensor = tensor.to_contiguous(arena);
    let _wide = arena.workspace(bytes_of(tensor.elements(), DType::F32));
    let shape = reduced_shape(&tensor, dim);
    let _sums = arena.workspace_at_most(2 * bytes_of(shape.iter().product(), DType::F32));
    Ok(vec![arena.tensor(shape, tensor.dtype)])
}

/// The sum along `dim`.
pub(super) fn summed(arena: &Arena, tensor: View, dim: usize) -> View {
    reduced(arena, tensor, dim, true)
}

/// A reduction along `dim`. The tensor is copied if Flex cannot walk it by one outer and one inner
/// stride. Sums of 32-bit floats along any but the last dimension are accumulated in an aligned
/// buffer, which is copied to the output.
fn reduced(arena: &Arena, tensor: View, dim: usize, sum: bool) -> View {
    let rank = tensor.layout.rank();
    let walkable = match tensor.dtype {
        DType::F32 | DType::F64 | DType::I64 | DType::U64 => dim <= 1 && rank - dim <= 2,
        _ => false,
    };
    let walked = match tensor.layout.is_contiguous() || walkable {
        true => tensor.clone(),
        false => tensor.to_contiguous(arena),
    };
    let shape = reduced_shape(&tensor, dim);
    let strides = &walked.layout.strides;
    let inner_contiguous = strides.iter().all(|stride| *stride >= 0) && strides[rank - 1] == 1;
    let accumulates = sum && walked.dtype == DType::F32 && inner_contiguous && dim + 1 < rank;
    let _accumulator =
        accumulates.then(|| arena.workspace(bytes_of(shape.iter().product(), walked.dtype)));
    arena.tensor(shape, walked.dtype)
}

fn reduced_shape(tensor: &View, dim: usize) -> Vec<usize> {
    let mut shape = tensor.shape().to_vec();
    shape[dim] = 1;
    shape
}

/// Values and 64-bit positions. Positions are converted if another type is requested.
fn with_indices(arena: &Arena, call: Invocation<'_>) -> Made {
    let cast = call.method.starts_with("float_").then(|| call.outputs.get(1).map(|out| out.dtype));
    let out = call.output()?;
    let [tensor] = call.take()?;
    let contiguous = tensor.to_contiguous(arena);
    let values = arena.tensor(out.shape.clone(), out.dtype);
    let indices = arena.tensor(out.shape, INDEX);
    drop((tensor, contiguous));
    Ok(vec![values, int_cast_to(arena, indices, cast.flatten().unwrap_or(INDEX))])
}

/// The positions of the extremes. Values are also kept, except along the last dimension of 32-bit
/// floats.
fn arg_extreme(arena: &Arena, call: Invocation<'_>) -> Made {
    let cast = call.method.starts_with("float_");
    let dim = call.dim()?;
    let out = call.output()?;
    let [tensor] = call.take()?;
    let contiguous = tensor.to_contiguous(arena);
    let positions_only = tensor.dtype == DType::F32 && dim + 1 == tensor.layout.rank();
    let values = (!positions_only).then(|| arena.tensor(out.shape.clone(), tensor.dtype));
    let indices = arena.tensor(out.shape, INDEX);
    drop((tensor, contiguous, values));
    Ok(vec![int_cast_to(arena, indices, if cast { out.dtype } else { INDEX })])
}

/// The output, and one accumulator per position of the dimensions after `dim`.
fn cumulative(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let [tensor] = call.take()?;
    let tensor = tensor.to_contiguous(arena);
    let made = arena.tensor(tensor.shape(), tensor.dtype);
    let inner: usize = tensor.shape()[dim + 1..].iter().product();
    let accumulator = if is_half(tensor.dtype) { DType::F32 } else { tensor.dtype };
    drop(arena.workspace(bytes_of(inner, accumulator)));
    Ok(vec![made])
}

/// A sorted copy. Half-precision floats may be widened.
fn sort(arena: &Arena, call: Invocation<'_>) -> Made {
    let [tensor] = call.take()?;
    Ok(vec![sorted(arena, tensor)])
}

fn sorted(arena: &Arena, tensor: View) -> View {
    let tensor = tensor.to_contiguous(arena);
    let _wide = is_half(tensor.dtype)
        .then(|| arena.workspace_at_most(bytes_of(tensor.elements(), DType::F32)));
    let made = arena.tensor(tensor.shape(), tensor.dtype);
    let longest = tensor.shape().iter().copied().max().unwrap_or(0);
    drop(arena.workspace_at_most(bytes_of(longest, tensor.dtype)));
    made
}

/// A sorted copy and the 64-bit positions, plus pairs of both for each row that is being sorted:
/// the whole tensor if it has one dimension, otherwise one row per thread.
fn sort_with_indices(arena: &Arena, call: Invocation<'_>) -> Made {
    let cast = call.method.starts_with("float_").then(|| call.outputs.get(1).map(|out| out.dtype));
    let [tensor] = call.take()?;
    let contiguous = tensor.to_contiguous(arena);
    let values = sorted(arena, contiguous.clone());
    let indices = arena.tensor(tensor.shape(), INDEX);
    drop(pairs(arena, &tensor));
    drop((tensor, contiguous));
    Ok(vec![values, int_cast_to(arena, indices, cast.flatten().unwrap_or(INDEX))])
}

fn argsort(arena: &Arena, call: Invocation<'_>) -> Made {
    let cast = call.method.starts_with("float_");
    let out = call.output()?;
    let [tensor] = call.take()?;
    let contiguous = tensor.to_contiguous(arena);
    let _wide = is_half(tensor.dtype)
        .then(|| arena.workspace_at_most(bytes_of(tensor.elements(), DType::F32)));
    let indices = arena.tensor(tensor.shape(), INDEX);
    drop(pairs(arena, &tensor));
    drop((tensor, contiguous));
    Ok(vec![int_cast_to(arena, indices, if cast { out.dtype } else { INDEX })])
}

fn pairs(arena: &Arena, tensor: &View) -> impl Sized + use<> {
    let longest = tensor.shape().iter().copied().max().unwrap_or(0);
    let rows = if tensor.layout.rank() == 1 { 1 } else { arena.threads };
    arena.workspace_at_most((rows * longest * 16) as u64)
}

/// burn's default: sorts everything and selects the first values.
fn topk(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor] = call.take()?;
    let sorted = sorted(arena, tensor);
    let _positions =
        arena.workspace_at_most(16 * sorted.shape().iter().max().map_or(0, |k| *k as u64));
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}
