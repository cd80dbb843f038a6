//! The server: gives every buffer a place on a page and forwards requests with page bindings in
//! place of buffers.
//!
//! It runs on the thread of burn's fusion (`DeviceServiceStage::Upstream`), so requests and frees
//! arrive in program order. Meanwhile the wrapped server runs forwarded work on its own thread, on
//! one stream. A place can therefore be reused as soon as its buffer is released here: all work
//! that used it has already been forwarded.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService, DeviceServiceStage, ServerUtilitiesHandle};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::future::{DynFut, block_on};
use cubecl_common::profile::ProfileDuration;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{
    Binding, ComputeServer, CopyDescriptor, CubeCount, ExecutionMode, Handle, IoError,
    KernelArguments, MemoryLayout, MemoryLayoutDescriptor, MemoryLayoutPolicy, ProfileError,
    ProfilingToken, ServerError, ServerUtilities, TensorMapBinding,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

use crate::buffer::{Buffer, number_of};
use crate::inner::{Inner, Page};
use crate::no_place::{NoPlace, Why};
use crate::pool::{Needed, PageId, Place, Pool, PoolMemory};
use crate::refusal::{Refusals, gone, no_buffer};
use crate::region::Region;
use crate::space::Fit;

/// Training in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Training {
    /// The stream of the training thread.
    pub(crate) stream: u64,
    /// The region for the training thread's buffers.
    pub(crate) region: Region,
    /// Limit on the bytes of all pages.
    pub(crate) limit: u64,
    /// Limit on the bytes of one page.
    pub(crate) largest_page: u64,
    /// Whether the last [`prepare`](PoolServer::prepare) of this training succeeded.
    pub(crate) is_prepared: bool,
}

/// The server of a [`Pooled`](crate::Pooled) runtime.
pub struct PoolServer<R: Runtime> {
    device: DeviceId,
    pub(crate) inner: Inner<R>,
    pub(crate) pool: Pool<Buffer>,
    /// The device memory of the pages.
    pub(crate) pages: HashMap<PageId, Page>,
    pub(crate) training: Option<Training>,
    /// Refusals that keep work from running.
    pub(crate) refusals: Refusals,
    pub(crate) utilities: Arc<ServerUtilities<Self>>,
}

impl<R: Runtime> fmt::Debug for PoolServer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolServer").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// The `Info` of a [`PoolServer`]: its link to the wrapped runtime.
pub struct PoolInfo<R: Runtime> {
    inner: Inner<R>,
}

impl<R: Runtime> PoolInfo<R> {
    pub(crate) fn inner(&self) -> &Inner<R> {
        &self.inner
    }
}

impl<R: Runtime> fmt::Debug for PoolInfo<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Lays tensors out as the wrapped runtime does.
pub struct Layout<R: Runtime>(Inner<R>);

impl<R: Runtime> MemoryLayoutPolicy for Layout<R> {
    fn apply(
        &self,
        stream: StreamId,
        descriptors: &[MemoryLayoutDescriptor],
    ) -> (Handle, Vec<MemoryLayout>) {
        self.0.utilities.layout_policy.apply(stream, descriptors)
    }
}

impl<R: Runtime> DeviceService for PoolServer<R> {
    fn init(device: DeviceId) -> Self {
        let inner = Inner::<R>::of(device);
        let properties = inner.utilities.properties.clone();
        let alignment = properties.memory.alignment;
        let logger = Arc::new(ServerLogger::default());
        let (info, layout) = (PoolInfo { inner: inner.clone() }, Layout(inner.clone()));
        let utilities = Arc::new(ServerUtilities::new(properties, logger, info, layout));
        Self {
            device,
            inner,
            pool: Pool::new(alignment, Fit::Best),
            pages: HashMap::new(),
            training: None,
            refusals: Refusals::default(),
            utilities,
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }

    fn stage() -> DeviceServiceStage {
        DeviceServiceStage::Upstream
    }
}

impl<R: Runtime> PoolServer<R> {
    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    pub(crate) fn server(&self) -> &DeviceHandle<R::Server> {
        &self.inner.server
    }

    fn region(&self, size: u64, stream: StreamId) -> Region {
        match self.training {
            None => Region::Lasting,
            Some(training) if training.stream == stream.value => training.region.home(size),
            Some(_) => Region::Beside.home(size),
        }
    }

    fn place(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        self.pool.collect();
        let region = self.region(size, stream);
        let buffer = Buffer::new(memory);
        let id = buffer.number();
        let Err((buffer, needed)) = self.pool.place(id, buffer, size, region) else {
            return;
        };
        // No page could be opened, but another region may still have room.
        if let Err(no_place) = self.open(needed, size)
            && !self.pool.has_room(size)
        {
            log::error!("{no_place}");
            self.refusals.add(no_place);
            return;
        }
        let placed = self.pool.place_anywhere(id, buffer, size, region);
        debug_assert!(placed.is_some(), "there is room for it");
    }

    /// Opens a page for a buffer of `size` bytes.
    pub(crate) fn open(&mut self, needed: Needed, size: u64) -> Result<PageId, NoPlace> {
        let limit = self.training.map_or(u64::MAX, |training| training.limit);
        if self.pool.memory().reserved.saturating_add(needed.size) > limit {
            self.close(None);
        }
        if self.pool.memory().reserved.saturating_add(needed.size) > limit {
            return Err(self.no_place(needed, size, Why::Limit { limit }));
        }
        let mut page = self.inner.open(needed.size);
        if page.is_none() && self.close(None) {
            page = self.inner.open(needed.size);
        }
        let Some(page) = page else {
            return Err(self.no_place(needed, size, Why::Refused { page: needed.size }));
        };
        log::debug!("a page of {} bytes for a buffer of {size}: {:?}", needed.size, needed.region);
        let id = self.pool.open(needed.region, needed.size);
        self.pages.insert(id, page);
        Ok(id)
    }

    pub(crate) fn no_place(&self, needed: Needed, size: u64, why: Why) -> NoPlace {
        let PoolMemory { in_use, reserved, .. } = self.pool.memory();
        NoPlace { size, largest_gap: self.pool.largest_gap(needed.region), in_use, reserved, why }
    }

    /// Returns pages without buffers to the device: those of `region`, or of all regions. Returns
    /// whether there were any.
    pub(crate) fn close(&mut self, region: Option<Region>) -> bool {
        let closed = self.pool.close_empty(region);
        closed.iter().for_each(|id| drop(self.pages.remove(id)));
        if !closed.is_empty() {
            self.inner.clean();
        }
        !closed.is_empty()
    }

    /// Translates a buffer's binding to its page and offset, for the wrapped server.
    fn translate(&self, binding: Binding) -> Result<Binding, IoError> {
        if binding.size == 0 {
            return Ok(Binding { stream: self.inner.stream, ..binding });
        }
        let place = self.pool.find(number_of(&binding.memory)).ok_or_else(no_buffer)?;
        let Place { page, offset, .. } = place;
        let page = self.pages.get(&page).ok_or_else(no_buffer)?;
        let start = binding.offset_start.unwrap_or(0);
        Ok(page.binding(offset + start, binding.size_in_used()))
    }

    fn translate_copy(&self, copy: CopyDescriptor) -> Result<CopyDescriptor, IoError> {
        Ok(CopyDescriptor { handle: self.translate(copy.handle)?, ..copy })
    }

    fn translate_launch(
        &self,
        count: CubeCount,
        arguments: KernelArguments,
    ) -> Result<(CubeCount, KernelArguments), IoError> {
        let KernelArguments { buffers, info, tensor_maps } = arguments;
        let count = match count {
            CubeCount::Dynamic(binding) => CubeCount::Dynamic(self.translate(binding)?),
            count => count,
        };
        let buffers = buffers.into_iter().map(|binding| self.translate(binding));
        let buffers = buffers.collect::<Result<_, _>>()?;
        let tensor_maps = tensor_maps.into_iter().map(|TensorMapBinding { binding, map }| {
            Ok(TensorMapBinding { binding: self.translate(binding)?, map })
        });
        let tensor_maps = tensor_maps.collect::<Result<_, IoError>>()?;
        Ok((count, KernelArguments { buffers, info, tensor_maps }))
    }

    fn tell_refusals(&mut self) -> Result<(), ServerError> {
        self.refusals.tell(self.training.is_some())
    }

    /// Skips an operation because one of its buffers has no place. Repeats the refusal, or logs it
    /// if there is none.
    fn leave_out(&mut self, what: &str, why: &IoError) {
        if !self.refusals.recur() {
            log::error!("{what} is left out: {why}");
        }
    }

    /// Reads the bytes of a place to the host.
    pub(crate) fn read_place(&self, place: Place) -> Result<Bytes, ServerError> {
        let page = self.pages.get(&place.page).ok_or_else(no_buffer)?;
        let copy = flat(page.binding(place.offset, place.size), place.size);
        let stream = self.inner.stream;
        let read = self.server().submit_blocking(move |server| server.read(vec![copy], stream));
        let mut bytes = block_on(read.map_err(|_| gone())?)?;
        Ok(bytes.remove(0))
    }

    pub(crate) fn write_place(&self, place: Place, bytes: Bytes) {
        let Some(page) = self.pages.get(&place.page) else { return };
        let copy = flat(page.binding(place.offset, place.size), place.size);
        let stream = self.inner.stream;
        self.server().submit(move |server| server.write(vec![(copy, bytes)], stream));
    }
}

fn flat(handle: Binding, size: u64) -> CopyDescriptor {
    CopyDescriptor { handle, shape: [size as usize].into(), strides: [1].into(), elem_size: 1 }
}

impl<R: Runtime> ComputeServer for PoolServer<R> {
    type Kernel = Box<dyn CubeTask<R::Compiler>>;
    type Info = PoolInfo<R>;
    type MemoryLayoutPolicy = Layout<R>;
    type Storage = <R::Server as ComputeServer>::Storage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        if size == 0 {
            // wgpu takes an empty binding to mean the rest of the page, so an empty buffer gets
            // memory of its own from the wrapped server.
            let stream = self.inner.stream;
            self.server().submit(move |server| server.initialize_memory(memory, size, stream));
            return;
        }
        self.place(memory, size, stream);
    }

    fn staging(&mut self, sizes: &[usize], _stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        let stream = self.inner.stream;
        let staged = self.server().submit_blocking(move |server| server.staging(sizes, stream));
        staged.map_err(|_| gone())?
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
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        if let Err(error) = self.tell_refusals() {
            return Box::pin(async move { Err(error) });
        }
        let descriptors: Result<Vec<_>, _> =
            descriptors.into_iter().map(|copy| self.translate_copy(copy)).collect();
        let stream = self.inner.stream;
        let read = descriptors.map_err(ServerError::from).and_then(|descriptors| {
            let read =
                self.server().submit_blocking(move |server| server.read(descriptors, stream));
            read.map_err(|_| gone())
        });
        read.unwrap_or_else(|error| Box::pin(async move { Err(error) }))
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _stream: StreamId) {
        if self.refusals.are_any() {
            return;
        }
        let translated =
            descriptors.into_iter().map(|(copy, bytes)| Ok((self.translate_copy(copy)?, bytes)));
        match translated.collect::<Result<Vec<_>, IoError>>() {
            Ok(descriptors) => {
                let stream = self.inner.stream;
                self.server().submit(move |server| server.write(descriptors, stream));
            }
            Err(error) => self.leave_out("a tensor's data", &error),
        }
    }

    fn sync(&mut self, _stream: StreamId) -> DynFut<Result<(), ServerError>> {
        let stream = self.inner.stream;
        let refused = self.tell_refusals();
        let synced = self.server().submit_blocking(move |server| server.sync(stream));
        match (refused, synced) {
            (Ok(()), Ok(synced)) => synced,
            (Ok(()), Err(_)) => Box::pin(async { Err(gone()) }),
            (Err(error), synced) => Box::pin(async move {
                if let Ok(synced) = synced {
                    drop(synced.await);
                }
                Err(error)
            }),
        }
    }

    /// The resource is valid as long as the buffer's tensor is.
    fn get_resource(
        &mut self,
        binding: Binding,
        _stream: StreamId,
    ) -> Result<ManagedResource<<Self::Storage as ComputeStorage>::Resource>, ServerError> {
        let binding = self.translate(binding)?;
        let stream = self.inner.stream;
        let found =
            self.server().submit_blocking(move |server| server.get_resource(binding, stream));
        found.map_err(|_| gone())?
    }

    // Safety: kernel and mode are forwarded unchanged. Each buffer is replaced by its place on a
    // page, which has the same size.
    #[allow(unsafe_code)]
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        _stream: StreamId,
    ) {
        if self.refusals.are_any() {
            return;
        }
        match self.translate_launch(count, arguments) {
            Ok((count, arguments)) => {
                let stream = self.inner.stream;
                self.server().submit(move |server| {
                    unsafe { server.launch(kernel, count, arguments, mode, stream) };
                });
            }
            Err(error) => self.leave_out("a kernel", &error),
        }
    }

    fn flush(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        self.tell_refusals()?;
        let stream = self.inner.stream;
        let flushed = self.server().submit_blocking(move |server| server.flush(stream));
        flushed.map_err(|_| gone())?
    }

    fn memory_usage(&mut self, _stream: StreamId) -> Result<MemoryUsage, ServerError> {
        // In addition to the pages, the wrapped server reserves memory that launches use
        // temporarily.
        let stream = self.inner.stream;
        let below = self.server().submit_blocking(move |server| server.memory_usage(stream));
        let below = below.map_err(|_| gone())??;
        self.pool.collect();
        let PoolMemory { in_use, buffers, .. } = self.pool.memory();
        Ok(MemoryUsage {
            number_allocs: buffers,
            bytes_in_use: in_use,
            bytes_padding: 0,
            bytes_reserved: below.bytes_reserved,
        })
    }

    fn memory_cleanup(&mut self, _stream: StreamId) {
        self.close(None);
    }

    fn start_profile(&mut self, _stream: StreamId) -> Result<ProfilingToken, ServerError> {
        self.refusals.begin_profile()?;
        let stream = self.inner.stream;
        let started = self.server().submit_blocking(move |server| server.start_profile(stream));
        started.map_err(|_| gone())?
    }

    fn end_profile(
        &mut self,
        _stream: StreamId,
        token: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        let stream = self.inner.stream;
        let ended = self.server().submit_blocking(move |server| server.end_profile(stream, token));
        let refused = self.refusals.end_profile();
        let ended = ended.map_err(|_| ProfileError::Server(Box::new(gone())))?;
        refused.map_err(|error| ProfileError::Server(Box::new(error)))?;
        ended
    }

    /// Ignored: [`Region`] already separates what lasts from what does not.
    fn allocation_mode(&mut self, _mode: MemoryAllocationMode, _stream: StreamId) {}
}
