//! Matrix products.

use burn_backend::ops::ModuleOps;
use burn_flex::Flex;
use burn_ir::{
    LinearBiasBackwardOpIr, LinearOpIr, LinearWeightBackwardOpIr, LinearXBackwardOpIr,
    ModuleOperationIr, OperationIr,
};

use crate::scenario::Scenario;

#[test]
fn plain_products() {
    for [m, k, n] in [[512, 512, 1024], [2048, 64, 512], [4096, 784, 1024], [4096, 1024, 10]] {
        let mut s = Scenario::new();
        let (x, w) = (s.existing([m, k]), s.existing([k, n]));
        s.matmul(x.last(), w.keep());
        s.check();
    }
}

#[test]
fn products_with_transposed_operands() {
    for [m, k, n] in [[1024, 2048, 512], [4096, 512, 1024], [784, 4096, 1024], [2048, 4096, 2048]] {
        let mut s = Scenario::new();
        let (x, w) = (s.existing([k, m]), s.existing([n, k]));
        let (x, w) = (s.transposed(x.keep()), s.transposed(w.keep()));
        s.matmul(x.last(), w.last());
        s.check();
    }
}

#[test]
fn wide_products_pack_their_left_operand() {
    let mut s = Scenario::new();
    let (x, w) = (s.existing([1024, 512]), s.existing([512, 8192]));
    s.matmul(x.last(), w.keep());
    s.check();
}

#[test]
fn products_of_batches() {
    for [b, m, k, n] in
        [[64, 128, 64, 128], [4, 512, 512, 512], [2, 1024, 512, 512], [128, 64, 256, 64]]
    {
        let mut s = Scenario::new();
        let (x, w) = (s.existing([b, m, k]), s.existing([b, n, k]));
        let w = s.transposed(w.keep());
        s.matmul(x.keep(), w.last());
        let (left, right) = (s.transposed(x.keep()), x);
        s.matmul(left.last(), right.last());
        s.check();
    }
}

#[test]
fn linear_layers() {
    let mut s = Scenario::new();
    let (x, weight, bias) =
        (s.existing([32, 128, 512]), s.existing([512, 1024]), s.existing([1024]));
    let [y] = s.call(
        "linear",
        [x.keep(), weight.keep(), bias.keep()],
        |[x, weight, bias], new| {
            let op = LinearOpIr::create(x, weight, Some(bias), new);
            OperationIr::Module(ModuleOperationIr::Linear(op))
        },
        |[x, weight, bias]| [Flex::linear(x, weight, Some(bias))],
    );
    s.call(
        "linear_bias_backward",
        [y.keep()],
        |[grad], new| {
            let op = LinearBiasBackwardOpIr::create(grad, new);
            OperationIr::Module(ModuleOperationIr::LinearBiasBackward(op))
        },
        |[grad]| [Flex::linear_bias_backward(grad)],
    );
    s.call(
        "linear_weight_backward",
        [x.last(), y.keep()],
        |[x, grad], new| {
            let op = LinearWeightBackwardOpIr::create(x, grad, new);
            OperationIr::Module(ModuleOperationIr::LinearWeightBackward(op))
        },
        |[x, grad]| [Flex::linear_weight_backward(x, grad)],
    );
    s.call(
        "linear_x_backward",
        [weight.keep(), y.last()],
        |[weight, grad], new| {
            let op = LinearXBackwardOpIr::create(weight, grad, new);
            OperationIr::Module(ModuleOperationIr::LinearXBackward(op))
        },
        |[weight, grad]| [Flex::linear_x_backward(weight, grad)],
    );
    s.check();
}
