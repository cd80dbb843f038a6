//! Gather, scatter, select, slice assignment, concatenation, embeddings.

use burn_backend::TensorData;
use burn_backend::ops::{FloatTensorOps, ModuleOps};
use burn_backend::tensor::IndexingUpdateOp;
use burn_flex::{Flex, FlexTensor};
use burn_ir::{
    BaseOperationIr, CatOpIr, EmbeddingBackwardOpIr, EmbeddingOpIr, GatherOpIr, ModuleOperationIr,
    OperationIr, RepeatDimOpIr, SelectAssignOpIr, SelectOpIr, SliceAssignOpIr, TensorId, TensorIr,
};
use burn_std::{Shape, Slice};

use crate::scenario::{Arg, Handle, Scenario};
use crate::views::{expand, slice};

fn indices(s: &mut Scenario, shape: &[usize], below: i32) -> Handle {
    let count: usize = shape.iter().product();
    let data: Vec<i32> = (0..count as i32).map(|i| i % below).collect();
    s.adopt(FlexTensor::from_data(TensorData::new(data, Shape::from(shape.to_vec()))))
}

fn assign(s: &mut Scenario, x: Arg, ranges: &[Slice], value: Arg) -> Handle {
    let [handle] = s.call(
        "float_slice_assign",
        [x, value],
        |[x, value], new| {
            let op = SliceAssignOpIr::create(x, ranges.to_vec(), value, new);
            OperationIr::BaseFloat(BaseOperationIr::SliceAssign(op))
        },
        |[x, value]| [Flex::float_slice_assign(x, ranges, value)],
    );
    handle
}

#[test]
fn assigning_copies_even_what_is_owned() {
    let mut s = Scenario::new();
    let (x, value, one) = (s.existing([1024, 2048]), s.existing([1024, 512]), s.existing([1, 1]));
    let columns = [Slice::new(0, None, 1), Slice::new(512, Some(1024), 1)];
    let y = assign(&mut s, x.keep(), &columns, value.keep());
    let y = assign(&mut s, y.last(), &columns, value.keep());
    let wide = expand(&mut s, one.keep(), [1024, 512]);
    let y = assign(&mut s, y.last(), &columns, wide.last());
    let t = s.transposed(value.last());
    let t = s.transposed(t.last());
    let part = slice(&mut s, t.last(), &[Slice::new(0, None, 1), Slice::new(0, Some(256), 1)]);
    let narrow = [Slice::new(0, None, 1), Slice::new(512, Some(768), 1)];
    assign(&mut s, y.last(), &narrow, part.last());
    s.check();
}

fn cat<const N: usize>(s: &mut Scenario, parts: [Arg; N], dim: usize) -> Handle {
    let [handle] = s.call(
        "float_cat",
        parts,
        |parts: [TensorIr; N], new| {
            OperationIr::BaseFloat(BaseOperationIr::Cat(CatOpIr::create(parts.to_vec(), dim, new)))
        },
        |parts| [Flex::float_cat(Vec::from(parts), dim)],
    );
    handle
}

#[test]
fn concatenation_copies_what_is_not_contiguous() {
    let mut s = Scenario::new();
    let (a, b) = (s.existing([1024, 1024]), s.existing([1024, 1024]));
    cat(&mut s, [a.keep(), b.keep()], 0);
    cat(&mut s, [a.keep(), b.keep()], 1);
    let a = s.transposed(a.last());
    let half = slice(&mut s, b.last(), &[Slice::new(0, None, 1), Slice::new(0, Some(512), 1)]);
    cat(&mut s, [a.last(), half.last()], 1);
    s.check();
}

#[test]
fn selecting_widens_the_positions() {
    let mut s = Scenario::new();
    let table = s.existing([4096, 64]);
    let rows = indices(&mut s, &[512 * 1024], 4096);
    let few = indices(&mut s, &[16384], 4096);
    let [_] = s.call(
        "float_select",
        [table.keep(), few.keep()],
        |[table, rows], new| {
            let op = SelectOpIr::create(table, 0, rows, new);
            OperationIr::BaseFloat(BaseOperationIr::Select(op))
        },
        |[table, rows]| [Flex::float_select(table, 0, rows)],
    );
    let narrow = slice(&mut s, table.last(), &[Slice::new(0, None, 1), Slice::new(0, Some(2), 1)]);
    let [picked] = s.call(
        "float_select",
        [narrow.keep(), rows.keep()],
        |[table, rows], new| {
            let op = SelectOpIr::create(table, 0, rows, new);
            OperationIr::BaseFloat(BaseOperationIr::Select(op))
        },
        |[table, rows]| [Flex::float_select(table, 0, rows)],
    );
    s.call(
        "float_select_add",
        [narrow.last(), rows.last(), picked.last()],
        |[table, rows, value], new| {
            let op = SelectAssignOpIr::create(table, 0, rows, value, IndexingUpdateOp::Add, new);
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op))
        },
        |[table, rows, value]| [Flex::float_select_add(table, 0, rows, value)],
    );
    s.check();
}

#[test]
fn gathering_widens_the_positions() {
    let mut s = Scenario::new();
    let x = s.existing([4096, 512]);
    let at = indices(&mut s, &[4096, 256], 512);
    s.call(
        "float_gather",
        [x.keep(), at.keep()],
        |[x, at], new| {
            let op = GatherOpIr::create(x, 1, at, new);
            OperationIr::BaseFloat(BaseOperationIr::Gather(op))
        },
        |[x, at]| [Flex::float_gather(1, x, at)],
    );
    s.check();
}

#[test]
fn repeating_copies() {
    let mut s = Scenario::new();
    let x = s.existing([256, 1024]);
    let x = s.transposed(x.last());
    s.call(
        "float_repeat_dim",
        [x.last()],
        |[x], new| {
            let op = RepeatDimOpIr::create(x, 0, 3, new);
            OperationIr::BaseFloat(BaseOperationIr::RepeatDim(op))
        },
        |[x]| [Flex::float_repeat_dim(x, 0, 3)],
    );
    s.check();
}

/// The rule for an embedding looks only at what the describing operations make, so any will do.
fn made(inputs: [TensorIr; 2], shape: [usize; 3], id: TensorId) -> OperationIr {
    let [weights, indices] = inputs;
    let out = TensorIr::uninit(id, Shape::new(shape), weights.dtype);
    let op = EmbeddingOpIr { weights, indices, out };
    OperationIr::Module(ModuleOperationIr::Embedding(op))
}

#[test]
fn embeddings() {
    let mut s = Scenario::new();
    let weights = s.existing([4096, 256]);
    let tokens = indices(&mut s, &[32, 512], 4096);
    let [y] = s.call(
        "embedding",
        [weights.keep(), tokens.keep()],
        |inputs, new| made(inputs, [32, 512, 256], new()),
        |[weights, tokens]| [Flex::embedding(weights, tokens)],
    );
    s.call(
        "embedding_backward",
        [weights.keep(), y.last(), tokens.last()],
        |[weights, out_grad, indices], new| {
            let out = TensorIr::uninit(new(), weights.shape.clone(), weights.dtype);
            let op = EmbeddingBackwardOpIr { weights, out_grad, indices, out };
            OperationIr::Module(ModuleOperationIr::EmbeddingBackward(op))
        },
        |[weights, grad, tokens]| [Flex::embedding_backward(weights, grad, tokens)],
    );
    s.check();
}
