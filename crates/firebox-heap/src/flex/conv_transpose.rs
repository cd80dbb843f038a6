//! Rules for transposed convolutions: one buffer of unrolled columns for the whole call.

use burn_ir::ModuleOperationIr as Module;
use burn_std::DType;

use crate::arena::{Arena, View, bytes_of};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::conv::{spatial, widened};
use crate::flex::gemm::{Product, Runs};

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("conv_transpose1d", transposed_convolution),
    ("conv_transpose2d", transposed_convolution),
    ("conv_transpose3d", transposed_convolution),
];

fn transposed_convolution(arena: &Arena, call: Invocation<'_>) -> Made {
    let groups = call.module(|op| match op {
        Module::ConvTranspose1d(op) => Some(op.options.groups),
        Module::ConvTranspose2d(op) => Some(op.options.groups),
        Module::ConvTranspose3d(op) => Some(op.options.groups),
        _ => None,
    })?;
    let shape = call.output()?.shape;
    let mut inputs = call.inputs.into_iter();
    let (Some(x), Some(weight)) = (inputs.next(), inputs.next()) else { return Err(NoRule) };
    Ok(vec![conv_transpose(arena, x, weight, inputs.next(), groups, &shape)])
}

/// A transposed convolution that makes a tensor of `shape`.
pub(super) fn conv_transpose(
    arena: &Arena,
    x: View,
    weight: View,
    bias: Option<View>,
    groups: usize,
    shape: &[usize],
) -> View {
    if x.dtype == DType::BF16 {
        let x = widened(arena, &x);
        let weight = widened(arena, &weight);
        let bias = bias.map(|bias| widened(arena, &bias));
        let made = conv_transpose(arena, x, weight, bias, groups, shape);
        return arena.tensor(made.shape(), DType::BF16);
    }
    let spatial_x = spatial(arena, &x).to_contiguous(arena);
    let spatial_weight = spatial(arena, &weight).to_contiguous(arena);
    let made = arena.tensor(shape, x.dtype);
    let product = Product {
        m: spatial_weight.shape()[1..].iter().product(),
        n: spatial_x.shape()[2..].iter().product(),
        k: spatial_x.shape()[1] / groups.max(1),
        lhs_stride: spatial_weight.shape()[1..].iter().product::<usize>() as isize,
        rhs_stride: 1,
        dtype: x.dtype,
    };
    let _columns = arena.workspace(bytes_of(product.m * product.n, x.dtype));
    product.keep_blocks(arena, Runs::WhereCalled);
    drop(arena.workspace(product.packed_bytes()));
    let _bias = bias.map(|bias| bias.to_contiguous(arena));
    made
}
