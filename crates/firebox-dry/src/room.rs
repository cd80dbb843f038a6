//! Whether an allocator has room for one more buffer, found out without opening a page.

use cubecl_runtime::memory_management::MemoryManagement;
use cubecl_runtime::storage::ComputeStorage;

use crate::storage::DryStorage;

/// The part of a page that is asked for as one run: the largest buffer of the smallest pages on CUDA (`from_configuration` in
/// `memory_management/memory_manage.rs` of cubecl-runtime).
const RUNS_OF_A_PAGE: u64 = 16;

/// What is known of the room on small pages.
///
/// To ask for a buffer takes as long as to give one out. A run of bytes that is free answers for many: a buffer takes no more
/// of it than its own bytes, and what becomes free elsewhere takes nothing from it.
#[derive(Debug, Default)]
pub(crate) struct SmallRoom {
    /// The size of the pages, one of which has a free run.
    page: u64,
    /// The bytes of the run.
    run: u64,
}

impl SmallRoom {
    /// Says that a buffer of `size` bytes was taken of `pools`, wherever it lies.
    pub(crate) fn taken(&mut self, pools: &mut MemoryManagement<DryStorage>, size: u64) {
        self.run = self.run.saturating_sub(aligned(pools, size));
    }

    /// Whether one more buffer of `size` bytes would open another page of `page` bytes.
    pub(crate) fn would_open(
        &mut self,
        pools: &mut MemoryManagement<DryStorage>,
        page: u64,
        size: u64,
    ) -> bool {
        let needed = aligned(pools, size);
        if self.page == page && self.run >= needed {
            return false;
        }
        let run = page / RUNS_OF_A_PAGE;
        if needed <= run && ask(pools, run) == Room::On(page) {
            *self = Self { page, run };
            return false;
        }
        ask(pools, size) == Room::NeedsPage(page)
    }
}

/// What an allocator says when it is asked for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// It has room on a page of so many bytes.
    On(u64),
    /// It would open a page of so many bytes.
    NeedsPage(u64),
    /// It never has.
    Never,
}

/// Asks for a buffer of `size` bytes and takes none.
fn ask(pools: &mut MemoryManagement<DryStorage>, size: u64) -> Room {
    pools.storage().ask();
    let found = pools.reserve(size);
    let needed = pools.storage().answer();
    let page = found.map(|memory| pools.get_storage(memory.clone().binding()).map(|on| on.id));
    match (page, needed) {
        (Ok(Ok(page)), _) => pools.storage().size_of(page).map_or(Room::Never, Room::On),
        (_, Some(page)) => Room::NeedsPage(page),
        (_, None) => Room::Never,
    }
}

fn aligned(pools: &mut MemoryManagement<DryStorage>, size: u64) -> u64 {
    size.next_multiple_of(pools.storage().alignment() as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cubecl::ir::MemoryDeviceProperties;
    use cubecl_runtime::logging::ServerLogger;
    use cubecl_runtime::memory_management::{
        ManagedMemoryHandle, MemoryConfiguration, MemoryManagementOptions,
    };
    use proptest::prelude::*;

    use super::*;

    const ALIGNMENT: u64 = 256;
    const MIB: u64 = 1 << 20;

    fn pools() -> MemoryManagement<DryStorage> {
        let memory = MemoryDeviceProperties { max_page_size: 128 * MIB, alignment: ALIGNMENT };
        MemoryManagement::from_configuration(
            DryStorage::new(ALIGNMENT),
            &memory,
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("dry memory"),
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_run_answers_as_the_allocator_does(
            sizes in prop::collection::vec((1u64..2 * MIB, 0usize..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut pools, mut room) = (pools(), SmallRoom::default());
            let mut held: Vec<ManagedMemoryHandle> = Vec::new();
            let mut full = 0;
            for (size, freed, which) in sizes {
                let handle = ManagedMemoryHandle::new();
                let reserved = pools.reserve(size).expect("it is small");
                pools.bind(reserved, handle.clone(), 0).expect("it was just reserved");
                held.push(handle);
                room.taken(&mut pools, size);
                if freed == 0 {
                    held.swap_remove(which.index(held.len()));
                }
                let page = pools.storage().smallest_page().expect("a page is open");
                let opens = ask(&mut pools, size) == Room::NeedsPage(page);
                prop_assert_eq!(room.would_open(&mut pools, page, size), opens);
                full += usize::from(opens);
            }
            prop_assert!(held.len() < 40 || full > 0, "the pools were never full");
        }
    }
}
