//! burn's Vulkan backend.

use std::ops::RangeInclusive;

use cubecl::wgpu::{RuntimeOptions, Vulkan, WgpuDevice, init_setup};

pub type Base = burn::backend::Vulkan;
pub type Runtime = cubecl::wgpu::WgpuRuntime;

/// Name of the bench.
pub const BENCH: &str = "accuracy";
/// Allowed range of predicted over most measured bytes, when a few cases run as a test. A page more
/// is counted than is certainly needed.
pub const LIMITS: RangeInclusive<f64> = 0.99..=1.20;

/// Whether the blank driver can stand in for the device.
pub const CAN_BE_BLANK: bool = false;

/// Name of the first device.
///
/// # Panics
///
/// If there is no device.
pub fn name() -> Option<String> {
    let setup = init_setup::<Vulkan>(&WgpuDevice::default(), RuntimeOptions::default());
    let name = setup.adapter.get_info().name;
    Some(if name.starts_with("llvmpipe") { "lavapipe".to_owned() } else { name })
}

/// Always `None`: Vulkan drivers have no common way to ask for it.
pub fn held_by_driver() -> Option<firebox::Bytes> {
    None
}
