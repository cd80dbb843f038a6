//! Rules for convolutions. Each becomes a three-dimensional convolution, unrolled tile by tile
//! unless a shortcut applies.

use std::rc::Rc;

use burn_ir::ModuleOperationIr as Module;
use burn_std::{DType, Slice};

use crate::arena::{Arena, Buffer, View, bytes_of};
use crate::call::{Invocation, Made, NoRule, Rule};
use crate::flex::gemm::{PARALLEL, Product, Runs};
use crate::layout::Layout;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("conv1d", convolution),
    ("conv2d", convolution),
    ("conv3d", convolution),
    ("unfold4d", unfold4d),
];

/// Stride, padding and dilation of a convolution over depth, height and width, and its groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) stride: [usize; 3],
    pub(super) padding: [usize; 3],
    pub(super) dilation: [usize; 3],
    pub(super) groups: usize,
}

impl Window {
    /// The window of the convolution, or of the one whose gradient is computed.
    pub(super) fn of(call: &Invocation<'_>) -> Result<Self, NoRule> {
        macro_rules! of_any {
            ($($variant:ident)*) => {
                call.module(|op| match op {
                    $(Module::$variant(op) => {
                        let o = &op.options;
                        Some(Self::new(&o.stride, &o.padding, &o.dilation, o.groups))
                    })*
                    _ => None,
                })
            };
        }
        of_any! {
            Conv1d Conv1dXBackward Conv1dWeightBackward
            Conv2d Conv2dXBackward Conv2dWeightBackward
            Conv3d Conv3dXBackward Conv3dWeightBackward
        }
    }

    /// The window of a convolution over fewer dimensions. The missing ones have size one.
    fn new(stride: &[usize], padding: &[usize], dilation: &[usize], groups: usize) -> Self {
        let pad = |values: &[usize], missing: usize| {
            let mut all = [missing; 3];
            all[3 - values.len()..].copy_from_slice(values);
            all
        };
        Self {
            stride: pad(stride, 1),
            padding: pad(padding, 0),
            dilation: pad(dilation, 1),
            groups,
        }
    }

    /// The spatial size of the output.
    fn output(&self, input: &[usize], kernel: &[usize]) -> Vec<usize> {
        (0..3)
            .map(|dim| {
                let span = self.dilation[dim] * (kernel[dim] - 1) + 1;
                (input[dim] + 2 * self.padding[dim]).saturating_sub(span) / self.stride[dim] + 1
            })
            .collect()
    }
}

fn convolution(arena: &Arena, call: Invocation<'_>) -> Made {
    let window = Window::of(&call)?;
    let mut inputs = call.inputs.into_iter();
    let (Some(x), Some(weight)) = (inputs.next(), inputs.next()) else { return Err(NoRule) };
    Ok(vec![conv(arena, x, weight, inputs.next(), window)])
}

/// A convolution over one to three dimensions.
pub(super) fn conv(
    arena: &Arena,
    x: View,
    weight: View,
    bias: Option<View>,
    window: Window,
) -> View {
    if x.dtype == DType::BF16 {
        let x = widened(arena, &x);
        let weight = widened(arena, &weight);
        let bias = bias.map(|bias| widened(arena, &bias));
        let made = conv(arena, x, weight, bias, window);
        return arena.tensor(made.shape(), DType::BF16);
    }
    let rank = x.layout.rank();
    let made = conv3d(arena, spatial(arena, &x), spatial(arena, &weight), bias, window);
    let mut shape = made.shape().to_vec();
    shape.drain(2..2 + (5 - rank));
    made.reshape(arena, &shape)
}

/// A copy as 32-bit floats.
pub(super) fn widened(arena: &Arena, tensor: &View) -> View {
    let contiguous = tensor.to_contiguous(arena);
    arena.tensor(contiguous.shape(), DType::F32)
}

/// The tensor with three spatial dimensions.
pub(super) fn spatial(arena: &Arena, tensor: &View) -> View {
    let mut shape = tensor.shape().to_vec();
    while shape.len() < 5 {
        shape.insert(2, 1);
    }
    tensor.reshape(arena, &shape)
}

fn conv3d(arena: &Arena, x: View, weight: View, bias: Option<View>, window: Window) -> View {
    let x = x.to_contiguous(arena);
    let weight = weight.to_contiguous(arena);
    let spatial = window.output(&x.shape()[2..], &weight.shape()[2..]);
    let mut shape = vec![x.shape()[0], weight.shape()[0]];
    shape.extend(&spatial);
    let shortcut = Shortcut::of(x.shape(), weight.shape(), &window, x.dtype);
    let unrolled = shortcut.is_none().then(|| {
        let flat_weight = arena.workspace(weight.bytes());
        let channels_last = arena.workspace(x.bytes());
        (flat_weight, channels_last)
    });
    let made = arena.tensor(shape, x.dtype);
    drop(match shortcut {
        Some(shortcut) => shortcut.workspace(arena, x.shape(), weight.shape(), &spatial, x.dtype),
        None => tiles(arena, x.shape(), weight.shape(), &spatial, window.groups, x.dtype),
    });
    let _bias = bias.map(|bias| bias.to_contiguous(arena));
    drop(unrolled);
    made
}

/// A convolution that is not unrolled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shortcut {
    /// A kernel of one element: one product per image and group.
    Pointwise,
    /// Few channels, or one per group: computed element by element.
    Planes,
    /// A short kernel over one dimension: one product per image and kernel position.
    Direct,
}

impl Shortcut {
    fn of(x: &[usize], weight: &[usize], window: &Window, dtype: DType) -> Option<Self> {
        let flat = weight[2] == 1
            && x[2] == 1
            && window.stride[0] == 1
            && window.padding[0] == 0
            && window.dilation[0] == 1;
        let depthwise = weight[1] == 1 && window.groups == x[1] && weight[0] == x[1];
        let few = window.groups == 1 && (1..=4).contains(&x[1]) && (1..=16).contains(&weight[0]);
        if weight[2..] == [1, 1, 1] && window.stride == [1; 3] && window.padding == [0; 3] {
            Some(Self::Pointwise)
        } else if flat && (depthwise || few) {
            Some(Self::Planes)
        } else if dtype != DType::F16 && Self::is_direct(x, weight, window) {
            Some(Self::Direct)
        } else {
            None
        }
    }

    fn is_direct(x: &[usize], weight: &[usize], window: &Window) -> bool {
        window.groups == 1
            && window.padding == [0; 3]
            && window.dilation == [1; 3]
            && weight[2..4] == [1, 1]
            && x[2..4] == [1, 1]
            && x[1] >= 32
            && weight[4] <= 8
            && window.output(&x[2..], &weight[2..])[2] <= 800
    }

    /// What the products pack, for each image that is computed at the same time.
    fn workspace(
        self,
        arena: &Arena,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
        dtype: DType,
    ) -> Rc<Buffer> {
        let groups = (x[1] / weight[1].max(1)).max(1);
        let product = Product {
            m: weight[0] / groups,
            n: output.iter().product(),
            k: weight[1],
            lhs_stride: if self == Self::Direct { weight[4] as isize } else { 1 },
            rhs_stride: 1,
            dtype,
        };
        if self == Self::Planes {
            return arena.workspace(0);
        }
        product.keep_blocks(arena, Runs::InThePool);
        let packed = product.packed_bytes();
        arena.workspace_at_most(packed * in_flight(arena, x[0], &product))
    }
}

/// The tiles that are unrolled at the same time. Each has the unrolled input, its product with the
/// weight, and what the product packs.
fn tiles(
    arena: &Arena,
    x: &[usize],
    weight: &[usize],
    output: &[usize],
    groups: usize,
    dtype: DType,
) -> Rc<Buffer> {
    const TILE: usize = 512;
    let positions: usize = output.iter().product();
    let product = Product {
        m: weight[0] / groups.max(1),
        n: positions.min(TILE),
        k: weight[1..].iter().product(),
        lhs_stride: 1,
        rhs_stride: weight[1..].iter().product::<usize>() as isize,
        dtype,
    };
    product.keep_blocks(arena, Runs::InThePool);
    let tile = bytes_of((product.k + product.m) * product.n, dtype) + product.packed_bytes();
    let tiles = x[0] * positions.div_ceil(TILE);
    arena.workspace_at_most(tile * in_flight(arena, tiles, &product))
}

/// How many of `tasks` products are computed at the same time.
///
/// Normally one per thread. A product that is itself shared among the threads makes its thread
/// wait, and a waiting thread begins another one. Then it is two per thread, by measurement.
fn in_flight(arena: &Arena, tasks: usize, product: &Product) -> u64 {
    let per_thread = if product.work() >= PARALLEL { 2 } else { 1 };
    tasks.min(per_thread * arena.threads) as u64
}

/// burn's default: a convolution with a weight of zeros and ones.
fn unfold4d(arena: &Arena, call: Invocation<'_>) -> Made {
    let window = Window::of(&call)?;
    let weight = call.module(|op| match op {
        Module::Conv2d(op) => Some(op.weight.shape.to_vec()),
        _ => None,
    })?;
    let out = call.output()?;
    let [x] = call.take()?;
    let weight = arena.tensor(weight, x.dtype);
    Ok(vec![conv(arena, x, weight, None, window).with_layout(Layout::contiguous(out.shape))])
}

/// The first `shape` of a gradient that came out larger.
pub(super) fn cropped(made: View, shape: &[usize]) -> View {
    if made.shape() == shape {
        return made;
    }
    let slices: Vec<Slice> =
        shape.iter().map(|size| Slice::new(0, Some(*size as isize), 1)).collect();
    let (layout, _) = made.layout.slice(&slices);
    made.with_layout(layout)
}
