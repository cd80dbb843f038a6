//! Random numbers for the prefix of a recording that will be discarded.
//!
//! A planned step must leave the backend's generator alone. Where such a step reads a value, what it drew before is
//! drawn here instead: other numbers of the same distribution, which is all that planning needs.

use burn_backend::{Distribution, TensorData};
use burn_std::{DType, Shape};
use rand::rngs::StdRng;

/// The next `shape` numbers of `distribution`, on the host.
pub(super) fn host_random(
    generator: &mut StdRng,
    shape: &Shape,
    distribution: Distribution,
    dtype: DType,
) -> TensorData {
    TensorData::random::<f32, _, _>(shape.clone(), distribution, generator).convert_dtype(dtype)
}
