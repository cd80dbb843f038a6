//! What a dry device stands for: the parts of a CubeCL runtime that are fixed at compile time.
//!
//! Each item of [`Target`] copies one item of the runtime that it names, from cubecl-cuda 0.10
//! (`runtime.rs`, `device.rs`, `compute/server.rs`) or cubecl-wgpu 0.10 (`runtime.rs`,
//! `compute/server.rs`).

use std::fmt::Debug;

use cubecl::ir::{
    ContiguousElements, DeviceProperties, MatrixLayout, MmaProperties, TargetProperties,
};
use cubecl::zspace::striding::has_pitched_row_major_strides;
use cubecl::zspace::{Shape, Strides};
use cubecl_cpp::cuda::mma::contiguous_elements_cuda;
use cubecl_runtime::allocator::{ContiguousMemoryLayoutPolicy, PitchedMemoryLayoutPolicy};
use cubecl_runtime::server::{MemoryLayoutPolicy, MetadataBindingInfo};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Cuda {}
    impl Sealed for super::Wgpu {}
}

/// The runtime that a dry device stands for. Implemented by [`Cuda`] and [`Wgpu`].
pub trait Target:
    sealed::Sealed + Clone + Copy + Debug + Default + PartialEq + Send + Sync + 'static
{
    /// How tensors are laid out in their buffers.
    type Layout: MemoryLayoutPolicy;

    /// The type id of the target's dry devices. The ids of CUDA and wgpu devices are 0 to 5. All
    /// runtimes of a process share the ids, and the threads that belong to them.
    const DEVICE_TYPE: u16;

    /// The beginning of the dry runtime's name. No real runtime's name begins like that, so caches
    /// that go by the name stay apart.
    const NAME: &'static str;

    /// `Runtime::require_array_lengths`.
    const ARRAY_LENGTHS: bool;

    /// `Runtime::max_cube_count`.
    const MAX_CUBE_COUNT: (u32, u32, u32);

    /// Whether one binding of a kernel is limited to the largest page, wherever its buffer lies.
    const LIMITS_BINDINGS: bool;

    /// The maximum bytes of one page of firebox's pool: those of a binding, which every buffer may
    /// have.
    fn largest_page(properties: &DeviceProperties) -> u64 {
        if Self::LIMITS_BINDINGS { properties.memory.max_page_size } else { u64::MAX }
    }

    /// The layout policy for a device with this alignment, in bytes.
    fn layout(alignment: u64) -> Self::Layout;

    /// `Runtime::can_read_tensor`.
    fn can_read(shape: &Shape, strides: &Strides) -> bool;

    /// `Runtime::target_properties`.
    fn target_properties() -> TargetProperties;

    /// The bytes of the buffer that a launch takes from the tensors' pools for its scalars and
    /// shapes while it is issued.
    fn launch_buffer(properties: &DeviceProperties, info: &MetadataBindingInfo) -> Option<u64>;
}

/// CUDA, as in cubecl-cuda.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cuda;

/// wgpu over any of its graphics interfaces, as in cubecl-wgpu.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wgpu;

impl Target for Cuda {
    type Layout = PitchedMemoryLayoutPolicy;

    const DEVICE_TYPE: u16 = 0xF1C0;
    const NAME: &'static str = "dry-cuda";
    const ARRAY_LENGTHS: bool = true;
    const MAX_CUBE_COUNT: (u32, u32, u32) = (i32::MAX as u32, u16::MAX as u32, u16::MAX as u32);
    const LIMITS_BINDINGS: bool = false;

    fn layout(alignment: u64) -> Self::Layout {
        PitchedMemoryLayoutPolicy::new(alignment as usize)
    }

    fn can_read(shape: &Shape, strides: &Strides) -> bool {
        has_pitched_row_major_strides(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }

    /// Mirrors `CudaServer::launch_checked`. With grid constants, only the shapes whose number the
    /// kernel does not know go to a buffer; without them, everything does. cubecl-cuda enables grid
    /// constants together with plane synchronisation, from compute capability 7.0 on.
    fn launch_buffer(properties: &DeviceProperties, info: &MetadataBindingInfo) -> Option<u64> {
        let grid_constants = properties.features.plane.contains(cubecl::features::Plane::Sync);
        let start = if grid_constants { info.dynamic_metadata_offset } else { 0 };
        let words = info.data.len().saturating_sub(start);
        (words > 0).then_some(words as u64 * 8)
    }
}

impl Target for Wgpu {
    type Layout = ContiguousMemoryLayoutPolicy;

    const DEVICE_TYPE: u16 = 0xF1C1;
    const NAME: &'static str = "dry-wgpu";
    const ARRAY_LENGTHS: bool = false;
    const MAX_CUBE_COUNT: (u32, u32, u32) = (u16::MAX as u32, u16::MAX as u32, u16::MAX as u32);
    const LIMITS_BINDINGS: bool = true;

    fn layout(alignment: u64) -> Self::Layout {
        ContiguousMemoryLayoutPolicy::new(alignment as usize)
    }

    fn can_read(shape: &Shape, strides: &Strides) -> bool {
        let mut contiguous = 1;
        let ranks = shape.iter().zip(strides.iter()).rev();
        ranks.into_iter().all(|(size, stride)| {
            let expected = contiguous;
            contiguous *= size;
            expected == *stride
        })
    }

    fn target_properties() -> TargetProperties {
        TargetProperties { mma: MmaProperties::default() }
    }

    /// Uniforms have separate pools, which `memory_usage` does not count
    /// (`compute/mem_manager.rs`).
    fn launch_buffer(_properties: &DeviceProperties, _info: &MetadataBindingInfo) -> Option<u64> {
        None
    }
}
