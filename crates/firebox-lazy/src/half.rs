//! A decorator that computes in 16 bit where that is accurate enough. Its tensors are those of the
//! backend below it, so whatever records or plans there sees what runs.
//!
//! Rules for float tensors are in `half/float.rs` and `half/module.rs`. Everything else is passed
//! on in `half/rest.rs`.

mod float;
mod module;
mod rest;

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use burn_backend::backend::BackendTypes;
use burn_backend::{Backend, DType, DTypeUsageSet, ExecutionError, TensorData, TensorMetadata};
use burn_std::{bf16, f16};

use crate::backend::LazyBackend;
use crate::kind::{Bool, Float, Int};
use crate::tensor::LazyTensor;

/// A backend that computes in 16 bit where that is accurate enough. Parameters, their gradients and
/// the optimizer's state stay in 32 bit.
///
/// Use it between `Autodiff` and [`Lazy`](crate::Lazy): `Autodiff<Half<Lazy<Flex>>>`. A model needs
/// no change. What is kept for the backward pass takes about half the memory.
///
/// By default, 16 bit are brain floats, which have the range of 32 bit. `Half<Lazy<Flex>, f16>`
/// computes in half floats, for devices that have no others, such as NVIDIA's before compute
/// capability 8.0. They hold nothing above 65,504, and gradients vanish in them: the loss must be
/// scaled, as `firebox::scale_loss` does.
///
/// - Products, convolutions, attention and embeddings take and give 16 bit.
/// - Sums and means are computed in 32 bit, and stay so. Losses are thereby in 32 bit.
/// - Exponentials, logarithms, roots, softmax and norms are computed in 32 bit, and give the type
///   of their operand.
/// - An operation on tensors of both types is computed in 32 bit. It gives the type of the larger
///   operand, or 32 bit if they are equally large: a scale in 32 bit does not widen an activation,
///   and a sum of gradients is in 32 bit. A batch of one item may be as large as a parameter that
///   it meets, and is in 32 bit from there on.
/// - The optimizer steps in 32 bit.
/// - All else gives the type of its operand.
/// - 64-bit tensors stay as they are.
///
/// Values that a program reads may be in 16 bit: convert them, as in
/// `into_data().convert::<f32>()`.
/// The backend must have the type on the device. NVIDIA's cards have brain floats in hardware from
/// compute capability 8.0 on, half floats from 5.3 on.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::{DType, Tensor};
/// use firebox_lazy::{Half, Lazy};
///
/// let x = Tensor::<Half<Lazy<Flex>>, 2>::ones([4, 4], &Default::default());
/// assert_eq!(x.dtype(), DType::F32);
/// let product = x.clone().matmul(x);
/// assert_eq!(product.dtype(), DType::BF16);
/// assert_eq!(product.sum().dtype(), DType::F32);
/// ```
pub struct Half<B, E = bf16>(PhantomData<fn() -> (B, E)>);

/// A type of 16 bit: brain floats or half floats.
pub trait Narrow: sealed::Sealed + Send + Sync + 'static {
    /// The type of tensors.
    const DTYPE: DType;
}

impl Narrow for bf16 {
    const DTYPE: DType = DType::BF16;
}

impl Narrow for f16 {
    const DTYPE: DType = DType::F16;
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for burn_std::bf16 {}
    impl Sealed for burn_std::f16 {}
}

impl<B, E> Clone for Half<B, E> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<B, E> Default for Half<B, E> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<B, E> fmt::Debug for Half<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Half")
    }
}

impl<B: Backend, E: Narrow> BackendTypes for Half<B, E> {
    type Device = B::Device;
    type FloatTensorPrimitive = B::FloatTensorPrimitive;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: Backend, E: Narrow> Backend for Half<B, E> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device);
    }

    fn name(device: &Self::Device) -> String {
        format!("half<{}>", B::name(device))
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed);
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device)
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device);
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

impl<L: LazyBackend, E: Narrow> LazyBackend for Half<L, E> {
    type Base = L::Base;

    fn lazy_float(tensor: &Self::FloatTensorPrimitive) -> LazyTensor<Self::Base, Float> {
        L::lazy_float(tensor)
    }

    fn lazy_int(tensor: &Self::IntTensorPrimitive) -> LazyTensor<Self::Base, Int> {
        L::lazy_int(tensor)
    }

    fn lazy_bool(tensor: &Self::BoolTensorPrimitive) -> LazyTensor<Self::Base, Bool> {
        L::lazy_bool(tensor)
    }

    fn narrow() -> Option<DType> {
        Some(E::DTYPE)
    }
}

type FloatOf<B> = <B as BackendTypes>::FloatTensorPrimitive;

/// A tensor in this type.
fn cast<B: Backend>(tensor: FloatOf<B>, dtype: DType) -> FloatOf<B> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => B::float_cast(tensor, dtype.into()),
    }
}

thread_local! {
    /// Whether this thread computes in 32 bit all the same.
    static IN_FULL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` in 32 bit: on this thread, [`Half`] narrows nothing.
///
/// The Learner compares gradients so, to see whether a batch may be split: differences would
/// otherwise be those of rounding. Optimizers step so, too.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::{DType, Tensor};
/// use firebox_lazy::{Half, Lazy, in_full_precision};
///
/// let x = Tensor::<Half<Lazy<Flex>>, 2>::ones([4, 4], &Default::default());
/// let product = in_full_precision(|| x.clone().matmul(x));
/// assert_eq!(product.dtype(), DType::F32);
/// ```
pub fn in_full_precision<R>(work: impl FnOnce() -> R) -> R {
    struct Before(bool);

    impl Drop for Before {
        fn drop(&mut self) {
            IN_FULL.set(self.0);
        }
    }

    let _before = Before(IN_FULL.replace(true));
    work()
}

/// A tensor of 32 bit in 16 bit, or the other way round in full precision. Others stay as they are.
fn narrow<B: Backend, E: Narrow>(tensor: FloatOf<B>) -> FloatOf<B> {
    match tensor.dtype() {
        _ if IN_FULL.get() => widen::<B>(tensor),
        DType::F32 => cast::<B>(tensor, E::DTYPE),
        _ => tensor,
    }
}

/// A tensor of 16 bit in 32 bit. Others stay as they are.
fn widen<B: Backend>(tensor: FloatOf<B>) -> FloatOf<B> {
    let wide = wide_of(tensor.dtype());
    cast::<B>(tensor, wide)
}

/// The type to compute in.
fn wide_of(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        dtype => dtype,
    }
}

/// Two tensors in one type to compute in, and the type of the result.
fn together<B: Backend>(one: FloatOf<B>, other: FloatOf<B>) -> (FloatOf<B>, FloatOf<B>, DType) {
    let (of_one, of_other) = (one.dtype(), other.dtype());
    if of_one == of_other {
        return (one, other, of_one);
    }
    let common = match (wide_of(of_one), wide_of(of_other)) {
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        _ => DType::F32,
    };
    let result = match one.shape().num_elements().cmp(&other.shape().num_elements()) {
        std::cmp::Ordering::Greater => of_one,
        std::cmp::Ordering::Less => of_other,
        std::cmp::Ordering::Equal => common,
    };
    (cast::<B>(one, common), cast::<B>(other, common), result)
}

/// Passes methods on.
macro_rules! as_is {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            B::$name($($arg),*)
        }
    )*};
}

/// Computes in 32 bit. The result has the type of the first tensor.
macro_rules! wide {
    ($(fn $name:ident($first:ident: FloatTensor<Self> $(, $arg:ident: $ty:ty)*) -> FloatTensor<Self>;)*) => {$(
        fn $name($first: FloatTensor<Self> $(, $arg: $ty)*) -> FloatTensor<Self> {
            let dtype = $first.dtype();
            cast::<B>(B::$name(widen::<B>($first) $(, $arg)*), dtype)
        }
    )*};
}

use as_is;
use wide;
