//! Rules for what Flex computes as a whole and other backends decompose: softmax, layer norm,
//! attention, transforms, deformable convolutions.

use burn_ir::ModuleOperationIr as Module;
use burn_std::DType;

use crate::arena::{Arena, View, bytes_of};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::gemm::{Product, Runs};
use crate::flex::reductions::is_half;
use crate::flex::views::swapped;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("softmax", softmax),
    ("layer_norm", layer_norm),
    ("attention", attention),
    ("rfft", transform),
    ("irfft", transform),
    ("deform_conv2d", deformable),
    ("deform_conv2d_backward", deformable),
];

/// Works on rows along the last dimension. Another dimension is swapped with it, copied, and
/// swapped back.
fn softmax(arena: &Arena, call: Invocation<'_>) -> Made {
    let dim = call.dim()?;
    let [tensor] = call.take()?;
    let last = tensor.layout.rank() - 1;
    let tensor = swapped(tensor, dim, last);
    let contiguous = tensor.to_contiguous(arena);
    let made = arena.tensor(contiguous.shape(), tensor.dtype);
    Ok(vec![swapped(made, dim, last)])
}

/// Contiguous copies of the inputs, and the output. Half-precision floats are widened and narrowed.
fn layer_norm(arena: &Arena, call: Invocation<'_>) -> Made {
    let out = call.output()?;
    let contiguous: Vec<View> =
        call.inputs.iter().map(|input| input.to_contiguous(arena)).collect();
    if !is_half(out.dtype) {
        return Ok(vec![arena.tensor(out.shape, out.dtype)]);
    }
    let wide: Vec<View> =
        contiguous.iter().map(|view| arena.tensor(view.shape(), DType::F32)).collect();
    let normed = arena.tensor(out.shape.clone(), DType::F32);
    drop(wide);
    let made = arena.tensor(out.shape, out.dtype);
    drop(normed);
    Ok(vec![made])
}

/// Contiguous copies of the inputs, the output, and the scores of one head: all of them for short
/// sequences, those of 64 keys at a time for long ones.
fn attention(arena: &Arena, call: Invocation<'_>) -> Made {
    const SHORT: usize = 256 * 1024;
    const KEYS: usize = 64;
    let (has_mask, out) = (
        call.module(|op| match op {
            Module::Attention(op) => Some(op.mask.is_some()),
            _ => None,
        })
        .unwrap_or(false),
        call.output()?,
    );
    let [query, key, value, ..] = call.inputs.as_slice() else { return Err(NoRule) };
    let (queries, keys) = (query.shape()[2], key.shape()[2]);
    let scores_shape = [query.shape()[0], query.shape()[1], queries, keys];
    let work = if is_half(out.dtype) { DType::F32 } else { out.dtype };
    let wide = |view: &View| {
        let contiguous = view.to_contiguous(arena);
        if view.dtype == work { contiguous } else { arena.tensor(view.shape(), work) }
    };
    let _operands = [wide(query), wide(key), wide(value)];
    let _scores_inputs: Vec<View> = call.inputs[3..]
        .iter()
        .enumerate()
        .map(|(i, view)| {
            let view = if i == 0 && has_mask { view.clone() } else { wide(view) };
            match view.shape()[2..] == scores_shape[2..] {
                true => view.to_contiguous(arena),
                false => view.expand(&scores_shape).to_contiguous(arena),
            }
        })
        .collect();
    let made = arena.tensor(out.shape.clone(), work);
    let scores = match queries * keys <= SHORT {
        true => queries * keys,
        false => queries * (KEYS + 2),
    };
    let product = Product {
        m: queries,
        n: keys.max(value.shape()[3]),
        k: keys.max(query.shape()[3]),
        lhs_stride: 1,
        rhs_stride: query.shape()[3] as isize,
        dtype: work,
    };
    product.keep_blocks(arena, Runs::WhereCalled);
    drop(arena.workspace_at_most(bytes_of(scores, work) + product.packed_bytes()));
    Ok(vec![if work == out.dtype { made } else { arena.tensor(out.shape, out.dtype) }])
}

/// Contiguous copies of the inputs, the outputs, and the outputs once more as the threads make
/// them.
fn transform(arena: &Arena, call: Invocation<'_>) -> Made {
    let _contiguous: Vec<View> =
        call.inputs.iter().map(|input| input.to_contiguous(arena)).collect();
    let wide = |dtype| if is_half(dtype) { DType::F32 } else { dtype };
    let _widened: Vec<View> = call
        .inputs
        .iter()
        .filter(|input| is_half(input.dtype))
        .map(|input| arena.tensor(input.shape(), DType::F32))
        .collect();
    let made: Vec<View> =
        call.outputs.iter().map(|out| arena.tensor(out.shape.clone(), wide(out.dtype))).collect();
    let longest = made.iter().flat_map(|view| view.shape()).copied().max().unwrap_or(0) as u64;
    let again: u64 = made.iter().map(View::bytes).sum();
    drop(arena.workspace_at_most(again + 64 * longest * arena.threads as u64));
    Ok(made
        .into_iter()
        .zip(call.outputs)
        .map(|(view, out)| match view.dtype == out.dtype {
            true => view,
            false => arena.tensor(out.shape, out.dtype),
        })
        .collect())
}

/// Contiguous copies of the inputs, the outputs twice, and one unrolled image per thread. Types
/// other than 32-bit floats are converted.
fn deformable(arena: &Arena, call: Invocation<'_>) -> Made {
    let _contiguous: Vec<View> =
        call.inputs.iter().map(|input| input.to_contiguous(arena)).collect();
    let _converted: Vec<View> = call
        .inputs
        .iter()
        .filter(|input| input.dtype != DType::F32)
        .map(|input| arena.tensor(input.shape(), DType::F32))
        .collect();
    let [x, offset, weight, ..] = call.inputs.as_slice() else { return Err(NoRule) };
    let positions: usize = offset.shape()[2..].iter().product();
    let kernel: usize = weight.shape()[1..].iter().product();
    let element = x.dtype.size().max(4) as u64;
    let image = element * (positions * (kernel + 2 * weight.shape()[0])) as u64;
    let outputs = crate::generic::fresh(arena, &call.outputs);
    let made: u64 = outputs.iter().map(|view| element * view.elements() as u64).sum();
    let images = arena.threads.min(x.shape()[0]) as u64;
    drop(arena.workspace_at_most(made + weight.bytes() + image * images));
    Ok(outputs)
}
