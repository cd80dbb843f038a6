//! What Flex computes as a whole: softmax, layer norm, attention.

use burn_backend::ops::{ActivationOps, AttentionModuleOptions, ModuleOps};
use burn_flex::Flex;
use burn_ir::{
    AttentionOpIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr,
    ReduceDimOpIr, UnaryOpIr,
};

use crate::scenario::{Arg, Handle, Scenario};
use crate::views::reshape;

fn softmax(s: &mut Scenario, x: Arg, dim: usize) -> Handle {
    let [handle] = s.call(
        "softmax",
        [x],
        |[x], new| {
            // The rule reads only the dimension of the decomposition.
            let mut op = ReduceDimOpIr::create(x, dim, 1, new);
            op.out.shape = op.input.shape.clone();
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::SumDim(op))
        },
        |[x]| [Flex::softmax(x, dim)],
    );
    handle
}

#[test]
fn softmax_makes_a_tensor() {
    let mut s = Scenario::new();
    let x = s.existing([64, 128, 256]);
    let y = softmax(&mut s, x.keep(), 2);
    let y = softmax(&mut s, y.last(), 1);
    reshape(&mut s, y.last(), [64 * 128 * 256]);
    s.check();
}

#[test]
fn layer_norm_makes_a_tensor() {
    let mut s = Scenario::new();
    let (x, gamma, beta) = (s.existing([64, 128, 256]), s.existing([256]), s.existing([256]));
    let x = s.swapped(x.last(), 0, 1);
    s.call(
        "layer_norm",
        [x.last(), gamma.keep(), beta.keep()],
        |[x, ..], new| {
            OperationIr::Float(x.dtype, FloatOperationIr::Exp(UnaryOpIr::create(x, new)))
        },
        |[x, gamma, beta]| [Flex::layer_norm(x, gamma, Some(beta), 1e-5)],
    );
    s.check();
}

#[test]
fn attention_keeps_the_scores_of_one_head() {
    for [queries, keys] in [[256, 256], [1024, 1024]] {
        let mut s = Scenario::new();
        let (q, k, v) = (
            s.existing([4, 8, queries, 64]),
            s.existing([4, 8, keys, 64]),
            s.existing([4, 8, keys, 64]),
        );
        let options = AttentionModuleOptions::default();
        s.call(
            "attention",
            [q.last(), k.last(), v.keep()],
            |[q, k, v], new| {
                let op = AttentionOpIr::create(q, k, v, None, None, options.into(), new);
                OperationIr::Module(ModuleOperationIr::Attention(op))
            },
            |[q, k, v]| [Flex::attention(q, k, v, None, None, options)],
        );
        s.check();
    }
}
