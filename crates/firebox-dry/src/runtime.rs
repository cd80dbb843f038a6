//! The runtime: runs burn's `CubeBackend` on a dry device.
//!
//! burn-cubecl implements its backend for every CubeCL runtime. The compiler of this runtime
//! (`compiler.rs`) compiles nothing. Fusion, kernel selection, temporary buffers and the allocator
//! are the real ones. Requests go to `server.rs`.

use std::marker::PhantomData;

use cubecl::ir::TargetProperties;
use cubecl::zspace::{Shape, Strides};
use cubecl_common::device::DeviceId;
use cubecl_runtime::client::ComputeClient;
use cubecl_runtime::runtime::Runtime;

use crate::compiler::DryCompiler;
use crate::device::DryDevice;
use crate::registry::known_devices;
use crate::server::{DryInfo, DryServer};
use crate::target::Target;

/// A CubeCL runtime that reserves what the runtime `T` reserves, and computes nothing.
///
/// `Fusion<CubeBackend<DryRuntime<Cuda>, f32, i32, u8>>` is burn's CUDA backend without a GPU.
/// Values read back are zeros.
#[derive(Clone, Debug)]
pub struct DryRuntime<T: Target>(PhantomData<T>);

impl<T: Target> Runtime for DryRuntime<T> {
    type Compiler = DryCompiler;
    type Server = DryServer<T>;
    type Device = DryDevice<T>;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(client: &ComputeClient<Self>) -> &'static str {
        client.info().name()
    }

    fn require_array_lengths() -> bool {
        T::ARRAY_LENGTHS
    }

    fn max_cube_count() -> (u32, u32, u32) {
        T::MAX_CUBE_COUNT
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        T::can_read(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        T::target_properties()
    }

    fn enumerate_devices(type_id: u16, _info: &DryInfo) -> Vec<DeviceId> {
        known_devices(type_id)
    }

    fn enumerate_all_devices(_info: &DryInfo) -> Vec<DeviceId> {
        known_devices(T::DEVICE_TYPE)
    }
}
