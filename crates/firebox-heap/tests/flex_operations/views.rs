//! Views and copies.

use burn_backend::ops::FloatTensorOps;
use burn_flex::Flex;
use burn_ir::{BaseOperationIr, OperationIr, PermuteOpIr, ShapeOpIr, SliceOpIr};
use burn_std::{Shape, Slice};

use crate::scenario::{Arg, Handle, Scenario};

pub fn reshape<const N: usize>(s: &mut Scenario, x: Arg, shape: [usize; N]) -> Handle {
    let shape = Shape::new(shape);
    let out = shape.clone();
    let [handle] = s.call(
        "float_reshape",
        [x],
        |[x], new| {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr::reshape(x, out, new)))
        },
        |[x]| [Flex::float_reshape(x, shape)],
    );
    handle
}

pub fn slice(s: &mut Scenario, x: Arg, ranges: &[Slice]) -> Handle {
    let [handle] = s.call(
        "float_slice",
        [x],
        |[x], new| {
            let op = SliceOpIr::create(x, ranges.to_vec(), new);
            OperationIr::BaseFloat(BaseOperationIr::Slice(op))
        },
        |[x]| [Flex::float_slice(x, ranges)],
    );
    handle
}

pub fn expand<const N: usize>(s: &mut Scenario, x: Arg, shape: [usize; N]) -> Handle {
    let shape = Shape::new(shape);
    let out = shape.clone();
    let [handle] = s.call(
        "float_expand",
        [x],
        |[x], new| OperationIr::BaseFloat(BaseOperationIr::Expand(ShapeOpIr::expand(x, out, new))),
        |[x]| [Flex::float_expand(x, shape)],
    );
    handle
}

pub fn permute<const N: usize>(s: &mut Scenario, x: Arg, axes: [usize; N]) -> Handle {
    let [handle] = s.call(
        "float_permute",
        [x],
        |[x], new| {
            let op = PermuteOpIr::create(x, axes.to_vec(), new);
            OperationIr::BaseFloat(BaseOperationIr::Permute(op))
        },
        |[x]| [Flex::float_permute(x, &axes)],
    );
    handle
}

#[test]
fn a_reshape_of_a_contiguous_tensor_is_free() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 1024]);
    let y = reshape(&mut s, x.keep(), [512, 2048]);
    reshape(&mut s, y.last(), [1024 * 1024]);
    s.check();
}

#[test]
fn a_reshape_of_a_transposed_tensor_copies() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 1024]);
    let y = s.transposed(x.last());
    reshape(&mut s, y.last(), [1024 * 1024]);
    s.check();
}

#[test]
fn multi_head_attention_shuffles() {
    let mut s = Scenario::new();
    let x = s.existing([16, 128, 512]);
    let heads = reshape(&mut s, x.keep(), [16, 128, 8, 64]);
    let heads = s.swapped(heads.last(), 1, 2);
    let flat = s.swapped(heads.last(), 1, 2);
    reshape(&mut s, flat.last(), [16, 128, 512]);
    s.check();
}

#[test]
fn merging_heads_copies() {
    let mut s = Scenario::new();
    let x = s.existing([16, 8, 128, 64]);
    let flat = permute(&mut s, x.last(), [0, 2, 1, 3]);
    reshape(&mut s, flat.last(), [16, 128, 512]);
    s.check();
}

#[test]
fn slices_share_until_their_steps_are_negative() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    let half = slice(&mut s, x.keep(), &[Slice::new(0, Some(512), 1)]);
    let columns =
        slice(&mut s, half.last(), &[Slice::new(0, None, 1), Slice::new(0, Some(1024), 2)]);
    reshape(&mut s, columns.last(), [512 * 512]);
    slice(&mut s, x.last(), &[Slice::new(0, None, -1)]);
    s.check();
}

#[test]
fn broadcasting_is_free_until_it_is_materialized() {
    let mut s = Scenario::new();
    let x = s.existing([1, 2048]);
    let y = expand(&mut s, x.keep(), [512, 2048]);
    reshape(&mut s, y.last(), [512 * 2048]);
    s.check();
}
