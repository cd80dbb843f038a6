//! burn's CUDA backend, on an NVIDIA device or on the blank driver.

use std::ops::RangeInclusive;

pub type Base = burn::backend::Cuda;
pub type Runtime = cubecl::cuda::CudaRuntime;

/// The name of the bench.
pub const BENCH: &str = "accuracy_cuda";
/// What a prediction may be of the most that was measured, where a few cases are run as a test. A page may be a fifth of what a small model
/// needs: `reader-3000` on a T4 is 87 MiB of 73.
pub const LIMITS: RangeInclusive<f64> = 0.99..=1.25;

/// Whether the blank driver can stand in for the device.
pub const CAN_BE_BLANK: bool = true;

/// The name of the first device, or nothing if there is none.
pub fn name() -> Option<String> {
    crate::machine::has_nvidia().then(|| "cuda".to_owned())
}

/// What the driver says that this process holds on the first device, if it tells.
pub fn held_by_driver() -> Option<firebox::Bytes> {
    firebox::cuda_memory(0).ok()?.held_by_process
}
