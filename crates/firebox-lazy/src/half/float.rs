//! Operations on float tensors: which type they compute in, and which they give.

use burn_backend::ops::{FloatTensorOps, GridSampleOptions};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{Backend, Distribution, ExecutionError, Scalar, TensorData, TensorMetadata};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use super::{Half, Narrow, as_is, cast, narrow, together, wide, widen};
use crate::ops::float::float_methods;

/// Computes in 32 bit, and stays there.
macro_rules! reduced {
    ($(fn $name:ident($first:ident: FloatTensor<Self> $(, $arg:ident: $ty:ty)*) -> FloatTensor<Self>;)*) => {$(
        fn $name($first: FloatTensor<Self> $(, $arg: $ty)*) -> FloatTensor<Self> {
            B::$name(widen::<B>($first) $(, $arg)*)
        }
    )*};
}

/// Computes in a common type. The result has the type of the larger tensor.
macro_rules! paired {
    ($(fn $name:ident($lhs:ident: FloatTensor<Self>, $rhs:ident: FloatTensor<Self> $(, $arg:ident: $ty:ty)*) -> FloatTensor<Self>;)*) => {$(
        fn $name($lhs: FloatTensor<Self>, $rhs: FloatTensor<Self> $(, $arg: $ty)*) -> FloatTensor<Self> {
            let ($lhs, $rhs, dtype) = together::<B>($lhs, $rhs);
            cast::<B>(B::$name($lhs, $rhs $(, $arg)*), dtype)
        }
    )*};
}

/// Compares in a common type.
macro_rules! compared {
    ($(fn $name:ident($lhs:ident: FloatTensor<Self>, $rhs:ident: FloatTensor<Self>, $out:ident: BoolDType) -> BoolTensor<Self>;)*) => {$(
        fn $name($lhs: FloatTensor<Self>, $rhs: FloatTensor<Self>, $out: BoolDType) -> BoolTensor<Self> {
            let ($lhs, $rhs, _) = together::<B>($lhs, $rhs);
            B::$name($lhs, $rhs, $out)
        }
    )*};
}

impl<B: Backend, E: Narrow> FloatTensorOps<Self> for Half<B, E> {
    fn float_into_data(
        tensor: FloatTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::float_into_data(tensor)
    }

    /// Sums of products, which need most of the time and of the memory.
    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        B::float_matmul(narrow::<B, E>(lhs), narrow::<B, E>(rhs))
    }

    fn float_powf(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let (lhs, rhs, dtype) = together::<B>(lhs, rhs);
        cast::<B>(B::float_powf(widen::<B>(lhs), widen::<B>(rhs)), dtype)
    }

    fn float_atan2(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let (lhs, rhs, dtype) = together::<B>(lhs, rhs);
        cast::<B>(B::float_atan2(widen::<B>(lhs), widen::<B>(rhs)), dtype)
    }

    fn float_mask_where(
        tensor: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (tensor, value, dtype) = together::<B>(tensor, value);
        cast::<B>(B::float_mask_where(tensor, mask, value), dtype)
    }

    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> {
        let first = tensors.first().map(TensorMetadata::dtype);
        let is_mixed = tensors.iter().any(|tensor| Some(tensor.dtype()) != first);
        match is_mixed {
            true => B::float_cat(tensors.into_iter().map(widen::<B>).collect(), dim),
            false => B::float_cat(tensors, dim),
        }
    }

    fn float_slice_assign(
        tensor: FloatTensor<Self>,
        slices: &[Slice],
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let value = cast::<B>(value, tensor.dtype());
        B::float_slice_assign(tensor, slices, value)
    }

    fn float_scatter_add(
        dim: usize,
        tensor: FloatTensor<Self>,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let (tensor, value) = (widen::<B>(tensor), widen::<B>(value));
        cast::<B>(B::float_scatter_add(dim, tensor, indices, value), dtype)
    }

    fn float_scatter_nd(
        data: FloatTensor<Self>,
        indices: IntTensor<Self>,
        values: FloatTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> FloatTensor<Self> {
        let dtype = data.dtype();
        let (data, values) = (widen::<B>(data), widen::<B>(values));
        cast::<B>(B::float_scatter_nd(data, indices, values, reduction), dtype)
    }

    fn float_select_add(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let (tensor, value) = (widen::<B>(tensor), widen::<B>(value));
        cast::<B>(B::float_select_add(tensor, dim, indices, value), dtype)
    }

    fn float_grid_sample_2d(
        tensor: FloatTensor<Self>,
        grid: FloatTensor<Self>,
        options: GridSampleOptions,
    ) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let (tensor, grid) = (widen::<B>(tensor), widen::<B>(grid));
        cast::<B>(B::float_grid_sample_2d(tensor, grid, options), dtype)
    }

    float_methods!(paired, compared, reduced, wide, as_is);

    as_is! {
        fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self>;
        fn float_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_device(tensor: &FloatTensor<Self>) -> Device<Self>;
        fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self>;
        fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self>;
        fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool;
        fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_sort(tensor: FloatTensor<Self>, dim: usize, descending: bool) -> FloatTensor<Self>;
        fn float_sort_with_indices(tensor: FloatTensor<Self>, dim: usize, descending: bool, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>);
        fn float_argsort(tensor: FloatTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self>;
    }
}
