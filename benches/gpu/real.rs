//! The backend that is measured, and how its memory is read.

use std::process::Command;

use firebox::Bytes;

#[cfg(feature = "cuda")]
mod backend {
    pub const NAME: &str = "cuda";
    pub type Real = burn::backend::Cuda;
    type Runtime = cubecl::cuda::CudaRuntime;
    pub fn reserved(device: &burn::backend::cuda::CudaDevice) -> Option<u64> {
        use cubecl::Runtime as _;
        Some(Runtime::client(device).memory_usage().ok()?.bytes_reserved)
    }
}

#[cfg(all(feature = "vulkan", not(feature = "cuda")))]
mod backend {
    pub const NAME: &str = "vulkan";
    pub type Real = burn::backend::Vulkan;
    type Runtime = cubecl::wgpu::WgpuRuntime;
    pub fn reserved(device: &burn::backend::wgpu::WgpuDevice) -> Option<u64> {
        use cubecl::Runtime as _;
        Some(Runtime::client(device).memory_usage().ok()?.bytes_reserved)
    }
}

#[cfg(not(any(feature = "cuda", feature = "vulkan")))]
mod backend {
    pub const NAME: &str = "flex";
    pub type Real = burn::backend::Flex;
    pub fn reserved(_: &burn::backend::flex::FlexDevice) -> Option<u64> {
        None
    }
}

pub use backend::{NAME, Real};

/// Device of the backend.
pub type Device = burn::tensor::Device<Real>;

/// Bytes of all pages of this thread's stream, the one that trains. `None` if the backend has no
/// pages.
pub fn reserved(device: &Device) -> Option<Bytes> {
    backend::reserved(device).map(Bytes::new)
}

/// Memory in use on the first NVIDIA device, by any process. `None` without one, or on another
/// backend.
pub fn driver_used() -> Option<Bytes> {
    if NAME != "cuda" {
        return None;
    }
    let question = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"];
    let answer = Command::new("nvidia-smi").args(question).output().ok()?;
    let mib = String::from_utf8(answer.stdout).ok()?.trim().parse().ok()?;
    Some(Bytes::mib(mib))
}
