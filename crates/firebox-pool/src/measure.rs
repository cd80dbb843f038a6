//! A pool without a device: counts which pages training would need. The dry device asks it in place
//! of CubeCL's allocator.

use cubecl_common::stream_id::StreamId;
use cubecl_runtime::memory_management::ManagedMemoryHandle;

use crate::buffer::Buffer;
use crate::pool::{Lifetime, Pool, PoolMemory};
use crate::region::{Pages, Region};
use crate::space::Fit;

/// A [`Pool`] that opens a page whenever a buffer has no place, as large as pages may be. It places
/// the same requests in the same order as a [`Pooled`](crate::Pooled) runtime on pages of the sizes
/// that it [finds](Self::high).
pub struct Measure {
    pool: Pool<Buffer>,
    stream: u64,
    region: Region,
    largest_page: u64,
}

impl std::fmt::Debug for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Measure").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl Measure {
    /// An empty pool, while the thread of `stream` trains. A page has at most `largest_page` bytes.
    pub fn new(alignment: u64, stream: StreamId, largest_page: u64) -> Self {
        let mut pool = Pool::new(alignment, Fit::Best);
        pool.keep_lifetimes();
        let largest_page = pool.largest_page(largest_page);
        Self { pool, stream: stream.value, region: Region::Step, largest_page }
    }

    /// Sets the region for the training thread's buffers from now on.
    pub fn enter(&mut self, region: Region) {
        self.region = region;
    }

    /// Gives a buffer of `size` bytes a place until nobody holds `memory` any more.
    pub fn place(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        self.pool.collect();
        let region = if stream.value == self.stream { self.region } else { Region::Beside };
        let buffer = Buffer::new(memory);
        self.put(buffer.number(), buffer, size, region.home(size));
    }

    fn put(&mut self, id: u64, buffer: Buffer, size: u64, region: Region) {
        if let Err((buffer, needed)) = self.pool.place(id, buffer, size, region) {
            self.pool.open(needed.region, self.largest_page.max(needed.size));
            let placed = self.pool.place_anywhere(id, buffer, size, region);
            debug_assert!(placed.is_some(), "there is room on a new page");
        }
    }

    /// Puts the buffers of each of these regions on one page, the largest first. Restarts the
    /// high-water marks and the peak from the buffers in use.
    pub fn settle(&mut self, regions: &[Region]) {
        let lifted = self.pool.lift(regions);
        for region in regions {
            self.pool.close_empty(Some(*region));
        }
        for buffer in lifted {
            let (size, region) = (buffer.place.size, buffer.region);
            self.put(buffer.id, buffer.holder, size, region.home(size));
        }
        self.pool.forget_high();
    }

    /// Closes the pages without buffers.
    pub fn close_empty(&mut self) {
        self.pool.close_empty(None);
    }

    /// The memory of the pool, after frees have been noticed.
    pub fn memory(&mut self) -> PoolMemory {
        self.pool.collect();
        self.pool.memory()
    }

    /// The bytes used on the pages of each region since the last [`settle`](Self::settle).
    pub fn high(&mut self) -> Pages {
        self.pool.collect();
        self.pool.high()
    }

    /// The lifetimes of all buffers, in the order requested.
    pub fn lifetimes(&mut self) -> Vec<Lifetime> {
        self.pool.collect();
        self.pool.lifetimes().to_vec()
    }

    /// How many buffers were requested.
    pub fn requests(&self) -> u32 {
        self.pool.requests()
    }
}
