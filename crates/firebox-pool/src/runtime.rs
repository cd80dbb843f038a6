//! The runtime: what makes burn's `CubeBackend` run on a pool.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::zspace::{Shape, Strides};
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::client::ComputeClient;
use cubecl_runtime::runtime::Runtime;

use crate::inner::Inner;
use crate::pool::{Pages, PoolMemory, Region};
use crate::refusal::NoPlace;
use crate::server::{PoolInfo, PoolServer};

/// The runtime `R` with a pool of its own in place of CubeCL's.
///
/// Same devices, same kernels, same choices of the tuner; other places for buffers.
pub struct Pooled<R: Runtime>(PhantomData<R>);

impl<R: Runtime> Clone for Pooled<R> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<R: Runtime> fmt::Debug for Pooled<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pooled")
    }
}

impl<R: Runtime> Runtime for Pooled<R> {
    type Compiler = R::Compiler;
    type Server = PoolServer<R>;
    type Device = R::Device;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        Inner::<R>::make_known(device);
        // A server cannot be made on the thread that it runs on while that thread works.
        catch_unwind(AssertUnwindSafe(|| ComputeClient::load(device))).unwrap_or_else(|_| {
            panic!(
                "the pool of {:?} has to be there before burn's fusion runs on the device: make a tensor first, or call \
                 `Backend::name(&device)`",
                device.to_id()
            )
        })
    }

    fn name(client: &ComputeClient<Self>) -> &'static str {
        R::name(&client.info().inner().client)
    }

    fn require_array_lengths() -> bool {
        R::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        R::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        R::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        R::target_properties()
    }

    fn enumerate_devices(type_id: u16, info: &PoolInfo<R>) -> Vec<DeviceId> {
        R::enumerate_devices(type_id, &info.inner().utilities.info)
    }

    fn enumerate_all_devices(info: &PoolInfo<R>) -> Vec<DeviceId> {
        R::enumerate_all_devices(&info.inner().utilities.info)
    }
}

/// The pool of a device, for whoever plans what lies on it.
///
/// What is asked of it comes behind everything that was executed on the device before; operations that burn's fusion still has
/// queued are not.
pub struct Control<R: Runtime>(DeviceHandle<PoolServer<R>>);

impl<R: Runtime> fmt::Debug for Control<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Control")
    }
}

impl<R: Runtime> Control<R> {
    /// The pool of `device`.
    pub fn of(device: &R::Device) -> Self {
        drop(Pooled::<R>::client(device));
        Self(DeviceHandle::new(device.to_id()))
    }

    fn ask<T: Send>(&self, ask: impl FnOnce(&mut PoolServer<R>) -> T + Send) -> T {
        self.0.submit_blocking(ask).expect("the pool does not panic")
    }

    /// Forgets all buffers and pages, and only finds out from now on which pages are needed. For a runtime that computes nothing.
    pub fn measure(&self) {
        self.ask(PoolServer::measure);
    }

    /// The memory of the pool.
    pub fn memory(&self) -> PoolMemory {
        self.ask(PoolServer::memory)
    }

    /// What was ever used of the pages of each region, since [`forget_high`](Self::forget_high).
    pub fn high(&self) -> Pages {
        self.ask(PoolServer::high)
    }

    /// Forgets what was used of pages before.
    pub fn forget_high(&self) {
        self.ask(PoolServer::forget_high);
    }

    /// From now on the thread of `stream` trains, all pages together have no more than `limit` bytes, and each has no more than
    /// `largest_page`.
    pub fn begin(&self, stream: StreamId, limit: u64, largest_page: u64) {
        self.ask(|server| server.begin(stream, limit, largest_page));
    }

    /// What is known of the device.
    pub fn properties(&self) -> DeviceProperties {
        self.ask(|server| server.utilities.properties.clone())
    }

    /// The bytes of the buffers of less than [`SMALL`](crate::SMALL) bytes, and of all others.
    pub fn in_use_by_size(&self) -> [u64; 2] {
        self.ask(|server| {
            server.pool.collect();
            server.pool.in_use_by_size()
        })
    }

    /// What the buffers of the training thread are for from now on.
    pub fn enter(&self, region: Region) {
        self.0.submit(move |server| server.enter(region));
    }

    /// Puts what lies in each of these regions on one page, the largest first, where pages are only measured. Forgets what was used before.
    pub fn settle(&self, regions: &'static [Region]) {
        self.ask(|server| server.settle(regions));
    }

    /// Has pages of at least these bytes for each region, and moves what lies on others there, through the host's memory.
    ///
    /// # Errors
    ///
    /// A page that the device refuses, or that would exceed the limit. What was there is there still, unless the error says that the
    /// device had no memory left for it ([`Why::Lost`](crate::Why::Lost)).
    pub fn prepare(&self, pages: Pages) -> Result<(), NoPlace> {
        self.ask(|server| server.prepare(pages))
    }

    /// Training is over: pages that nothing lies on are given back.
    pub fn end(&self) {
        self.ask(PoolServer::end);
    }
}
