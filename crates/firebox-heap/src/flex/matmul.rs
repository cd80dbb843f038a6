//! Rules for matrix products and linear layers.

use std::rc::Rc;

use burn_std::DType;

use crate::arena::{Arena, Buffer, View};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::elementwise::binary;
use crate::flex::gemm::{PARALLEL, Product, Runs};
use crate::flex::reductions::summed;
use crate::flex::views::swapped;
use crate::layout::broadcast;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("float_matmul", float_matmul),
    ("int_matmul", int_matmul),
    ("linear", linear),
    ("linear_x_backward", linear_x_backward),
    ("linear_weight_backward", linear_weight_backward),
    ("linear_bias_backward", linear_bias_backward),
];

/// The number of multiplications from which Flex shares the matrices of a batch among the threads.
const PARALLEL_BATCH: usize = 128 * 128 * 128;

fn float_matmul(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    Ok(vec![matmul(arena, lhs, rhs)])
}

/// The product of two float tensors. Transposed and broadcast operands are read in their layout.
/// 16-bit brain floats are widened.
pub(super) fn matmul(arena: &Arena, lhs: View, rhs: View) -> View {
    if lhs.dtype != DType::BF16 {
        return plain_matmul(arena, &lhs, &rhs);
    }
    let contiguous = [lhs.to_contiguous(arena), rhs.to_contiguous(arena)];
    let wide = contiguous.each_ref().map(|view| arena.tensor(view.shape(), DType::F32));
    let product = plain_matmul(arena, &wide[0], &wide[1]);
    drop(wide);
    arena.tensor(product.shape(), DType::BF16)
}

fn plain_matmul(arena: &Arena, lhs: &View, rhs: &View) -> View {
    let made = arena.tensor_from_bytes(product_shape(lhs, rhs), lhs.dtype);
    let _packed = packed(arena, lhs, rhs, made.elements());
    made
}

/// The shape of the product of two tensors.
fn product_shape(lhs: &View, rhs: &View) -> Vec<usize> {
    let (lhs, rhs) = (lhs.shape(), rhs.shape());
    let mut shape = broadcast(&lhs[..lhs.len() - 2], &rhs[..rhs.len() - 2]);
    shape.extend([lhs[lhs.len() - 2], rhs[rhs.len() - 1]]);
    shape
}

/// The workspace of the product: one packing, or one per thread if the matrices of the batch are
/// shared out.
fn packed(arena: &Arena, lhs: &View, rhs: &View, elements: usize) -> Rc<Buffer> {
    let rank = (lhs.layout.rank(), rhs.layout.rank());
    let product = Product {
        m: lhs.shape()[rank.0 - 2],
        n: rhs.shape()[rank.1 - 1],
        k: lhs.shape()[rank.0 - 1],
        lhs_stride: lhs.layout.strides[rank.0 - 1],
        rhs_stride: rhs.layout.strides[rank.1 - 1],
        dtype: lhs.dtype,
    };
    let batch = elements / (product.m * product.n).max(1);
    let work = batch.saturating_mul(product.work());
    let shared_out =
        batch > 1 && work >= PARALLEL_BATCH && (batch >= 4 || product.work() < PARALLEL);
    let (copies, runs) = match shared_out {
        true => (arena.threads.min(batch), Runs::InThePool),
        false => (1, Runs::WhereCalled),
    };
    product.keep_blocks(arena, runs);
    arena.workspace(copies as u64 * product.packed_bytes())
}

/// Contiguous operands. For 32-bit integers, the right one is transposed.
fn int_matmul(arena: &Arena, call: Invocation<'_>) -> Made {
    let [lhs, rhs] = call.take()?;
    let _lhs = lhs.to_contiguous(arena);
    let contiguous = rhs.to_contiguous(arena);
    let _transposed = (rhs.dtype == DType::I32).then(|| arena.workspace(contiguous.bytes()));
    Ok(vec![arena.tensor(product_shape(&lhs, &rhs), lhs.dtype)])
}

/// burn's default: a product and an addition.
fn linear(arena: &Arena, call: Invocation<'_>) -> Made {
    let mut inputs = call.inputs.into_iter();
    let (Some(x), Some(weight)) = (inputs.next(), inputs.next()) else {
        return Err(NoRule);
    };
    let rank = x.layout.rank();
    let weight = unsqueezed(arena, weight, rank);
    let made = matmul(arena, x, weight);
    Ok(vec![match inputs.next() {
        Some(bias) => {
            let bias = unsqueezed(arena, bias, rank);
            binary(arena, made, bias, true)
        }
        None => made,
    }])
}

fn linear_x_backward(arena: &Arena, call: Invocation<'_>) -> Made {
    let [weight, grad] = call.take()?;
    let weight = swapped(weight, 0, 1);
    let weight = unsqueezed(arena, weight, grad.layout.rank());
    Ok(vec![matmul(arena, grad, weight)])
}

fn linear_weight_backward(arena: &Arena, call: Invocation<'_>) -> Made {
    let [x, grad] = call.take()?;
    let rank = x.layout.rank();
    let mut made = matmul(arena, swapped(x, rank - 2, rank - 1), grad);
    if rank > 2 {
        for dim in 0..rank - 2 {
            made = summed(arena, made, dim);
        }
        let shape = made.shape()[rank - 2..].to_vec();
        made = made.reshape(arena, &shape);
    }
    Ok(vec![made])
}

fn linear_bias_backward(arena: &Arena, call: Invocation<'_>) -> Made {
    let [mut grad] = call.take()?;
    let rank = grad.layout.rank();
    for dim in 0..rank - 1 {
        grad = summed(arena, grad, dim);
    }
    let shape = [grad.shape()[rank - 1]];
    Ok(vec![grad.reshape(arena, &shape)])
}

/// Adds leading dimensions of size one, up to `rank`. Copies a tensor that is not contiguous, such
/// as a transposed weight.
fn unsqueezed(arena: &Arena, tensor: View, rank: usize) -> View {
    if tensor.layout.rank() >= rank {
        return tensor;
    }
    let mut shape = vec![1; rank - tensor.layout.rank()];
    shape.extend(tensor.shape());
    tensor.reshape(arena, &shape)
}
