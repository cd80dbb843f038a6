//! Rules for pooling, interpolation and sampling: the output, and a contiguous copy of what is
//! read.

use burn_std::DType;

use crate::arena::{Arena, View};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::conv::widened;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("avg_pool1d", forward),
    ("avg_pool2d", forward),
    ("adaptive_avg_pool1d", forward),
    ("adaptive_avg_pool2d", forward),
    ("interpolate", forward),
    ("max_pool1d", max_pool),
    ("max_pool2d", max_pool),
    ("max_pool1d_with_indices", max_pool),
    ("max_pool2d_with_indices", max_pool),
    ("avg_pool1d_backward", backward),
    ("avg_pool2d_backward", backward),
    ("adaptive_avg_pool1d_backward", backward),
    ("adaptive_avg_pool2d_backward", backward),
    ("max_pool1d_with_indices_backward", backward),
    ("max_pool2d_with_indices_backward", backward),
    ("interpolate_backward", backward),
    ("float_grid_sample_2d", grid_sample),
];

/// The type in which pooling computes: 16-bit brain floats are widened.
fn working(dtype: DType) -> DType {
    if dtype == DType::BF16 { DType::F32 } else { dtype }
}

/// A contiguous copy of the input if it is not contiguous. Of 16-bit brain floats, a widened copy.
fn read(arena: &Arena, x: &View) -> View {
    if x.dtype == DType::BF16 { widened(arena, x) } else { x.to_contiguous(arena) }
}

/// The output in the type of the computation, then in its own type.
fn written(arena: &Arena, shape: Vec<usize>, dtype: DType) -> View {
    let made = arena.tensor(shape, working(dtype));
    if dtype == DType::BF16 { arena.tensor(made.shape(), dtype) } else { made }
}

fn forward(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [x] = call.take()?;
    let _read = read(arena, &x);
    Ok(vec![written(arena, out.shape, out.dtype)])
}

/// The maxima and their 64-bit positions, whether or not positions are requested.
fn max_pool(arena: &Arena, call: Invocation<'_>) -> Made {
    let keeps_indices = call.outputs.len() == 2;
    let out = call.output()?;
    let [x] = call.take()?;
    let _read = read(arena, &x);
    let maxima = arena.tensor(out.shape.clone(), working(out.dtype));
    let indices = arena.tensor(out.shape.clone(), DType::I64);
    let maxima = match out.dtype {
        DType::BF16 => arena.tensor(out.shape, DType::BF16),
        _ => maxima,
    };
    Ok(if keeps_indices { vec![maxima, indices] } else { vec![maxima] })
}

/// The gradient of the input, from that of the output and from the positions of the maxima.
fn backward(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let mut inputs = call.inputs.into_iter();
    let (Some(x), Some(grad)) = (inputs.next(), inputs.next()) else { return Err(NoRule) };
    let indices = inputs.next();
    // Only the input's shape is needed, but the backend's code makes it contiguous, or widens it.
    let _read = match x.layout.is_contiguous_from_start() && x.dtype != DType::BF16 {
        true => x.clone(),
        false => read(arena, &x),
    };
    let _grad = read(arena, &grad);
    let _indices = indices.as_ref().map(|indices| indices.to_contiguous(arena));
    Ok(vec![written(arena, out.shape, out.dtype)])
}

fn grid_sample(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let [tensor, grid] = call.take()?;
    let _read = [tensor.to_contiguous(arena), grid.to_contiguous(arena)];
    Ok(vec![arena.tensor(out.shape, out.dtype)])
}
