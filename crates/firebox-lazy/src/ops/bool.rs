//! Operations on boolean tensors.

use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{Backend, ExecutionError, Scalar, TensorData, TensorMetadata};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use crate::Lazy;
use crate::kind::{Bool, Int};
use crate::ops::{create, forward, into_data, move_to};
use crate::record::call::{CallFrame, once};
use crate::record::session;
use crate::tensor::LazyTensor;
use crate::threads::deferred;
use crate::threads::handover::InUse;
use crate::threads::loaders::upload;
use crate::threads::streams::{on_stream, poll_on_stream};

/// The methods that are called on the backend, or recorded.
macro_rules! bool_methods {
    ($apply:ident) => {
        $apply! {
            fn bool_into_int(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self>;
            fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self>;
            fn bool_reshape(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self>;
            fn bool_slice(tensor: BoolTensor<Self>, slices: &[Slice]) -> BoolTensor<Self>;
            fn bool_slice_assign(tensor: BoolTensor<Self>, slices: &[Slice], value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_mask_where(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_mask_fill(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> BoolTensor<Self>;
            fn bool_gather(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>) -> BoolTensor<Self>;
            fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_select(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>) -> BoolTensor<Self>;
            fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_repeat_dim(tensor: BoolTensor<Self>, dim: usize, times: usize) -> BoolTensor<Self>;
            fn bool_cat(tensors: Vec<BoolTensor<Self>>, dim: usize) -> BoolTensor<Self>;
            fn bool_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_not_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self>;
            fn bool_not_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self>;
            fn bool_not(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_and(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_or(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_xor(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_transpose(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_swap_dims(tensor: BoolTensor<Self>, dim1: usize, dim2: usize) -> BoolTensor<Self>;
            fn bool_permute(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self>;
            fn bool_flip(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self>;
            fn bool_any(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_any_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self>;
            fn bool_all(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_all_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self>;
            fn bool_expand(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self>;
            fn bool_unfold(tensor: BoolTensor<Self>, dim: usize, size: usize, step: usize) -> BoolTensor<Self>;
        }
    };
}

pub(crate) use bool_methods;

impl<B: Backend> BoolTensorOps<Self> for Lazy<B> {
    fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self> {
        upload::<B, Bool>(data, device, "bool_from_data")
    }

    into_data!(bool_into_data, BoolTensor);

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self> {
        move_to!(bool_to_device: Bool, tensor, device)
    }

    /// Inside a recording the tensor is read, because the number of results depends on its values.
    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        let (eager, settled) = match session::records::<B>() {
            true => (None, Some(argwhere_now(tensor, out_dtype))),
            false => {
                let tensor = tensor.into_inner();
                let held = InUse::take::<B>();
                let found = on_stream::<B, _>(|| B::bool_argwhere(tensor, out_dtype));
                (Some(poll_on_stream::<B, _>(held, found)), None)
            }
        };
        async move {
            match (eager, settled) {
                (Some(indices), _) => deferred::on_host(indices.await),
                (None, Some(indices)) => indices,
                (None, None) => unreachable!("one of the two was chosen above"),
            }
        }
    }

    create! {
        Bool:
        fn bool_zeros(shape: Shape; device; dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_ones(shape: Shape; device; dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_empty(shape: Shape; device; dtype: BoolDType) -> BoolTensor<Self>;
    }

    bool_methods!(forward);
}

/// Reads `tensor` inside a recording and finds its non-zero elements immediately.
fn argwhere_now<B: Backend>(
    tensor: LazyTensor<B, Bool>,
    out_dtype: IntDType,
) -> LazyTensor<B, Int> {
    let primitive = session::read(tensor.clone()).unwrap_or_else(|| {
        session::with::<B, _>(|session| session.refuse_positions());
        unreachable!("it was refused")
    });
    let indices = burn_std::future::block_on(B::bool_argwhere(primitive, out_dtype));
    let mut frame = CallFrame::<B>::open("bool_argwhere");
    frame.input(tensor);
    let form = (indices.shape(), indices.dtype());
    frame.close_custom("", &[form], None, once::<B, LazyTensor<B, Int>>(move |_| indices))
}
