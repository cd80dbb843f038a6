//! firebox's CUDA backend, on an NVIDIA device or on the blank driver.

use std::ops::RangeInclusive;

pub type Base = firebox::Cuda;
pub type Runtime = firebox::pool::Pooled<cubecl::cuda::CudaRuntime>;

/// Name of the bench.
pub const BENCH: &str = "accuracy_pool";
/// Allowed range of predicted over most measured bytes, when a few cases run as a test: equal to
/// the byte.
pub const LIMITS: RangeInclusive<f64> = 1.0..=1.0;

/// Whether the blank driver can stand in for the device.
pub const CAN_BE_BLANK: bool = true;

/// Name of the first device, or `None` without one.
pub fn name() -> Option<String> {
    firebox_testing::machine::has_nvidia().then(|| "cuda".to_owned())
}

/// Bytes that this process holds on the first device, if the driver tells.
pub fn held_by_driver() -> Option<firebox::Bytes> {
    firebox_testing::machine::held_by_process()
}
