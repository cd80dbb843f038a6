//! burn's Vulkan backend.

use cubecl::wgpu::{RuntimeOptions, Vulkan, WgpuDevice, init_setup};

pub type Base = burn::backend::Vulkan;
pub type Runtime = cubecl::wgpu::WgpuRuntime;

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
