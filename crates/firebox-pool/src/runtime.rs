//! The runtime that burn's `CubeBackend` uses to run on a pool, and the control through which the
//! Learner reaches that pool.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_cubecl::CubeRuntime;
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::zspace::{Shape, Strides};
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::client::ComputeClient;
use cubecl_runtime::runtime::Runtime;

use crate::inner::Inner;
use crate::no_place::NoPlace;
use crate::pool::PoolMemory;
use crate::region::{Pages, Region};
use crate::server::{PoolInfo, PoolServer};

/// The runtime `R` with firebox's pool in place of CubeCL's.
///
/// Devices, kernels and tuner choices stay the same. Only the places of buffers differ.
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

impl<R: CubeRuntime> Runtime for Pooled<R> {
    type Compiler = R::Compiler;
    type Server = PoolServer<R>;
    type Device = R::Device;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        Inner::<R>::make_known(device);
        // A server cannot be created on its own thread while that thread is working.
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

/// The pool of a device, for whoever plans its pages.
///
/// A request runs after everything already executed on the device. Operations still queued in
/// burn's fusion have not run.
pub struct Control<R: Runtime>(DeviceHandle<PoolServer<R>>);

impl<R: Runtime> fmt::Debug for Control<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Control")
    }
}

impl<R: CubeRuntime> Control<R> {
    /// The pool of `device`.
    pub fn of(device: &R::Device) -> Self {
        drop(Pooled::<R>::client(device));
        Self(DeviceHandle::new(device.to_id()))
    }

    fn ask<T: Send>(&self, ask: impl FnOnce(&mut PoolServer<R>) -> T + Send) -> T {
        self.0.submit_blocking(ask).expect("the pool does not panic")
    }

    /// The memory of the pool, after frees have been noticed.
    pub fn memory(&self) -> PoolMemory {
        self.ask(|server| {
            server.pool.collect();
            server.pool.memory()
        })
    }

    /// Begins training on the thread of `stream`. All pages together have at most `limit` bytes,
    /// and each has at most `largest_page`.
    pub fn begin(&self, stream: StreamId, limit: u64, largest_page: u64) {
        self.ask(|server| server.begin(stream, limit, largest_page));
    }

    /// The properties of the device.
    pub fn properties(&self) -> DeviceProperties {
        self.ask(|server| server.utilities.properties.clone())
    }

    /// The bytes of all buffers smaller than [`SMALL`](crate::SMALL), and the bytes of all other
    /// buffers.
    pub fn in_use_by_size(&self) -> [u64; 2] {
        self.ask(|server| {
            server.pool.collect();
            server.pool.in_use_by_size()
        })
    }

    /// Sets the region for the training thread's buffers from now on.
    pub fn enter(&self, region: Region) {
        self.0.submit(move |server| server.enter(region));
    }

    /// Opens pages of at least these bytes for each region and moves buffers to them, through the
    /// host's memory.
    ///
    /// # Errors
    ///
    /// The device refuses a page, or a page would exceed the limit. The contents of all buffers are
    /// kept, except if the device had no memory left for one ([`Why::Lost`](crate::Why::Lost)) or
    /// one could not be read ([`Why::Unread`](crate::Why::Unread)).
    pub fn prepare(&self, pages: Pages) -> Result<(), NoPlace> {
        self.ask(|server| server.prepare(pages))
    }

    /// Ends training and closes the pages without buffers.
    pub fn end(&self) {
        self.ask(PoolServer::end);
    }
}
