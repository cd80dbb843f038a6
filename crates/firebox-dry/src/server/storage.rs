//! The storage below the allocator. It hands out pages and keeps only their sizes.
//!
//! Mirrors `compute/storage/gpu.rs` of cubecl-cuda and `compute/storage.rs` of cubecl-wgpu. Both
//! free a page immediately when an explicit cleanup returns it (CUDA after the `flush` that the
//! pool calls right after). A real storage fails when the card is full. This one never does, so a
//! program that does not fit still shows what it needs.

use std::collections::{BTreeMap, HashMap};

use cubecl_runtime::server::IoError;
use cubecl_runtime::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};

/// Pages without memory.
#[derive(Debug, Default)]
pub struct DryStorage {
    alignment: usize,
    pages: HashMap<StorageId, u64>,
    reserved: u64,
}

impl DryStorage {
    /// A storage whose pages begin at multiples of `alignment` bytes.
    pub(crate) fn new(alignment: u64) -> Self {
        Self { alignment: alignment as usize, ..Self::default() }
    }

    /// The bytes of all pages.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The number of pages of each size.
    pub(crate) fn pages(&self) -> BTreeMap<u64, usize> {
        let mut sizes = BTreeMap::new();
        self.pages.values().for_each(|size| *sizes.entry(*size).or_default() += 1);
        sizes
    }
}

impl ComputeStorage for DryStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn get(&mut self, _handle: &StorageHandle) {}

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let id = StorageId::new();
        self.pages.insert(id, size);
        self.reserved += size;
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.reserved -= self.pages.remove(&id).unwrap_or(0);
    }

    fn flush(&mut self) {}
}
