//! Reductions.

use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use burn_ir::{
    DimOpIr, NumericOperationIr, OperationIr, ReduceDimOpIr, ReduceDimWithIndicesOpIr, ReduceOpIr,
};
use burn_std::{DType, IntDType};

use crate::scenario::{Arg, Handle, Scenario};

pub fn sum_dim(s: &mut Scenario, x: Arg, dim: usize) -> Handle {
    let [handle] = s.call(
        "float_sum_dim",
        [x],
        |[x], new| {
            let op = ReduceDimOpIr::create(x, dim, 1, new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::SumDim(op))
        },
        |[x]| [Flex::float_sum_dim(x, dim)],
    );
    handle
}

fn mean_dim(s: &mut Scenario, x: Arg, dim: usize) -> Handle {
    let [handle] = s.call(
        "float_mean_dim",
        [x],
        |[x], new| {
            let op = ReduceDimOpIr::create(x, dim, 1, new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::MeanDim(op))
        },
        |[x]| [Flex::float_mean_dim(x, dim)],
    );
    handle
}

fn max_dim(s: &mut Scenario, x: Arg, dim: usize) -> Handle {
    let [handle] = s.call(
        "float_max_dim",
        [x],
        |[x], new| {
            let op = ReduceDimOpIr::create(x, dim, 1, new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::MaxDim(op))
        },
        |[x]| [Flex::float_max_dim(x, dim)],
    );
    handle
}

fn whole(
    s: &mut Scenario,
    name: &'static str,
    x: Arg,
    run: impl FnOnce(FlexTensor) -> FlexTensor,
) -> Handle {
    let [handle] = s.call(
        name,
        [x],
        |[x], new| {
            let op = ReduceOpIr::create(x, new);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::Sum(op))
        },
        |[x]| [run(x)],
    );
    handle
}

#[test]
fn whole_reductions_need_nothing() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 1024]);
    let t = s.transposed(x.keep());
    whole(&mut s, "float_sum", t.keep(), Flex::float_sum);
    whole(&mut s, "float_mean", t.keep(), Flex::float_mean);
    whole(&mut s, "float_max", t.last(), Flex::float_max);
    s.check();
}

#[test]
fn large_outputs_are_accumulated_beside() {
    let mut s = Scenario::new();
    let x = s.existing([4, 4, 512 * 512]);
    let first = sum_dim(&mut s, x.keep(), 0);
    sum_dim(&mut s, x.keep(), 1);
    mean_dim(&mut s, x.last(), 1);
    sum_dim(&mut s, first.last(), 0);
    s.check();
}

#[test]
fn the_last_dimension_is_summed_directly() {
    let mut s = Scenario::new();
    let x = s.existing([512, 1024, 4]);
    sum_dim(&mut s, x.keep(), 2);
    mean_dim(&mut s, x.last(), 2);
    s.check();
}

#[test]
fn transposed_tensors_of_three_dimensions_are_copied() {
    let mut s = Scenario::new();
    let x = s.existing([64, 128, 256]);
    let t = s.swapped(x.keep(), 0, 2);
    sum_dim(&mut s, t.last(), 2);
    let t = s.swapped(x.last(), 1, 2);
    sum_dim(&mut s, t.last(), 0);
    s.check();
}

#[test]
fn transposed_matrices_are_not() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    let t = s.transposed(x.keep());
    sum_dim(&mut s, t.keep(), 0);
    sum_dim(&mut s, t.last(), 1);
    s.check();
}

#[test]
fn extremes_copy_what_is_not_contiguous() {
    let mut s = Scenario::new();
    let x = s.existing([1024, 2048]);
    max_dim(&mut s, x.keep(), 0);
    let t = s.transposed(x.last());
    max_dim(&mut s, t.last(), 1);
    s.check();
}

#[test]
fn positions_are_wide_before_they_are_cast() {
    let mut s = Scenario::new();
    let x = s.existing([512, 1024, 4]);
    s.call(
        "float_argmax",
        [x.keep()],
        |[x], new| {
            let mut op = ReduceDimOpIr::create(x, 2, 1, new);
            op.out.dtype = DType::I32;
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::ArgMax(op))
        },
        |[x]| [Flex::float_argmax(x, 2, IntDType::I32)],
    );
    s.call(
        "float_max_dim_with_indices",
        [x.keep()],
        |[x], new| {
            let op = ReduceDimWithIndicesOpIr::create(x, 1, DType::I32, new);
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::MaxDimWithIndices(op))
        },
        |[x]| {
            let (values, indices) = Flex::float_max_dim_with_indices(x, 1, IntDType::I32);
            [values, indices]
        },
    );
    s.call(
        "float_argmax",
        [x.last()],
        |[x], new| {
            let mut op = ReduceDimOpIr::create(x, 0, 1, new);
            op.out.shape[0] = 1;
            op.out.dtype = DType::I32;
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::ArgMax(op))
        },
        |[x]| [Flex::float_argmax(x, 0, IntDType::I32)],
    );
    s.check();
}

#[test]
fn cumulative_sums_accumulate_beside() {
    let mut s = Scenario::new();
    let x = s.existing([4, 512, 1024]);
    let sum = |s: &mut Scenario, x: Arg, dim| {
        s.call(
            "float_cumsum",
            [x],
            |[x], new| {
                let op = DimOpIr::create(x, dim, new);
                OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::CumSum(op))
            },
            |[x]| [Flex::float_cumsum(x, dim)],
        )
    };
    sum(&mut s, x.keep(), 0);
    sum(&mut s, x.last(), 2);
    s.check();
}
