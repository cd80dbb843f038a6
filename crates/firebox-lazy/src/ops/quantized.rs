//! Operations on quantized tensors. They run immediately and cannot be recorded.

use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{Backend, ExecutionError, Scalar, TensorData, TensorPrimitive};
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};

use crate::Lazy;
use crate::kind::Kind;
use crate::record::session;
use crate::tensor::LazyTensor;
use crate::threads::handover::InUse;
use crate::threads::streams::meet;
use crate::threads::streams::{on_stream, poll_on_stream};

/// Forwards methods to the backend. Inside a recording they panic.
macro_rules! eager {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            refuse_recording::<B>(stringify!($name));
            <$ret as Decorate<B>>::decorate(on_stream::<B, _>(|| {
                B::$name($(<$ty as Undecorate<B>>::undecorate($arg)),*)
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

/// An argument of a method on quantized tensors.
trait Undecorate<B: Backend> {
    type Plain;
    fn undecorate(self) -> Self::Plain;
}

impl<B: Backend, K: Kind<B>> Undecorate<B> for LazyTensor<B, K> {
    type Plain = K::Primitive;
    fn undecorate(self) -> Self::Plain {
        self.into_inner()
    }
}

impl<B: Backend, K: Kind<B>> Undecorate<B> for Vec<LazyTensor<B, K>> {
    type Plain = Vec<K::Primitive>;
    fn undecorate(self) -> Self::Plain {
        self.into_iter().map(LazyTensor::into_inner).collect()
    }
}

macro_rules! undecorated {
    ($($ty:ty),*) => {$(
        impl<B: Backend> Undecorate<B> for $ty {
            type Plain = Self;
            fn undecorate(self) -> Self {
                self
            }
        }
    )*};
}

undecorated!(
    bool,
    usize,
    Scalar,
    Shape,
    FloatDType,
    IntDType,
    BoolDType,
    &[usize],
    &[Slice],
    &QuantScheme
);

impl<B: Backend> Undecorate<B> for QuantizationParametersPrimitive<Lazy<B>> {
    type Plain = QuantizationParametersPrimitive<B>;
    fn undecorate(self) -> Self::Plain {
        QuantizationParametersPrimitive { scales: self.scales.into_inner() }
    }
}

impl<B: Backend> Undecorate<B> for TensorPrimitive<Lazy<B>> {
    type Plain = TensorPrimitive<B>;
    fn undecorate(self) -> Self::Plain {
        match self {
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(tensor.into_inner()),
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor.into_inner()),
        }
    }
}

/// A result of a method on quantized tensors.
trait Decorate<B: Backend> {
    type Plain;
    fn decorate(plain: Self::Plain) -> Self;
}

impl<B: Backend, K: Kind<B>> Decorate<B> for LazyTensor<B, K> {
    type Plain = K::Primitive;
    fn decorate(plain: Self::Plain) -> Self {
        Self::new(plain)
    }
}

impl<B: Backend, D1: Decorate<B>, D2: Decorate<B>> Decorate<B> for (D1, D2) {
    type Plain = (D1::Plain, D2::Plain);
    fn decorate(plain: Self::Plain) -> Self {
        (D1::decorate(plain.0), D2::decorate(plain.1))
    }
}

impl<B: Backend> Decorate<B> for TensorPrimitive<Lazy<B>> {
    type Plain = TensorPrimitive<B>;
    fn decorate(plain: Self::Plain) -> Self {
        match plain {
            TensorPrimitive::Float(tensor) => Self::Float(LazyTensor::new(tensor)),
            TensorPrimitive::QFloat(tensor) => Self::QFloat(LazyTensor::new(tensor)),
        }
    }
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

    fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool {
        B::q_is_require_grad(tensor.ready())
    }

    eager! {
        fn quantize(tensor: FloatTensor<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>) -> QuantizedTensor<Self>;
        fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self>;
        fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_transpose(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self>;
        fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self>;
        fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_repeat_dim(tensor: QuantizedTensor<Self>, dim: usize, times: usize) -> QuantizedTensor<Self>;
        fn q_add(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_add_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp_min(tensor: QuantizedTensor<Self>, min: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp_max(tensor: QuantizedTensor<Self>, max: Scalar) -> TensorPrimitive<Self>;
        fn q_clamp(tensor: QuantizedTensor<Self>, min: Scalar, max: Scalar) -> TensorPrimitive<Self>;
        fn q_sub(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_sub_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_mul(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_mul_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_div(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_div_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self>;
        fn q_neg(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_recip(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_sum(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_sum_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_prod(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_prod_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_mean(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_mean_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cumsum(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cumprod(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cummin(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_cummax(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self>;
        fn q_exp(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_log(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_log1p(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_powf(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_powi(lhs: QuantizedTensor<Self>, rhs: IntTensor<Self>) -> TensorPrimitive<Self>;
        fn q_powi_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self>;
        fn q_powf_scalar(tensor: QuantizedTensor<Self>, value: Scalar) -> TensorPrimitive<Self>;
        fn q_sqrt(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_cos(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_sin(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_tan(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_cosh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_sinh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_tanh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_erf(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self>;
        fn q_cat(tensors: Vec<QuantizedTensor<Self>>, dim: usize) -> QuantizedTensor<Self>;
        fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_argtopk(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_topk(tensor: QuantizedTensor<Self>, dim: usize, k: usize) -> QuantizedTensor<Self>;
        fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_max(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_max_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_min(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_min_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_max_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_abs_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_any(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_any_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self>;
        fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self>;
        fn q_sort_with_indices(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_argsort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self>;
    }
}
