//! burn's Vulkan backend.

use std::ops::RangeInclusive;

use cubecl::wgpu::{RuntimeOptions, Vulkan, WgpuDevice, init_setup};

pub type Base = burn::backend::Vulkan;
pub type Runtime = cubecl::wgpu::WgpuRuntime;

/// The name of the bench.
pub const BENCH: &str = "accuracy";
/// What a prediction may be of the most that was measured, where a few cases are run as a test.
pub const LIMITS: RangeInclusive<f64> = 0.99..=1.10;

/// Whether the blank driver can stand in for the device.
pub const CAN_BE_BLANK: bool = false;

/// The name of the first device.
///
/// # Panics
///
/// If there is none.
pub fn name() -> Option<String> {
    let setup = init_setup::<Vulkan>(&WgpuDevice::default(), RuntimeOptions::default());
    let name = setup.adapter.get_info().name;
    Some(if name.starts_with("llvmpipe") { "lavapipe".to_owned() } else { name })
}

/// Vulkan's drivers cannot be asked in one way.
pub fn held_by_driver() -> Option<firebox::Bytes> {
    None
}
