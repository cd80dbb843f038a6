//! burn's CUDA backend, on an NVIDIA device or on the blank driver.

use std::ops::RangeInclusive;

pub type Base = burn::backend::Cuda;
pub type Runtime = cubecl::cuda::CudaRuntime;

/// Name of the bench.
pub const BENCH: &str = "accuracy_cuda";
/// Allowed range of predicted over most measured bytes, when a few cases run as a test. A page more
/// is counted than is certainly needed, which is up to a fourth of what a small model takes.
pub const LIMITS: RangeInclusive<f64> = 0.99..=1.30;

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
