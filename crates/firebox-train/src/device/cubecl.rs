//! burn's GPU backends: one backend over CubeCL runtimes, with or without fusion. The differences
//! between runtimes are in [`RuntimeMemory`].

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn_backend::{ExecutionError, StreamId};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::{BoolElement, CubeBackend, CubeTuneId, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_fusion::client::GlobalFusionClient;
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::server::ServerError;
use firebox_dry::{Dry, DryRuntime, DryTwin, Mirrored, Target};
use firebox_plan::MemoryInfo;
use firebox_pool::{Control, NoPlace, Pages, Pooled, Region, has_exact_pages};
use firebox_recompute::Rates;
use firebox_trace::{Bytes, MemoryModel};

use super::{DeviceMemory, PoolUsage};
use crate::device::own_pool::{Controls, OwnPool};
use crate::error::TrainError;

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

    /// See [`DeviceMemory::give_back`].
    fn give_back(device: &Self::Device) {
        let client = Self::client(device);
        for stream in streams().into_iter().flatten() {
            stream.executes(|| client.memory_cleanup());
        }
    }

    /// See [`DeviceMemory::own_pool`].
    fn own_pool(_device: &Self::Device) -> Option<OwnPool> {
        None
    }
}

/// The same devices with firebox's pool. The pool has one stream for all threads.
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

    fn give_back(device: &Self::Device) {
        Self::client(device).memory_cleanup();
    }

    fn own_pool(device: &Self::Device) -> Option<OwnPool> {
        Some(OwnPool::new(Control::<R>::of(device)))
    }
}

#[cfg(feature = "cuda")]
impl RuntimeMemory for cubecl::cuda::CudaRuntime {
    fn prerequisites() -> Result<(), TrainError> {
        Ok(crate::device::prerequisites::check_cuda()?)
    }

    fn memory_info(device: &Self::Device) -> Result<MemoryInfo, TrainError> {
        Ok(crate::device::nvidia::cuda_memory(device.index)?)
    }

    fn rates(device: &Self::Device) -> Option<Rates> {
        let name = crate::device::nvidia::name(device.index)?;
        crate::device::rates::rates_of(firebox_dry::Card::of_driver(&name)?)
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

/// What a backend over the runtime `R` answers with fusion as without.
macro_rules! of_runtime {
    () => {
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

        fn own_pool(device: &Self::Device) -> Option<OwnPool> {
            R::own_pool(device)
        }

        fn give_back(device: &Self::Device) {
            R::give_back(device);
        }
    };
}

impl<R, F, I, B> DeviceMemory for CubeBackend<R, F, I, B>
where
    R: RuntimeMemory,
    F: FloatElement,
    I: IntElement,
    B: BoolElement,
{
    of_runtime!();

    fn settle(device: &Self::Device) -> Result<(), ExecutionError> {
        issued(R::client(device).flush())
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

    of_runtime!();
}

impl<R: RuntimeMemory> Controls for Control<R> {
    fn begin(&self, stream: StreamId, limit: Bytes) {
        let largest_page = <R::Target as Target>::largest_page(&self.properties());
        self.begin(stream, limit.get(), largest_page);
    }

    fn small_in_use(&self) -> Bytes {
        Bytes::new(self.in_use_by_size()[0])
    }

    fn enter(&self, region: Region) {
        self.enter(region);
    }

    fn prepare(&self, pages: Pages) -> Result<Bytes, NoPlace> {
        self.prepare(pages)?;
        Ok(Bytes::new(self.memory().reserved))
    }

    fn end(&self) {
        self.end();
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

/// The streams that have pools: one for each thread. A client answers for the stream of the asking
/// thread, and a thread can ask in another's name. Asking for an unused stream would create it with
/// empty pools, so these are streams of threads that have existed. The first is the caller's.
fn streams() -> Option<impl Iterator<Item = StreamId>> {
    let max = firebox_dry::max_streams();
    let own = StreamId::current().value % max;
    let threads = std::thread::spawn(|| StreamId::current().value).join().ok()?;
    let mut others: BTreeSet<u64> = (0..threads.min(max)).collect();
    others.extend(firebox_lazy::loader_streams().iter().map(|stream| stream.value % max));
    others.remove(&own);
    Some(std::iter::once(own).chain(others).map(|value| StreamId { value }))
}

/// Sums the usage of all streams.
fn pool_usage<R: Runtime>(client: &ComputeClient<R>) -> Option<PoolUsage> {
    let mut usage: Option<PoolUsage> = None;
    for stream in streams()? {
        // CubeCL's client panics where the server does, for example if a stream cannot be created.
        let asked = || stream.executes(|| client.memory_usage());
        let of_stream = catch_unwind(AssertUnwindSafe(asked)).ok()?.ok()?;
        let reserved = Bytes::new(of_stream.bytes_reserved);
        let all = usage.get_or_insert(PoolUsage { own: reserved, ..PoolUsage::default() });
        all.reserved += reserved;
        all.in_use += Bytes::new(of_stream.bytes_in_use);
    }
    usage
}
