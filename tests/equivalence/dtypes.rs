//! Reads keep their element type.

use burn::backend::Flex;
use burn::prelude::*;
use burn::tensor::{DType, bf16, f16};
use firebox::Lazy;
use firebox::trace::StepRecorder;

use crate::bits;

/// Sends host data of an element type through a tensor and back.
macro_rules! round_trips {
    ($kind:ty, $data:expr, $op:expr) => {{
        let data: TensorData = $data;
        let device = Default::default();
        let plain = Tensor::<Flex, 1, $kind>::from_data(data.clone(), (&device, data.dtype));
        let expected = bits($op(plain).into_data());
        let eager = Tensor::<Lazy<Flex>, 1, $kind>::from_data(data.clone(), (&device, data.dtype));
        assert_eq!(bits($op(eager).into_data()), expected, "at once");
        let recording = StepRecorder::new()
            .record::<Flex, _>(|| {
                let dtype = data.dtype;
                $op(Tensor::<Lazy<Flex>, 1, $kind>::from_data(data, (&device, dtype)))
            })
            .expect("recordings do not nest here");
        assert_eq!(recording.result().dtype(), expected.0, "the promise has the element type");
        assert_eq!(bits(recording.run().into_data()), expected, "recorded");
    }};
}

#[test]
fn every_element_type_is_read_back_as_it_is() {
    let floats = || TensorData::from([1.5f64, -2.25, 1e-3]);
    round_trips!(Float, floats(), |x| x);
    round_trips!(Float, floats().convert_dtype(DType::F32), |x| x);
    round_trips!(Float, TensorData::from([f16::from_f32(1.5), f16::from_f32(-3.0)]), |x| x);
    round_trips!(Float, TensorData::from([bf16::from_f32(1.5), bf16::from_f32(-3.0)]), |x| x);
    round_trips!(Int, TensorData::from([1i64, -2, 1 << 40]), |x| x);
    round_trips!(Int, TensorData::from([1i32, -2, 7]), |x| x);
    round_trips!(Int, TensorData::from([1u8, 2, 255]), |x| x);
    round_trips!(Bool, TensorData::from([true, false, true]), |x| x);
}

#[test]
fn arithmetic_keeps_the_element_type() {
    round_trips!(Float, TensorData::from([1.5f64, -2.25]), |x: Tensor<_, 1>| x.mul_scalar(3.0));
    round_trips!(Float, TensorData::from([f16::from_f32(1.5)]), |x: Tensor<_, 1>| x.exp());
    round_trips!(Int, TensorData::from([1i64, 1 << 40]), |x: Tensor<_, 1, Int>| x.add_scalar(1));
    round_trips!(Int, TensorData::from([1u8, 2]), |x: Tensor<_, 1, Int>| x.mul_scalar(2));
    round_trips!(Bool, TensorData::from([true, false]), |x: Tensor<_, 1, Bool>| x.bool_not());
}
