//! Operations of modules and activations: which type they compute in, and which they give.
//!
//! Gradients of parameters are in 32 bit, those of activations in the type of the activation.

use burn_backend::ops::{
    ActivationOps, AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices,
    MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps, UnfoldOptions,
};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, Scalar, TensorMetadata};

use super::{Half, Narrow, as_is, cast, narrow, wide, widen};

/// A layer in 16 bit: its output and the gradients of its inputs are in 16 bit, those of its
/// parameters in 32 bit.
macro_rules! layer {
    ($options:ty: $forward:ident, $x:ident($($x_arg:ident),*), $weight:ident, $bias:ident) => {
        fn $forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            options: $options,
        ) -> FloatTensor<Self> {
            B::$forward(narrow::<B, E>(x), narrow::<B, E>(weight), bias.map(narrow::<B, E>), options)
        }

        fn $x($($x_arg: FloatTensor<Self>,)* options: $options) -> FloatTensor<Self> {
            B::$x($(narrow::<B, E>($x_arg),)* options)
        }

        fn $weight(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
            options: $options,
        ) -> FloatTensor<Self> {
            let dtype = weight.dtype();
            let (x, weight, grad) = (narrow::<B, E>(x), narrow::<B, E>(weight), narrow::<B, E>(output_grad));
            cast::<B>(B::$weight(x, weight, grad, options), dtype)
        }

        fn $bias(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            B::$bias(x, bias, widen::<B>(output_grad))
        }
    };
}

/// A backward pass that computes in 32 bit. The gradient has the type of the first tensor.
macro_rules! wide_backward {
    ($(fn $name:ident($x:ident: FloatTensor<Self>, $grad:ident: FloatTensor<Self> $(, $arg:ident: $ty:ty)*) -> FloatTensor<Self>;)*) => {$(
        fn $name($x: FloatTensor<Self>, $grad: FloatTensor<Self> $(, $arg: $ty)*) -> FloatTensor<Self> {
            let dtype = $x.dtype();
            cast::<B>(B::$name(widen::<B>($x), widen::<B>($grad) $(, $arg)*), dtype)
        }
    )*};
}

impl<B: Backend, E: Narrow> ModuleOps<Self> for Half<B, E> {
    layer!(ConvOptions<1>: conv1d, conv1d_x_backward(x, weight, output_grad), conv1d_weight_backward, conv1d_bias_backward);
    layer!(ConvOptions<2>: conv2d, conv2d_x_backward(x, weight, output_grad), conv2d_weight_backward, conv2d_bias_backward);
    layer!(ConvOptions<3>: conv3d, conv3d_x_backward(x, weight, output_grad), conv3d_weight_backward, conv3d_bias_backward);
    layer!(ConvTransposeOptions<1>: conv_transpose1d, conv_transpose1d_x_backward(weight, output_grad), conv_transpose1d_weight_backward, conv_transpose1d_bias_backward);
    layer!(ConvTransposeOptions<2>: conv_transpose2d, conv_transpose2d_x_backward(weight, output_grad), conv_transpose2d_weight_backward, conv_transpose2d_bias_backward);
    layer!(ConvTransposeOptions<3>: conv_transpose3d, conv_transpose3d_x_backward(weight, output_grad), conv_transpose3d_weight_backward, conv_transpose3d_bias_backward);

    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        narrow::<B, E>(B::embedding(weights, indices))
    }

    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let output_grad = cast::<B>(output_grad, weights.dtype());
        B::embedding_backward(weights, output_grad, indices)
    }

    fn linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        B::linear(narrow::<B, E>(x), narrow::<B, E>(weight), bias.map(narrow::<B, E>))
    }

    fn linear_x_backward(
        weight: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        B::linear_x_backward(narrow::<B, E>(weight), narrow::<B, E>(output_grad))
    }

    fn linear_weight_backward(
        x: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        widen::<B>(B::linear_weight_backward(narrow::<B, E>(x), narrow::<B, E>(output_grad)))
    }

    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        B::linear_bias_backward(widen::<B>(output_grad))
    }

    fn deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        let (x, offset, weight) =
            (narrow::<B, E>(x), narrow::<B, E>(offset), narrow::<B, E>(weight));
        B::deform_conv2d(
            x,
            offset,
            weight,
            mask.map(narrow::<B, E>),
            bias.map(narrow::<B, E>),
            options,
        )
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let (mask, bias) = (mask.map(narrow::<B, E>), bias.map(narrow::<B, E>));
        let (x, offset, weight) =
            (narrow::<B, E>(x), narrow::<B, E>(offset), narrow::<B, E>(weight));
        let grad = narrow::<B, E>(output_grad);
        let grads = B::deform_conv2d_backward(x, offset, weight, mask, bias, grad, options);
        DeformConv2dBackward {
            x_grad: grads.x_grad,
            offset_grad: grads.offset_grad,
            weight_grad: widen::<B>(grads.weight_grad),
            mask_grad: grads.mask_grad,
            bias_grad: grads.bias_grad.map(widen::<B>),
        }
    }

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let pooled =
            B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool1dWithIndices { output: pooled.output, indices: pooled.indices }
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let grad = cast::<B>(output_grad, x.dtype());
        let of_x = B::max_pool1d_with_indices_backward(
            x,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            grad,
            indices,
        );
        MaxPool1dBackward { x_grad: of_x.x_grad }
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let pooled =
            B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
        MaxPool2dWithIndices { output: pooled.output, indices: pooled.indices }
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let grad = cast::<B>(output_grad, x.dtype());
        let of_x = B::max_pool2d_with_indices_backward(
            x,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            grad,
            indices,
        );
        MaxPool2dBackward { x_grad: of_x.x_grad }
    }

    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let (query, key, value) =
            (narrow::<B, E>(query), narrow::<B, E>(key), narrow::<B, E>(value));
        B::attention(query, key, value, mask, attn_bias.map(narrow::<B, E>), options)
    }

    fn layer_norm(
        tensor: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let (tensor, gamma) = (widen::<B>(tensor), widen::<B>(gamma));
        cast::<B>(B::layer_norm(tensor, gamma, beta.map(widen::<B>), epsilon), dtype)
    }

    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    fn ctc_loss(
        log_probs: FloatTensor<Self>,
        targets: IntTensor<Self>,
        input_lengths: IntTensor<Self>,
        target_lengths: IntTensor<Self>,
        blank: usize,
    ) -> FloatTensor<Self> {
        B::ctc_loss(widen::<B>(log_probs), targets, input_lengths, target_lengths, blank)
    }

    fn ctc_loss_backward(
        log_probs: FloatTensor<Self>,
        targets: IntTensor<Self>,
        input_lengths: IntTensor<Self>,
        target_lengths: IntTensor<Self>,
        grad_loss: FloatTensor<Self>,
        blank: usize,
    ) -> FloatTensor<Self> {
        let dtype = log_probs.dtype();
        let (log_probs, grad) = (widen::<B>(log_probs), widen::<B>(grad_loss));
        let grad =
            B::ctc_loss_backward(log_probs, targets, input_lengths, target_lengths, grad, blank);
        cast::<B>(grad, dtype)
    }

    fn rfft(
        signal: FloatTensor<Self>,
        dim: usize,
        n: Option<usize>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        B::rfft(widen::<B>(signal), dim, n)
    }

    fn irfft(
        spectrum_re: FloatTensor<Self>,
        spectrum_im: FloatTensor<Self>,
        dim: usize,
        n: Option<usize>,
    ) -> FloatTensor<Self> {
        B::irfft(widen::<B>(spectrum_re), widen::<B>(spectrum_im), dim, n)
    }

    wide! {
        fn avg_pool1d(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn avg_pool2d(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn adaptive_avg_pool2d(x: FloatTensor<Self>, output_size: [usize; 2]) -> FloatTensor<Self>;
        fn adaptive_avg_pool1d(x: FloatTensor<Self>, output_size: usize) -> FloatTensor<Self>;
        fn interpolate(x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self>;
    }

    wide_backward! {
        fn avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn adaptive_avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn adaptive_avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn interpolate_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self>;
    }

    as_is! {
        fn unfold4d(x: FloatTensor<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor<Self>;
        fn max_pool1d(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> FloatTensor<Self>;
        fn max_pool2d(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> FloatTensor<Self>;
    }
}

impl<B: Backend, E: Narrow> ActivationOps<Self> for Half<B, E> {
    fn relu_backward(output: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let grad = cast::<B>(grad, output.dtype());
        B::relu_backward(output, grad)
    }

    fn prelu(tensor: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        cast::<B>(B::prelu(widen::<B>(tensor), widen::<B>(alpha)), dtype)
    }

    as_is! {
        fn leaky_relu(tensor: FloatTensor<Self>, negative_slope: Scalar) -> FloatTensor<Self>;
        fn relu(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
    }

    wide! {
        fn gelu(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn sigmoid(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn hard_sigmoid(tensor: FloatTensor<Self>, alpha: Scalar, beta: Scalar) -> FloatTensor<Self>;
        fn log_sigmoid(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn log_softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn softmin(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
    }

    wide_backward! {
        fn gelu_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn sigmoid_backward(output: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn log_sigmoid_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
    }
}
