//! Operations on quantized tensors. They run immediately and cannot be recorded.
//!
//! Passed on are those that burn requires of a backend, and those that one of its backends has of
//! its own. What burn composes of these for every backend, it composes for the decorator.

use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, ExecutionError, TensorData, TensorPrimitive};
use burn_std::{FloatDType, IntDType, Shape, Slice};

use crate::Lazy;
use crate::record::call::forms::{Argument, Returned};
use crate::record::session;
use crate::tensor::LazyTensor;
use crate::threads::handover::InUse;
use crate::threads::streams::{meet, on_stream, poll_on_stream};

/// Forwards methods to the backend. Inside a recording they panic.
macro_rules! eager {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            refuse_recording::<B>(stringify!($name));
            <$ret as Returned<B>>::wrap(on_stream::<B, _>(|| {
                B::$name($(<$ty as Argument<B>>::plain($arg)),*)
            }))
        }
    )*};
}

/// Panics inside a recording.
///
/// # Panics
///
/// If this thread is recording operations of `Lazy<B>`.
fn refuse_recording<B: Backend>(name: &str) {
    assert!(
        !session::records::<B>(),
        "`{name}` works on quantized tensors, which cannot be recorded: train without quantization, or quantize \
         outside of the recording"
    );
}

impl<B: Backend> QTensorOps<Self> for Lazy<B> {
    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> {
        refuse_recording::<B>("q_from_data");
        meet::<B>(device);
        LazyTensor::new(on_stream::<B, _>(|| B::q_from_data(data, device)))
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        let tensor = tensor.into_inner();
        poll_on_stream::<B, _>(InUse::take::<B>(), B::q_into_data(tensor)).await
    }

    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self> {
        refuse_recording::<B>("q_to_device");
        LazyTensor::new(on_stream::<B, _>(|| B::q_to_device(tensor.into_inner(), device)))
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        refuse_recording::<B>("quantize");
        LazyTensor::new(on_stream::<B, _>(|| {
            let scales = qparams.scales.into_inner();
            B::quantize(tensor.into_inner(), scheme, QuantizationParametersPrimitive { scales })
        }))
    }

    fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self> {
        refuse_recording::<B>("quantize_dynamic");
        LazyTensor::new(on_stream::<B, _>(|| B::quantize_dynamic(tensor.into_inner(), scheme)))
    }

    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        refuse_recording::<B>("q_matmul");
        let plain = |tensor: TensorPrimitive<Self>| match tensor {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.into_inner()),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor.into_inner()),
        };
        match on_stream::<B, _>(|| B::q_matmul(plain(lhs), plain(rhs))) {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(LazyTensor::new(tensor)),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(LazyTensor::new(tensor)),
        }
    }

    eager! {
        fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self>;
        fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self>;
        fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_max_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_min_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self>;
        fn q_sort_with_indices(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_argsort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self>;
    }
}
