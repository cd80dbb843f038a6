//! The tensors that a recording found: how to read them, and how some rows stand in for all.

use burn_backend::{Backend, BackendTypes, TensorData, TensorMetadata};
use burn_std::future::block_on;
use burn_std::{DType, Shape, Slice};
use firebox_trace::TensorIndex;
use rustc_hash::FxHashMap;

use crate::kind::Value;

/// The rows that stand in for all rows of a tensor, by [`Input::id`].
pub(crate) type Rows = FxHashMap<u64, Vec<usize>>;

/// A tensor that existed before a recording and is used in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// A number unique among the tensors of this process.
    pub id: u64,
    /// Its index in the trace.
    pub tensor: TensorIndex,
    /// Its dimensions.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
}

/// Selects rows of a tensor, along its first dimension.
pub(crate) fn select_rows<B: Backend>(
    value: Value<B>,
    rows: &[usize],
    device: &B::Device,
) -> Value<B> {
    let indices: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
    let data = TensorData::new(indices, [rows.len()]);
    let data = data.convert::<B::IntElem>();
    let indices = B::int_from_data(data, device);
    match value {
        Value::Float(tensor) => Value::Float(B::float_select(tensor, 0, indices)),
        Value::Int(tensor) => Value::Int(B::int_select(tensor, 0, indices)),
        Value::Bool(tensor) => Value::Bool(B::bool_select(tensor, 0, indices)),
        Value::Quantized(tensor) => Value::Quantized(B::q_select(tensor, 0, indices)),
    }
}

/// The values of a tensor. `None` if they cannot be read.
pub(crate) fn values_of<B: Backend>(value: Value<B>) -> Option<TensorData> {
    match value {
        Value::Float(tensor) => block_on(B::float_into_data(tensor)).ok(),
        Value::Int(tensor) => block_on(B::int_into_data(tensor)).ok(),
        Value::Bool(tensor) => block_on(B::bool_into_data(tensor)).ok(),
        Value::Quantized(_) => None,
    }
}

/// Turns host data back into a tensor.
pub(crate) type Make<B> = fn(TensorData, &<B as BackendTypes>::Device) -> Value<B>;

/// The values of a tensor, its device, and the function that makes it again from them. `None` if
/// the values cannot be read.
pub(crate) fn to_host<B: Backend>(value: &Value<B>) -> Option<(TensorData, B::Device, Make<B>)> {
    let (device, make) = of_data(value)?;
    Some((values_of(value.clone())?, device, make))
}

/// The device of a tensor, and the function that makes such a tensor. `None` if it is quantized.
pub(crate) fn of_data<B: Backend>(value: &Value<B>) -> Option<(B::Device, Make<B>)> {
    let (device, make): (_, Make<B>) = match value {
        Value::Float(tensor) => {
            (B::float_device(tensor), |data, at| Value::Float(B::float_from_data(data, at)))
        }
        Value::Int(tensor) => {
            (B::int_device(tensor), |data, at| Value::Int(B::int_from_data(data, at)))
        }
        Value::Bool(tensor) => {
            (B::bool_device(tensor), |data, at| Value::Bool(B::bool_from_data(data, at)))
        }
        Value::Quantized(_) => return None,
    };
    Some((device, make))
}

/// The values of the first rows of a tensor. `None` if they cannot be read. Takes a slice from the
/// beginning, which on CubeCL is a view and takes no device memory.
pub(crate) fn rows_of<B: Backend>(value: Value<B>, rows: usize) -> Option<TensorData> {
    let slices = |shape: Shape| -> Vec<Slice> {
        let sizes = shape.iter().enumerate();
        let sizes = sizes.map(|(at, size)| if at == 0 { rows.min(*size) } else { *size });
        sizes.map(|size| Slice::from(0..size)).collect()
    };
    values_of::<B>(match value {
        Value::Float(tensor) => {
            let slices = slices(tensor.shape());
            Value::Float(B::float_slice(tensor, &slices))
        }
        Value::Int(tensor) => {
            let slices = slices(tensor.shape());
            Value::Int(B::int_slice(tensor, &slices))
        }
        Value::Bool(tensor) => {
            let slices = slices(tensor.shape());
            Value::Bool(B::bool_slice(tensor, &slices))
        }
        Value::Quantized(_) => return None,
    })
}
