//! The server: every request of burn's backend ends here and is counted.
//!
//! Mirrors the memory side of `compute/server.rs` and `compute/stream.rs` of cubecl-cuda, and of
//! `compute/server.rs`, `compute/stream.rs` and `compute/mem_manager.rs` of cubecl-wgpu. The
//! crate's documentation lists the points.

pub(crate) mod storage;
pub(crate) mod tuning;
pub(crate) mod usage;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cubecl::ir::{DeviceProperties, MemoryDeviceProperties};
use cubecl_common::bytes::Bytes as HostBytes;
use cubecl_common::device::{DeviceId, DeviceService, DeviceServiceStage, ServerUtilitiesHandle};
use cubecl_common::future::DynFut;
use cubecl_common::profile::{Instant, ProfileDuration};
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement,
    MemoryManagementOptions, MemoryUsage,
};
use cubecl_runtime::server::{
    Binding, ComputeServer, CopyDescriptor, CubeCount, ExecutionMode, KernelArguments,
    ProfileError, ProfilingToken, ServerCommunication, ServerError, ServerUtilities,
};
use cubecl_runtime::storage::ManagedResource;
use firebox_pool::Measure;
use firebox_trace::Bytes;

use crate::compiler::DryCompiler;
use crate::registry;
use crate::server::storage::DryStorage;
use crate::server::tuning::Name;
use crate::server::usage::Usage;
use crate::target::Target;

/// Every how many requests the bytes in use are added up. Adding up all buffers at every request
/// would take as long as the requests themselves.
const LOOK_EVERY: u64 = 16;

/// How many streams CubeCL has on a device. A thread's stream is its number modulo this.
pub fn max_streams() -> u64 {
    CubeClRuntimeConfig::get().streaming.max_streams.into()
}

/// The server of a dry device.
///
/// It runs on the thread of the fusion server (`DeviceServiceStage::Upstream`), so a request is
/// served when it is made. On a real device requests go to a separate thread, which takes them in
/// batches and later, when the program has dropped more. What is alive there at a request is a
/// subset of what is alive here.
#[derive(Debug)]
pub struct DryServer<T: Target> {
    /// firebox's pool in front of the allocators, if the device stands for one that has it.
    /// Launches take their own buffers from the allocators all the same.
    pool: Option<Measure>,
    /// The allocators, by stream.
    streams: BTreeMap<usize, MemoryManagement<DryStorage>>,
    max_streams: usize,
    memory: MemoryDeviceProperties,
    utilities: Arc<ServerUtilities<Self>>,
    usage: Usage,
    /// The number of buffers requested and kernels launched so far.
    calls: u64,
    /// The bytes requested so far, and what they were when each running profile began.
    requested: u64,
    profiles: BTreeMap<u64, u64>,
}

impl<T: Target> DryServer<T> {
    /// Forgets every page, as if the process had just begun. Buffers that are still alive are no
    /// longer counted.
    pub(crate) fn reset(&mut self) {
        self.pool = None;
        self.streams.clear();
        self.usage = Usage::default();
        self.calls = 0;
        self.requested = 0;
        self.profiles.clear();
    }

    /// Puts firebox's pool in front of the allocators, until the next [`reset`](Self::reset), for
    /// training on the thread of `stream`.
    pub(crate) fn begin_pool(&mut self, stream: StreamId) {
        let largest_page = T::largest_page(&self.utilities.properties);
        self.pool = Some(Measure::new(self.memory.alignment, stream, largest_page));
    }

    pub(crate) fn pool(&mut self) -> Option<&mut Measure> {
        self.pool.as_mut()
    }

    /// What the device reports about itself.
    pub(crate) fn info(&self) -> &DryInfo {
        &self.utilities.info
    }

    /// What was reserved since the last [`reset`](Self::reset).
    pub(crate) fn usage(&mut self) -> Usage {
        Usage { in_use: self.in_use(), ..self.usage.clone() }
    }

    /// The number of buffers requested and kernels launched. A program that runs twice makes the
    /// same number each time, unless burn's fusion has learned to run it differently.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// The bytes of all pages.
    pub(crate) fn reserved(&self) -> Bytes {
        self.usage.reserved
    }

    fn stream(&mut self, stream: StreamId) -> &mut MemoryManagement<DryStorage> {
        // As `StreamPool` of cubecl-runtime does.
        let index = stream.value as usize % self.max_streams;
        self.streams.entry(index).or_insert_with(|| {
            MemoryManagement::from_configuration(
                DryStorage::new(self.memory.alignment),
                &self.memory,
                MemoryConfiguration::default(),
                self.utilities.logger.clone(),
                MemoryManagementOptions::new("dry memory"),
            )
        })
    }

    /// The bytes that buffers hold.
    fn in_use(&self) -> Bytes {
        self.streams.values().map(|pools| Bytes::new(pools.memory_usage().bytes_in_use)).sum()
    }

    /// Takes `size` bytes from the pools of `stream`: for `memory`, or, without it, for a moment.
    fn reserve(&mut self, memory: Option<ManagedMemoryHandle>, size: u64, stream: StreamId) {
        self.calls += 1;
        self.requested += size;
        self.usage.largest = self.usage.largest.max(Bytes::new(size));
        let pools = self.stream(stream);
        let before = pools.storage().reserved();
        // It fails if no page is large enough.
        let Ok(reserved) = pools.reserve(size) else { return };
        if let Some(memory) = memory {
            pools.bind(reserved, memory, 0).expect("the pools know what they have just reserved");
        }
        let grown = pools.storage().reserved() - before;
        if grown > 0 || self.calls.is_multiple_of(LOOK_EVERY) {
            self.usage.most_in_use = self.usage.most_in_use.max(self.in_use());
        }
        if grown > 0 {
            self.note_growth(Bytes::new(grown));
        }
    }

    /// Notes the state of the pools after a page was opened.
    fn note_growth(&mut self, grown: Bytes) {
        self.usage.reserved += grown;
        if self.usage.reserved > self.usage.peak {
            self.usage.peak = self.usage.reserved;
            self.usage.pages = self.pages();
        }
    }

    /// The number of open pages of each size.
    fn pages(&mut self) -> BTreeMap<Bytes, usize> {
        let mut pages = BTreeMap::new();
        for pools in self.streams.values_mut() {
            for (size, count) in pools.storage().pages() {
                *pages.entry(Bytes::new(size)).or_default() += count;
            }
        }
        pages
    }
}

/// What a dry device reports about itself.
#[derive(Debug)]
pub struct DryInfo {
    /// The name of its runtime, under which burn's tuner stores its choices.
    name: Mutex<Name>,
}

impl DryInfo {
    fn new<T: Target>(properties: &DeviceProperties) -> Self {
        let MemoryDeviceProperties { max_page_size, alignment } = properties.memory;
        let name = format!("{}-{:x}-{max_page_size}-{alignment}", T::NAME, properties.checksum());
        Self { name: Mutex::new(Name::new(name)) }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.tuned().get()
    }

    /// What the tuner has stored for the device.
    pub(crate) fn tuned(&self) -> MutexGuard<'_, Name> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Target> DeviceService for DryServer<T> {
    fn init(device: DeviceId) -> Self {
        let properties = registry::properties_of(device);
        let memory = properties.memory.clone();
        let info = DryInfo::new::<T>(&properties);
        let layout = T::layout(memory.alignment);
        let logger = Arc::new(ServerLogger::default());
        let utilities = ServerUtilities::new(properties, logger, info, layout);
        Self {
            pool: None,
            streams: BTreeMap::new(),
            max_streams: max_streams() as usize,
            memory,
            utilities: Arc::new(utilities),
            usage: Usage::default(),
            calls: 0,
            requested: 0,
            profiles: BTreeMap::new(),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }

    fn stage() -> DeviceServiceStage {
        DeviceServiceStage::Upstream
    }
}

impl<T: Target> ServerCommunication for DryServer<T> {
    const SERVER_COMM_ENABLED: bool = false;
}

impl<T: Target> ComputeServer for DryServer<T> {
    type Kernel = Box<dyn CubeTask<DryCompiler>>;
    type Info = DryInfo;
    type MemoryLayoutPolicy = T::Layout;
    type Storage = DryStorage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        match &mut self.pool {
            // An empty buffer has no place on a page.
            Some(pool) if size > 0 => {
                self.calls += 1;
                self.requested += size;
                pool.place(memory, size, stream);
            }
            _ => self.reserve(Some(memory), size, stream),
        }
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _stream: StreamId,
    ) -> DynFut<Result<Vec<HostBytes>, ServerError>> {
        let zeros = descriptors.into_iter().map(|read| {
            let elements: usize = read.shape.iter().product();
            HostBytes::from_bytes_vec(vec![0; elements * read.elem_size])
        });
        let zeros = zeros.collect();
        Box::pin(async move { Ok(zeros) })
    }

    fn write(&mut self, _descriptors: Vec<(CopyDescriptor, HostBytes)>, _stream: StreamId) {}

    fn sync(&mut self, _stream: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn get_resource(
        &mut self,
        binding: Binding,
        _stream: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        Ok(ManagedResource::new(binding.memory, ()))
    }

    // Safety: no kernel runs.
    #[allow(unsafe_code)]
    unsafe fn launch(
        &mut self,
        _kernel: Self::Kernel,
        _count: CubeCount,
        arguments: KernelArguments,
        _mode: ExecutionMode,
        stream: StreamId,
    ) {
        let buffer = T::launch_buffer(&self.utilities.properties, &arguments.info);
        self.calls += 1;
        // The buffer is taken while the arguments are held. Both are released when the launch is
        // issued.
        if let Some(size) = buffer {
            self.reserve(None, size, stream);
        }
        drop(arguments);
    }

    fn flush(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, stream: StreamId) -> Result<MemoryUsage, ServerError> {
        Ok(self.stream(stream).memory_usage())
    }

    fn memory_cleanup(&mut self, stream: StreamId) {
        if let Some(pool) = &mut self.pool {
            return pool.close_empty();
        }
        let pools = self.stream(stream);
        let before = pools.storage().reserved();
        pools.cleanup(true);
        let freed = before - pools.storage().reserved();
        self.usage.reserved -= Bytes::new(freed);
    }

    fn start_profile(&mut self, _stream: StreamId) -> Result<ProfilingToken, ServerError> {
        let id = self.profiles.last_key_value().map_or(0, |(id, _)| id + 1);
        self.profiles.insert(id, self.requested);
        self.usage.tuned += 1;
        Ok(ProfilingToken { id })
    }

    /// Answers the tuner. The more memory a candidate requests, the faster it is reported to be, so
    /// the estimate bounds whatever the real device chooses.
    fn end_profile(
        &mut self,
        _stream: StreamId,
        token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        let started = self.profiles.remove(&token.id).unwrap_or(self.requested);
        let taken = self.requested - started;
        let lasted = Duration::from_nanos(u64::MAX / 2 / (taken + 1) / 1_000_000);
        let start = Instant::now();
        Ok(ProfileDuration::new_system_time(start, start + lasted))
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, stream: StreamId) {
        self.stream(stream).mode(mode);
    }
}
