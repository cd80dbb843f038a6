//! A Vulkan device whose allocator refuses buffers above a size that a test chooses.

use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::wgpu::{RuntimeOptions, Vulkan, WgpuDevice, WgpuRuntime, init_setup};
use cubecl_runtime::memory_management::{MemoryConfiguration, MemoryPoolOptions, PoolType};

pub type Unfused = CubeBackend<WgpuRuntime, f32, i32, u8>;
pub type Fused = Fusion<Unfused>;

/// The largest buffer that a small device allows: the activations of `Net` for
/// 64 items.
pub const LARGEST: u64 = 4096;

/// The default device with an allocator that refuses buffers above [`LARGEST`]. Call it once per
/// process.
pub fn small_device() -> WgpuDevice {
    let device = WgpuDevice::default();
    let pool_type = PoolType::SlicedPages { page_size: 1 << 20, max_slice_size: LARGEST };
    let pool_options = vec![MemoryPoolOptions { pool_type, dealloc_period: None }];
    let memory_config = MemoryConfiguration::Custom { pool_options };
    let options = RuntimeOptions { memory_config, ..Default::default() };
    init_setup::<Vulkan>(&device, options);
    device
}
