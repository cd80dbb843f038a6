//! What the Learner must know about a backend's device: how to predict its memory, how much it has,
//! and how much this process holds. The planner and the training loop ask through [`DeviceMemory`].
//!
//! All of this follows from the backend's type. burn's CUDA and wgpu backends are one backend over
//! CubeCL runtimes, with or without fusion. The differences between runtimes are in
//! [`RuntimeMemory`].

#[cfg(feature = "cuda")]
pub(crate) mod nvidia;
#[cfg(feature = "cuda")]
pub(crate) mod nvidia_error;
pub(crate) mod own_pool;
pub(crate) mod panics;
#[cfg(feature = "cuda")]
pub(crate) mod prerequisites;
pub(crate) mod rates;
pub(crate) mod watch;

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn_backend::{Backend, ExecutionError};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::{BoolElement, CubeBackend, CubeTuneId, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_fusion::client::GlobalFusionClient;
use burn_router::{BackendRouter, RunnerChannel};
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::server::ServerError;
use cubecl_common::stream_id::StreamId;
use firebox_dry::{Dry, DryRuntime, DryTwin, Mirrored, Target};
use firebox_plan::MemoryInfo;
use firebox_pool::{Control, Pooled, has_exact_pages};
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

    /// How fast `device` computes, for choices between computing again and splitting. Only ratios
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

    /// Gives back unused pages of this thread's pools, before any allocation requested later.
    ///
    /// A backend whose memory model reports [pages](firebox_trace::Footprint::paging) must
    /// implement this, because plans for batches of other shapes rely on it. Default: does nothing,
    /// for backends without pages.
    fn give_back(_device: &Self::Device) {}

    /// The pool of `device`, if buffers lie on pages of our own. Default: none.
    fn own_pool(_device: &Self::Device) -> Option<Box<dyn OwnPool>> {
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

/// What can be asked of a CubeCL runtime's driver.
pub trait RuntimeMemory: Mirrored {
    /// See [`DeviceMemory::prerequisites`].
    ///
    /// # Errors
    ///
    /// What is missing.
    fn prerequisites() -> Result<(), TrainError> {
        Ok(())
    }

    /// The current memory of `device`.
    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError>;

    /// See [`DeviceMemory::rates`].
    fn rates(_device: &Self::Device) -> Option<Rates> {
        None
    }

    /// See [`DeviceMemory::pool_usage`].
    fn pool_usage(device: &Self::Device) -> Option<PoolUsage> {
        pool_usage(&Self::client(device))
    }

    /// See [`DeviceMemory::own_pool`].
    fn own_pool(_device: &Self::Device) -> Option<Box<dyn OwnPool>> {
        None
    }
}

/// The same devices with a pool of our own. The pool has one stream for all threads.
impl<R: RuntimeMemory> RuntimeMemory for Pooled<R> {
    fn prerequisites() -> Result<(), TrainError> {
        R::prerequisites()?;
        if has_exact_pages() { Ok(()) } else { Err(TrainError::NoExactPages) }
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        R::memory_info(device)
    }

    fn rates(device: &Self::Device) -> Option<Rates> {
        R::rates(device)
    }

    fn pool_usage(device: &Self::Device) -> Option<PoolUsage> {
        let client = Self::client(device);
        let usage = catch_unwind(AssertUnwindSafe(|| client.memory_usage())).ok()?.ok()?;
        let reserved = Bytes::new(usage.bytes_reserved);
        Some(PoolUsage { reserved, in_use: Bytes::new(usage.bytes_in_use), own: reserved })
    }

    fn own_pool(device: &Self::Device) -> Option<Box<dyn OwnPool>> {
        Some(Box::new(Control::<R>::of(device)))
    }
}

#[cfg(feature = "cuda")]
impl RuntimeMemory for cubecl::cuda::CudaRuntime {
    fn prerequisites() -> Result<(), TrainError> {
        Ok(crate::device::prerequisites::check_cuda()?)
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Ok(crate::device::nvidia::memory_info(device.index)?)
    }

    fn rates(device: &Self::Device) -> Option<Rates> {
        let name = crate::device::nvidia::name(device.index)?;
        rates::rates_of(firebox_dry::Card::of_driver(&name)?)
    }
}

/// wgpu does not report how much memory a device has.
#[cfg(feature = "wgpu")]
impl RuntimeMemory for cubecl::wgpu::WgpuRuntime {
    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Err(TrainError::UnknownMemory { device: format!("wgpu, {device:?}") })
    }
}

/// A device without memory does not know how much it stands for: the user says so.
impl<T: Target> RuntimeMemory for DryRuntime<T> {
    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Err(TrainError::UnknownMemory { device: format!("{device:?}") })
    }
}

impl<R, F, I, B> DeviceMemory for CubeBackend<R, F, I, B>
where
    R: RuntimeMemory,
    F: FloatElement,
    I: IntElement,
    B: BoolElement,
{
    fn prerequisites() -> Result<(), TrainError> {
        R::prerequisites()
    }

    fn memory_model(device: &Self::Device) -> Arc<dyn MemoryModel> {
        Arc::new(dry::<Self, R>(device))
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        R::memory_info(device)
    }

    fn rates(device: &Self::Device) -> Option<Rates> {
        R::rates(device)
    }

    fn pool_usage(device: &Self::Device) -> Option<PoolUsage> {
        R::pool_usage(device)
    }

    fn own_pool(device: &Self::Device) -> Option<Box<dyn OwnPool>> {
        R::own_pool(device)
    }

    fn settle(device: &Self::Device) -> Result<(), ExecutionError> {
        issued(R::client(device).flush())
    }

    fn give_back(device: &Self::Device) {
        R::client(device).memory_cleanup();
    }
}

impl<R, F, I, B> DeviceMemory for Fusion<CubeBackend<R, F, I, B>>
where
    R: RuntimeMemory,
    F: FloatElement,
    I: IntElement,
    B: BoolElement,
{
    const FUSES: bool = true;

    fn drain(device: &Self::Device) {
        GlobalFusionClient::<FusionCubeRuntime<R>>::load(device).sync(|| ());
    }

    fn settle(device: &Self::Device) -> Result<(), ExecutionError> {
        let client = R::client(device);
        let fusion = GlobalFusionClient::<FusionCubeRuntime<R>>::load(device);
        issued(fusion.sync(move || client.flush()))
    }

    fn prerequisites() -> Result<(), TrainError> {
        R::prerequisites()
    }

    fn memory_model(device: &Self::Device) -> Arc<dyn MemoryModel> {
        Arc::new(dry::<Self, R>(device))
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        R::memory_info(device)
    }

    fn rates(device: &Self::Device) -> Option<Rates> {
        R::rates(device)
    }

    fn pool_usage(device: &Self::Device) -> Option<PoolUsage> {
        R::pool_usage(device)
    }

    fn own_pool(device: &Self::Device) -> Option<Box<dyn OwnPool>> {
        R::own_pool(device)
    }

    fn give_back(device: &Self::Device) {
        R::client(device).memory_cleanup();
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

fn issued(answer: Result<(), ServerError>) -> Result<(), ExecutionError> {
    answer.map_err(|error| ExecutionError::WithContext { reason: error.to_string() })
}

/// The dry twin of a device. It chooses kernels as burn's tuner does on that device.
fn dry<B: DryTwin, R: Runtime>(device: &R::Device) -> Dry<B> {
    let client = R::client(device);
    let tuned = CubeTuneId::new(&client, device);
    Dry::new(client.properties().clone()).with_choices_of(tuned.to_string())
}

/// Sums the usage of all streams. A client answers for the stream of the asking thread, and a
/// thread can ask in another's name. Asking for an unused stream would create it with empty pools,
/// so only streams of threads that have existed are asked.
fn pool_usage<R: Runtime>(client: &ComputeClient<R>) -> Option<PoolUsage> {
    let max = firebox_dry::max_streams();
    let own = StreamId::current().value % max;
    let threads = std::thread::spawn(|| StreamId::current().value).join().ok()?;
    let mut streams: BTreeSet<u64> = (0..threads.min(max)).collect();
    streams.extend(firebox_lazy::loader_streams().iter().map(|stream| stream.value % max));
    streams.insert(own);
    let mut usage = PoolUsage::default();
    for value in streams {
        // CubeCL's client panics where the server does, for example if a stream cannot be created.
        let asked = || StreamId { value }.executes(|| client.memory_usage());
        let stream = catch_unwind(AssertUnwindSafe(asked)).ok()?.ok()?;
        let reserved = Bytes::new(stream.bytes_reserved);
        usage.reserved += reserved;
        usage.in_use += Bytes::new(stream.bytes_in_use);
        if value == own {
            usage.own = reserved;
        }
    }
    Some(usage)
}
