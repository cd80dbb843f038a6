//! What the Learner must know about a backend's device: how to predict its memory, how much it has,
//! and how much this process holds. The planner and the training loop ask through [`DeviceMemory`].
//!
//! All of this follows from the backend's type. `cubecl.rs` answers for burn's GPU backends.

#[cfg(feature = "cards")]
pub(crate) mod cubecl;
#[cfg(feature = "cuda")]
pub(crate) mod nvidia;
#[cfg(feature = "cuda")]
pub(crate) mod nvidia_error;
pub(crate) mod own_pool;
pub(crate) mod panics;
#[cfg(feature = "cuda")]
pub(crate) mod prerequisites;
#[cfg(feature = "cards")]
pub(crate) mod rates;
pub(crate) mod watch;

use std::fmt;
use std::sync::Arc;

use burn_backend::{Backend, ExecutionError};
use burn_router::{BackendRouter, RunnerChannel};
use firebox_plan::MemoryInfo;
use firebox_recompute::Rates;
use firebox_trace::{Bytes, MemoryModel};

use crate::device::own_pool::OwnPool;
use crate::error::TrainError;

/// A backend whose devices have predictable memory.
///
/// Implemented for burn's CUDA and wgpu backends (features `cuda`, `wgpu` and `vulkan`), Flex
/// (`flex`) and NdArray (`ndarray`). Another backend can implement it with its own [`MemoryModel`],
/// such as [`Heap::simple`](firebox_heap::Heap::simple), and return its own errors as
/// [`TrainError::Device`].
#[diagnostic::on_unimplemented(
    message = "memory cannot be predicted on the devices of `{Self}`",
    note = "switch on the feature of firebox that has the backend's name: `cuda`, `wgpu`, `vulkan`, `flex` or `ndarray`",
    note = "automatic differentiation goes around the recording: `Autodiff<Lazy<Flex>>`, not `Lazy<Autodiff<Flex>>`"
)]
pub trait DeviceMemory: Backend {
    /// Checks that what the backend needs is installed: a driver, a compiler, headers.
    ///
    /// Called before the first use of a device, because burn's backends would panic there or
    /// continue without. Default: nothing is needed.
    ///
    /// # Errors
    ///
    /// What is missing, and how to get it. Other crates return [`TrainError::Device`].
    fn prerequisites() -> Result<(), TrainError> {
        Ok(())
    }

    /// The memory model for recorded steps on `device`.
    fn memory_model(device: &Self::Device) -> Arc<dyn MemoryModel>;

    /// The current memory of `device`.
    ///
    /// # Errors
    ///
    /// [`TrainError::UnknownMemory`] if the memory cannot be queried, as on wgpu.
    /// [`TrainError::Device`] if the query fails.
    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError>;

    /// How fast `device` computes, for choices between recomputation and splitting. Only ratios
    /// matter. Default: unknown, and that of an RTX 4090 is assumed, or on the host that of two
    /// cores of a server.
    fn rates(_device: &Self::Device) -> Option<Rates> {
        None
    }

    /// Whether operations are queued and run together, as in burn's fusion. Default: no.
    const FUSES: bool = false;

    /// Runs the operations that this thread has queued, if the backend [fuses](Self::FUSES). Does
    /// not wait for the device.
    fn drain(_device: &Self::Device) {}

    /// What the backend's allocator holds on `device` for this process, over all its streams.
    /// `None` if the backend has no allocator of its own, as on the CPU.
    ///
    /// Submits the work that is queued on the device. Does not wait for it on CUDA.
    fn pool_usage(_device: &Self::Device) -> Option<PoolUsage> {
        None
    }

    /// Waits until all work of this thread is issued to the device, and reports failures.
    ///
    /// Default: [`Backend::sync`], which also waits until the work is done. burn's GPU backends do
    /// not wait for that, because the device would be idle until the next operation arrives.
    ///
    /// # Errors
    ///
    /// The failure as reported by the device.
    fn settle(device: &Self::Device) -> Result<(), ExecutionError> {
        Self::sync(device)
    }

    /// Gives back unused pages of all threads' pools, those of this thread before any allocation it
    /// requests later.
    ///
    /// A backend whose memory model reports [pages](firebox_trace::Footprint::paging) must
    /// implement this, because plans for batches of other shapes rely on it. Default: does nothing,
    /// for backends without pages.
    fn give_back(_device: &Self::Device) {}

    /// The pool of `device`, if buffers lie on firebox's pages. Default: none.
    fn own_pool(_device: &Self::Device) -> Option<OwnPool> {
        None
    }
}

/// What an allocator holds on a device for this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// The bytes of all pages.
    pub reserved: Bytes,
    /// The bytes of the buffers on them.
    pub in_use: Bytes,
    /// The part of `reserved` in the calling thread's pools.
    pub own: Bytes,
}

impl fmt::Display for PoolUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reserved, {} in use", self.reserved, self.in_use)
    }
}

#[cfg(feature = "flex")]
impl DeviceMemory for burn::backend::Flex {
    fn memory_model(_device: &Self::Device) -> Arc<dyn MemoryModel> {
        Arc::new(firebox_heap::Heap::flex())
    }

    fn memory_info(_device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Ok(firebox_plan::host_memory()?)
    }
}

#[cfg(feature = "ndarray")]
impl<E, I, Q> DeviceMemory for burn_ndarray::NdArray<E, I, Q>
where
    E: burn_ndarray::FloatNdArrayElement,
    I: burn_ndarray::IntNdArrayElement,
    Q: burn_ndarray::QuantElement,
    burn_ndarray::NdArrayTensor: From<burn_ndarray::SharedArray<E>>,
    burn_ndarray::NdArrayTensor: From<burn_ndarray::SharedArray<I>>,
{
    fn memory_model(_device: &Self::Device) -> Arc<dyn MemoryModel> {
        Arc::new(firebox_heap::Heap::simple())
    }

    fn memory_info(_device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Ok(firebox_plan::host_memory()?)
    }
}

/// The devices behind a router are unknown. A tensor takes at least the bytes of its elements
/// there.
impl<C: RunnerChannel> DeviceMemory for BackendRouter<C>
where
    Self: Backend<Device = C::Device>,
{
    fn memory_model(_device: &Self::Device) -> Arc<dyn MemoryModel> {
        Arc::new(firebox_heap::Heap::simple().on_device())
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Err(TrainError::UnknownMemory { device: <Self as Backend>::name(device) })
    }
}
