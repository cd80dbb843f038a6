//! Convolutions, their gradients, and pooling.

use burn_backend::ops::{ConvOptions, ConvTransposeOptions, ModuleOps};
use burn_flex::Flex;
use burn_ir::{
    AdaptiveAvgPool2dBackwardOpIr, AdaptiveAvgPool2dOpIr, AvgPool2dBackwardOpIr, AvgPool2dOpIr,
    Conv1dOpIr, Conv2dBiasBackwardOpIr, Conv2dOpIr, Conv2dWeightBackwardOpIr, Conv2dXBackwardOpIr,
    ConvTranspose2dOpIr, MaxPool2dOpIr, MaxPool2dWithIndicesBackwardOpIr, MaxPool2dWithIndicesOpIr,
    ModuleOperationIr, OperationIr,
};
use burn_std::DType;

use crate::scenario::{Arg, Handle, Scenario};

fn conv2d(s: &mut Scenario, [x, w, b]: [Arg; 3], options: ConvOptions<2>) -> Handle {
    let ir = options.clone();
    let [y] = s.call(
        "conv2d",
        [x, w, b],
        |[x, w, b], new| {
            let op = Conv2dOpIr::create(x, w, Some(b), ir.into(), new);
            OperationIr::Module(ModuleOperationIr::Conv2d(op))
        },
        |[x, w, b]| [Flex::conv2d(x, w, Some(b), options)],
    );
    y
}

/// A convolution, and the gradients of its bias, weight and input.
fn there_and_back(x: [usize; 4], w: [usize; 4], options: ConvOptions<2>) {
    let mut s = Scenario::new();
    let (x, w, b) = (s.existing(x), s.existing(w), s.existing([w[0]]));
    let grad = conv2d(&mut s, [x.keep(), w.keep(), b.keep()], options.clone());
    s.call(
        "conv2d_bias_backward",
        [x.keep(), b.keep(), grad.keep()],
        |[x, b, grad], new| {
            let op = Conv2dBiasBackwardOpIr::create(x, b, grad, new);
            OperationIr::Module(ModuleOperationIr::Conv2dBiasBackward(op))
        },
        |[x, b, grad]| [Flex::conv2d_bias_backward(x, b, grad)],
    );
    let ir = options.clone();
    let run = options.clone();
    s.call(
        "conv2d_weight_backward",
        [x.keep(), w.keep(), grad.keep()],
        |[x, w, grad], new| {
            let op = Conv2dWeightBackwardOpIr::create(x, w, grad, ir.into(), new);
            OperationIr::Module(ModuleOperationIr::Conv2dWeightBackward(op))
        },
        |[x, w, grad]| [Flex::conv2d_weight_backward(x, w, grad, run)],
    );
    let ir = options.clone();
    s.call(
        "conv2d_x_backward",
        [x.last(), w.keep(), grad.last()],
        |[x, w, grad], new| {
            let op = Conv2dXBackwardOpIr::create(x, w, grad, ir.into(), new);
            OperationIr::Module(ModuleOperationIr::Conv2dXBackward(op))
        },
        |[x, w, grad]| [Flex::conv2d_x_backward(x, w, grad, options)],
    );
    s.check();
}

fn same(padding: usize) -> ConvOptions<2> {
    ConvOptions::new([1, 1], [padding, padding], [1, 1], 1)
}

#[test]
fn a_middle_layer() {
    there_and_back([32, 32, 32, 32], [64, 32, 3, 3], same(1));
}

#[test]
fn a_wide_layer() {
    there_and_back([16, 128, 16, 16], [128, 128, 3, 3], same(1));
}

#[test]
fn a_first_layer() {
    there_and_back([32, 3, 64, 64], [32, 3, 3, 3], same(1));
}

#[test]
fn a_layer_of_few_channels() {
    there_and_back([64, 1, 64, 64], [8, 1, 3, 3], same(0));
}

#[test]
fn a_pointwise_layer() {
    there_and_back([16, 64, 32, 32], [128, 64, 1, 1], same(0));
}

#[test]
fn a_strided_layer() {
    there_and_back([32, 32, 32, 32], [64, 32, 3, 3], ConvOptions::new([2, 2], [1, 1], [1, 1], 1));
}

#[test]
fn a_depthwise_layer() {
    there_and_back([32, 32, 32, 32], [32, 1, 3, 3], ConvOptions::new([1, 1], [1, 1], [1, 1], 32));
}

#[test]
fn a_grouped_layer() {
    there_and_back([32, 32, 32, 32], [64, 8, 3, 3], ConvOptions::new([1, 1], [1, 1], [1, 1], 4));
}

#[test]
fn a_layer_with_a_large_kernel() {
    there_and_back([16, 16, 32, 32], [32, 16, 5, 5], same(2));
}

#[test]
fn a_convolution_over_one_dimension() {
    let options = ConvOptions::new([2], [1], [1], 1);
    let mut s = Scenario::new();
    let (x, w) = (s.existing([32, 64, 1024]), s.existing([128, 64, 3]));
    let ir = options.clone();
    s.call(
        "conv1d",
        [x.last(), w.keep()],
        |[x, w], new| {
            let op = Conv1dOpIr::create(x, w, None, ir.into(), new);
            OperationIr::Module(ModuleOperationIr::Conv1d(op))
        },
        |[x, w]| [Flex::conv1d(x, w, None, options)],
    );
    s.check();
}

#[test]
fn a_transposed_convolution() {
    let options = ConvTransposeOptions::new([2, 2], [1, 1], [1, 1], [1, 1], 1);
    let mut s = Scenario::new();
    let (x, w) = (s.existing([16, 64, 32, 32]), s.existing([64, 32, 3, 3]));
    let ir = options.clone();
    s.call(
        "conv_transpose2d",
        [x.last(), w.keep()],
        |[x, w], new| {
            let op = ConvTranspose2dOpIr::create(x, w, None, ir.into(), new);
            OperationIr::Module(ModuleOperationIr::ConvTranspose2d(op))
        },
        |[x, w]| [Flex::conv_transpose2d(x, w, None, options)],
    );
    s.check();
}

#[test]
fn maxima_keep_wide_positions() {
    let mut s = Scenario::new();
    let x = s.existing([32, 64, 32, 32]);
    let [y, at] = s.call(
        "max_pool2d_with_indices",
        [x.keep()],
        |[x], new| {
            let op = MaxPool2dWithIndicesOpIr::create(
                x,
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                false,
                DType::I64,
                new,
            );
            OperationIr::Module(ModuleOperationIr::MaxPool2dWithIndices(op))
        },
        |[x]| {
            let pooled = Flex::max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
            [pooled.output, pooled.indices]
        },
    );
    s.call(
        "max_pool2d_with_indices_backward",
        [x.keep(), y.last(), at.last()],
        |[x, grad, at], new| {
            let op = MaxPool2dWithIndicesBackwardOpIr::create(
                x,
                grad,
                at,
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                false,
                new,
            );
            OperationIr::Module(ModuleOperationIr::MaxPool2dWithIndicesBackward(op))
        },
        |[x, grad, at]| {
            let back = Flex::max_pool2d_with_indices_backward(
                x,
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                false,
                grad,
                at,
            );
            [back.x_grad]
        },
    );
    s.call(
        "max_pool2d",
        [x.last()],
        |[x], new| {
            let op = MaxPool2dOpIr::create(x, [2, 2], [2, 2], [0, 0], [1, 1], false, new);
            OperationIr::Module(ModuleOperationIr::MaxPool2d(op))
        },
        |[x]| [Flex::max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], false)],
    );
    s.check();
}

#[test]
fn averages() {
    let mut s = Scenario::new();
    let x = s.existing([32, 64, 32, 32]);
    let [y] = s.call(
        "avg_pool2d",
        [x.keep()],
        |[x], new| {
            let op = AvgPool2dOpIr::create(x, [2, 2], [2, 2], [0, 0], true, false, new);
            OperationIr::Module(ModuleOperationIr::AvgPool2d(op))
        },
        |[x]| [Flex::avg_pool2d(x, [2, 2], [2, 2], [0, 0], true, false)],
    );
    s.call(
        "avg_pool2d_backward",
        [x.keep(), y.last()],
        |[x, grad], new| {
            let op =
                AvgPool2dBackwardOpIr::create(x, grad, [2, 2], [2, 2], [0, 0], true, false, new);
            OperationIr::Module(ModuleOperationIr::AvgPool2dBackward(op))
        },
        |[x, grad]| [Flex::avg_pool2d_backward(x, grad, [2, 2], [2, 2], [0, 0], true, false)],
    );
    let [y] = s.call(
        "adaptive_avg_pool2d",
        [x.keep()],
        |[x], new| {
            let op = AdaptiveAvgPool2dOpIr::create(x, [16, 16], new);
            OperationIr::Module(ModuleOperationIr::AdaptiveAvgPool2d(op))
        },
        |[x]| [Flex::adaptive_avg_pool2d(x, [16, 16])],
    );
    s.call(
        "adaptive_avg_pool2d_backward",
        [x.last(), y.last()],
        |[x, grad], new| {
            let op = AdaptiveAvgPool2dBackwardOpIr::create(x, grad, new);
            OperationIr::Module(ModuleOperationIr::AdaptiveAvgPool2dBackward(op))
        },
        |[x, grad]| [Flex::adaptive_avg_pool2d_backward(x, grad)],
    );
    s.check();
}
