//! Rules for gradients of convolutions: burn's defaults, which call convolutions with the operands'
//! roles exchanged.

use burn_std::Slice;

use crate::arena::{Arena, View};
use crate::call::{Invocation, Made, Rule};
use crate::flex::conv::{Window, conv, cropped};
use crate::flex::conv_transpose::conv_transpose;
use crate::flex::reductions::summed;
use crate::flex::views::swapped;

/// The methods of this group.
pub(crate) const RULES: &[(&str, Rule)] = &[
    ("conv1d_x_backward", conv_x),
    ("conv2d_x_backward", conv_x),
    ("conv3d_x_backward", conv_x),
    ("conv1d_weight_backward", conv_weight),
    ("conv2d_weight_backward", conv_weight),
    ("conv3d_weight_backward", conv_weight),
    ("conv1d_bias_backward", bias),
    ("conv2d_bias_backward", bias),
    ("conv3d_bias_backward", bias),
];

/// A transposed convolution of the output's gradient.
fn conv_x(arena: &Arena, call: Invocation<'_>) -> Made {
    let groups = Window::of(&call)?.groups;
    let shape = call.output()?.shape;
    let [_x, weight, grad] = call.take()?;
    Ok(vec![conv_transpose(arena, grad, weight, None, groups, &shape)])
}

/// A convolution of the input with the output's gradient as kernel, with batch and channels
/// exchanged. One per group.
fn conv_weight(arena: &Arena, call: Invocation<'_>) -> Made {
    let window = Window::of(&call)?;
    let shape = call.output()?.shape;
    let [x, weight, grad] = call.take()?;
    let exchanged = exchanged(&window);
    if window.groups == 1 {
        let made = conv(arena, swapped(x, 0, 1), swapped(grad, 0, 1), None, exchanged);
        return Ok(vec![cropped(swapped(made, 0, 1), &shape)]);
    }
    let made = arena.tensor_from_bytes(shape.clone(), weight.dtype);
    let (x, grad) = (swapped(x, 0, 1), swapped(grad, 0, 1));
    Ok(vec![by_groups(arena, made, x, grad, exchanged, window.groups)])
}

/// Exchanges stride and dilation.
fn exchanged(window: &Window) -> Window {
    Window { stride: window.dilation, dilation: window.stride, groups: 1, ..*window }
}

/// The gradients of the groups, one after the other, each written into a copy of the whole.
fn by_groups(
    arena: &Arena,
    mut made: View,
    x: View,
    grad: View,
    window: Window,
    groups: usize,
) -> View {
    let (inputs, outputs) = (made.shape()[1], made.shape()[0] / groups.max(1));
    let mut part_shape = made.shape().to_vec();
    part_shape[0] = outputs;
    for group in 0..groups {
        let x = rows(&x, group * inputs, inputs);
        let grad = rows(&grad, group * outputs, outputs);
        let part = swapped(conv(arena, x, grad, None, window), 0, 1);
        let part = cropped(part, &part_shape).to_contiguous(arena);
        let assigned = arena.tensor(made.shape(), made.dtype);
        drop(part);
        made = assigned;
    }
    made
}

/// A view of `count` rows.
fn rows(view: &View, start: usize, count: usize) -> View {
    let slice = Slice::new(start as isize, Some((start + count) as isize), 1);
    let (layout, _) = view.layout.slice(&[slice]);
    view.clone().with_layout(layout)
}

/// The sum of the output's gradient over everything but the channels. Copies the gradient, since
/// its dimensions are exchanged.
fn bias(arena: &Arena, call: Invocation<'_>) -> Made {
    let shape = call.output()?.shape;
    let [_x, _bias, grad] = call.take()?;
    let channels = grad.shape()[1];
    let elements = grad.elements();
    let grad = swapped(grad, 0, 1);
    let grad = grad.reshape(arena, &[channels, elements / channels.max(1)]);
    Ok(vec![summed(arena, grad, 1).reshape(arena, &shape)])
}
