//! The wrapped runtime: its server, which owns the device, and how the pool requests pages from it.

use std::any::{Any, TypeId};
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use burn_cubecl::CubeRuntime;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_fusion::client::GlobalFusionClient;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::client::ComputeClient;
use cubecl_runtime::config::memory::PersistentMemory;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{Binding, ComputeServer, Handle, ServerUtilities};
use parking_lot::RwLock;

/// The server of the wrapped runtime on one device.
pub(crate) struct Inner<R: Runtime> {
    pub(crate) server: DeviceHandle<R::Server>,
    pub(crate) client: ComputeClient<R>,
    pub(crate) utilities: Arc<ServerUtilities<R::Server>>,
    /// The one stream on which everything runs.
    pub(crate) stream: StreamId,
}

impl<R: Runtime> Clone for Inner<R> {
    fn clone(&self) -> Self {
        Self {
            server: self.server.clone(),
            client: self.client.clone(),
            utilities: self.utilities.clone(),
            stream: self.stream,
        }
    }
}

impl<R: Runtime> fmt::Debug for Inner<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("properties", &self.utilities.properties).finish()
    }
}

/// Runs what burn's own backend has queued on the device.
///
/// CubeCL holds one lock for all devices while it creates a server, and waits for the server's
/// thread. The pool's server is on the thread of burn's fusion. What waits there may wait for the
/// same lock: the first operation of burn's own backend creates clients. Whether what is queued
/// fails is not asked here.
fn run_queued<R: CubeRuntime>(device: &R::Device) {
    let client = || GlobalFusionClient::<FusionCubeRuntime<R>>::load(device).sync(|| ());
    let _ = catch_unwind(AssertUnwindSafe(client));
}

type Known = HashMap<(TypeId, DeviceId), Box<dyn Any + Send + Sync>>;

/// The wrapped servers created so far. CubeCL creates a server from a device number alone, and no
/// other server can be requested while it does so.
static KNOWN: LazyLock<RwLock<Known>> = LazyLock::new(RwLock::default);

impl<R: Runtime> Inner<R> {
    /// Creates the wrapped server on `device`, unless it exists.
    pub(crate) fn make_known(device: &R::Device)
    where
        R: CubeRuntime,
    {
        let key = (TypeId::of::<R>(), device.to_id());
        if KNOWN.read().contains_key(&key) {
            return;
        }
        let client = R::client(device);
        run_queued::<R>(device);
        let server = DeviceHandle::<R::Server>::new(device.to_id());
        let utilities = server.utilities().downcast();
        let utilities = utilities.expect("a server's utilities are of its own type");
        // Uses the last stream. If burn's own backend runs on the device too, this stream is the
        // least likely to belong to one of its threads.
        let streams = u64::from(CubeClRuntimeConfig::get().streaming.max_streams);
        let stream = StreamId { value: streams.saturating_sub(1) };
        let inner = Self { server, client, utilities, stream };
        KNOWN.write().insert(key, Box::new(inner));
    }

    /// The wrapped server on a device passed to [`make_known`](Self::make_known) before.
    pub(crate) fn of(device: DeviceId) -> Self {
        let known = KNOWN.read();
        let inner = known.get(&(TypeId::of::<R>(), device));
        let inner = inner.unwrap_or_else(|| panic!("{device} is used through `Runtime::client`"));
        inner.downcast_ref::<Self>().expect("the key has its type").clone()
    }

    /// Requests a page of exactly `size` bytes. `None` if the driver refuses.
    ///
    /// Uses the wrapped allocator's persistent mode. In its default mode the allocator would take a
    /// page of one of its own sizes.
    pub(crate) fn open(&self, size: u64) -> Option<Page> {
        let memory = ManagedMemoryHandle::new();
        let (stream, asked) = (self.stream, memory.clone());
        let opened = self.server.submit_blocking(move |server| {
            let _opens = Opens::begin();
            server.allocation_mode(MemoryAllocationMode::Persistent, stream);
            server.initialize_memory(asked, size, stream);
            server.allocation_mode(MemoryAllocationMode::Auto, stream);
        });
        if opened.is_err() {
            // The call panicked, as CubeCL's servers do when the driver refuses.
            self.server.submit(move |server| {
                server.allocation_mode(MemoryAllocationMode::Auto, stream);
            });
            return None;
        }
        Some(Page { memory: Handle::from_memory(memory, stream, size), size })
    }

    /// Makes the wrapped allocator return its free memory to the driver.
    pub(crate) fn clean(&self) {
        let stream = self.stream;
        self.server.submit(move |server| server.memory_cleanup(stream));
    }
}

thread_local! {
    static OPENS: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as requesting a page for as long as the value lives.
struct Opens;

impl Opens {
    fn begin() -> Self {
        OPENS.set(true);
        Self
    }
}

impl Drop for Opens {
    fn drop(&mut self) {
        OPENS.set(false);
    }
}

/// Whether this device thread is requesting a page. For panic hooks.
///
/// CubeCL's servers panic if the driver refuses a page. The pool handles that panic, so a hook
/// should not report it.
pub fn opens_a_page() -> bool {
    OPENS.try_with(Cell::get).unwrap_or(false)
}

/// Whether pages of an exact size are available. False if CubeCL's configuration disables
/// persistent memory.
pub fn has_exact_pages() -> bool {
    !matches!(CubeClRuntimeConfig::get().memory.persistent_memory, PersistentMemory::Disabled)
}

/// A page: one buffer of the wrapped runtime.
pub(crate) struct Page {
    memory: Handle,
    pub(crate) size: u64,
}

impl Page {
    /// The `size` bytes that start at `offset`.
    pub(crate) fn binding(&self, offset: u64, size: u64) -> Binding {
        let mut binding = self.memory.clone().binding();
        binding.offset_start = Some(offset);
        binding.offset_end = Some(self.size - offset - size);
        binding
    }
}
