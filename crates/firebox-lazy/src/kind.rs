//! The four kinds of tensors of a backend, and a value of any kind.

use burn_backend::{
    Backend, QTensorPrimitive, TensorData, TensorMetadata, quantization::QuantScheme,
};

/// A kind of tensor: float, int, bool or quantized.
pub trait Kind<B: Backend>: Send + Sync + 'static {
    /// The backend's own tensor of this kind.
    type Primitive: TensorMetadata + 'static;

    /// The device on which a tensor lives.
    fn device(primitive: &Self::Primitive) -> B::Device;

    /// Makes a tensor from host data.
    fn from_data(data: TensorData, device: &B::Device) -> Self::Primitive;

    /// Turns a tensor into a value of any kind.
    fn erase(primitive: Self::Primitive) -> Value<B>;

    /// The tensor in a value of any kind.
    ///
    /// # Panics
    ///
    /// If the value is of another kind.
    fn restore(value: Value<B>) -> Self::Primitive;
}

/// The kind of float tensors.
#[derive(Clone, Copy, Debug)]
pub struct Float;

/// The kind of integer tensors.
#[derive(Clone, Copy, Debug)]
pub struct Int;

/// The kind of boolean tensors.
#[derive(Clone, Copy, Debug)]
pub struct Bool;

/// The kind of quantized tensors, which cannot be recorded.
#[derive(Clone, Copy, Debug)]
pub struct Quantized;

/// A tensor of the decorated backend of any kind.
#[derive(Clone)]
pub enum Value<B: Backend> {
    /// A float tensor.
    Float(B::FloatTensorPrimitive),
    /// An integer tensor.
    Int(B::IntTensorPrimitive),
    /// A boolean tensor.
    Bool(B::BoolTensorPrimitive),
    /// A quantized tensor.
    Quantized(B::QuantizedTensorPrimitive),
}

macro_rules! kind {
    ($kind:ident, $primitive:ident, $device:ident, $from_data:ident) => {
        impl<B: Backend> Kind<B> for $kind {
            type Primitive = B::$primitive;

            fn device(primitive: &Self::Primitive) -> B::Device {
                B::$device(primitive)
            }

            fn from_data(data: TensorData, device: &B::Device) -> Self::Primitive {
                B::$from_data(data, device)
            }

            fn erase(primitive: Self::Primitive) -> Value<B> {
                Value::$kind(primitive)
            }

            fn restore(value: Value<B>) -> Self::Primitive {
                match value {
                    Value::$kind(primitive) => primitive,
                    _ => unreachable!("a tensor keeps its kind for life"),
                }
            }
        }
    };
}

kind!(Float, FloatTensorPrimitive, float_device, float_from_data);
kind!(Int, IntTensorPrimitive, int_device, int_from_data);
kind!(Bool, BoolTensorPrimitive, bool_device, bool_from_data);
kind!(Quantized, QuantizedTensorPrimitive, q_device, q_from_data);

impl<B: Backend> QTensorPrimitive for crate::LazyTensor<B, Quantized> {
    fn scheme(&self) -> &QuantScheme {
        self.ready().scheme()
    }
}
