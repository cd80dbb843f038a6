//! Checks whether an allocator has room for one more buffer, without opening a page.
//!
//! `server.rs` asks after each request, if the replay looks for room.

use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryManagement};
use cubecl_runtime::storage::ComputeStorage;

use crate::server::storage::DryStorage;

/// The free runs to look for, as divisors of the page size, largest run first. The largest buffer
/// on the smallest pages is between a fourth and a 64th of a page: the more memory a card has, the
/// smaller the part (`from_configuration` in `memory_management/memory_manage.rs` of
/// cubecl-runtime).
const RUNS_OF_A_PAGE: [u64; 3] = [16, 32, 64];

/// After a search that found no run, no run is looked for during this many requests.
const PATIENCE: u32 = 32;

/// What is known about the room on small pages.
///
/// Asking the allocator takes as long as an allocation. A known free run answers for many requests:
/// a buffer takes at most its own bytes from the run, and frees elsewhere take nothing from it.
#[derive(Debug, Default)]
pub(crate) struct SmallRoom {
    /// The size of the pages, one of which has the free run. All small buffers, down to a single
    /// byte, lie on such pages.
    page: u64,
    /// The bytes of the run.
    run: u64,
    /// The number of requests for which no run is looked for.
    patience: u32,
}

impl SmallRoom {
    /// Records that a buffer of `size` bytes was taken from `pools`.
    pub(crate) fn taken(
        &mut self,
        pools: &mut MemoryManagement<DryStorage>,
        buffer: &ManagedMemoryHandle,
        size: u64,
    ) {
        if self.run > 0 && page_of(pools, buffer) == Some(self.page) {
            self.run = self.run.saturating_sub(aligned(pools, size));
        }
    }

    /// Whether one more buffer of `size` bytes would open another page of `page` bytes, the
    /// smallest size that is open.
    pub(crate) fn would_open(
        &mut self,
        pools: &mut MemoryManagement<DryStorage>,
        page: u64,
        size: u64,
    ) -> bool {
        !self.has(pools, page, size) && ask(pools, size) == Room::NeedsPage(page)
    }

    /// Whether one more buffer of `size` bytes certainly has room on a page of `page` bytes.
    fn has(&mut self, pools: &mut MemoryManagement<DryStorage>, page: u64, size: u64) -> bool {
        let needed = aligned(pools, size);
        if self.page == page && self.run >= needed {
            return true;
        }
        if needed > page / RUNS_OF_A_PAGE[0] {
            return false;
        }
        if self.patience > 0 {
            self.patience -= 1;
            return false;
        }
        let alignment = pools.storage().alignment() as u64;
        let runs = RUNS_OF_A_PAGE.map(|part| page / part / alignment * alignment);
        let is_free = |run: &u64| [1, *run].iter().all(|size| ask(pools, *size) == Room::On(page));
        match runs.into_iter().filter(|run| *run >= needed).find(is_free) {
            Some(run) => {
                *self = Self { page, run, patience: 0 };
                true
            }
            None => {
                self.patience = PATIENCE;
                false
            }
        }
    }
}

/// What an allocator answers when it is asked for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// It has room on a page of this many bytes.
    On(u64),
    /// It would open a page of this many bytes.
    NeedsPage(u64),
    /// It can never hold such a buffer.
    Never,
}

/// Asks for a buffer of `size` bytes, rounded up to the alignment, and takes none.
///
/// The size is rounded up because a question splits the gap in which room is found. If a buffer
/// fills a gap except for its padding, the gap is smaller by the padding once the buffer is gone,
/// until it is merged with a free neighbour (`try_reserve` in
/// `memory_management/memory_pool/memory_page.rs` of cubecl-runtime). Questions should not create
/// such gaps. A side effect: within one alignment of the largest buffer of a pool, a question may
/// be about the next pool.
fn ask(pools: &mut MemoryManagement<DryStorage>, size: u64) -> Room {
    pools.storage().ask();
    let size = aligned(pools, size);
    let found = pools.reserve(size);
    let needed = pools.storage().answer();
    match (found, needed) {
        (Ok(buffer), _) => page_of(pools, &buffer).map_or(Room::Never, Room::On),
        (Err(_), Some(page)) => Room::NeedsPage(page),
        (Err(_), None) => Room::Never,
    }
}

/// The size of the page that a buffer lies on.
fn page_of(pools: &mut MemoryManagement<DryStorage>, buffer: &ManagedMemoryHandle) -> Option<u64> {
    let page = pools.get_storage(buffer.clone().binding()).ok()?.id;
    pools.storage().size_of(page)
}

fn aligned(pools: &mut MemoryManagement<DryStorage>, size: u64) -> u64 {
    size.next_multiple_of(pools.storage().alignment() as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cubecl::ir::MemoryDeviceProperties;
    use cubecl_runtime::logging::ServerLogger;
    use cubecl_runtime::memory_management::{MemoryConfiguration, MemoryManagementOptions};
    use proptest::prelude::*;

    use super::*;
    use crate::Card;

    const ALIGNMENT: u64 = 256;
    const MIB: u64 = 1 << 20;

    fn pools() -> MemoryManagement<DryStorage> {
        pools_of(&MemoryDeviceProperties { max_page_size: 128 * MIB, alignment: ALIGNMENT })
    }

    fn pools_of(memory: &MemoryDeviceProperties) -> MemoryManagement<DryStorage> {
        MemoryManagement::from_configuration(
            DryStorage::new(memory.alignment),
            memory,
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("dry memory"),
        )
    }

    fn take(
        pools: &mut MemoryManagement<DryStorage>,
        room: &mut SmallRoom,
        size: u64,
    ) -> ManagedMemoryHandle {
        let buffer = ManagedMemoryHandle::new();
        let reserved = pools.reserve(size).expect("it is small");
        room.taken(pools, &reserved, size);
        pools.bind(reserved, buffer.clone(), 0).expect("it was just reserved");
        buffer
    }

    #[test]
    fn a_question_leaves_gaps_of_whole_alignments_as_they_are() {
        let (mut pools, mut room) = (pools(), SmallRoom::default());
        let mut held: Vec<_> = (0..4).map(|_| take(&mut pools, &mut room, 2 * MIB)).collect();
        let page = 8 * MIB;
        assert_eq!(ask(&mut pools, 1), Room::NeedsPage(page), "the page is full");
        drop(held.swap_remove(1));
        for size in [1, MIB + 1, 2 * MIB - 1] {
            assert_eq!(ask(&mut pools, size), Room::On(page));
            assert!(!room.would_open(&mut pools, page, size));
        }
        held.push(take(&mut pools, &mut room, 2 * MIB));
        assert_eq!(pools.storage().pages(), [(page, 1)].into());
    }

    #[test]
    fn a_run_is_found_on_every_card() {
        for card in Card::all() {
            let memory = card.properties().memory;
            let (mut pools, mut room) = (pools_of(&memory), SmallRoom::default());
            let _buffer = take(&mut pools, &mut room, 256);
            let page = pools.storage().smallest_page().expect("a page is open");
            assert!(!room.would_open(&mut pools, page, 256));
            assert!(
                room.run >= page / 64 - memory.alignment,
                "{}: {} of {page}",
                card.name(),
                room.run
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_run_answers_as_the_allocator_does(
            sizes in prop::collection::vec((1u64..2 * MIB, 0usize..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut pools, mut room) = (pools(), SmallRoom::default());
            let mut held: Vec<ManagedMemoryHandle> = Vec::new();
            let (mut full, mut known) = (0, 0);
            for (size, freed, which) in sizes {
                held.push(take(&mut pools, &mut room, size));
                if freed == 0 {
                    held.swap_remove(which.index(held.len()));
                }
                let page = pools.storage().smallest_page().expect("a page is open");
                for size in [1, size / 64, size / 8, size] {
                    let opens = ask(&mut pools, size) == Room::NeedsPage(page);
                    prop_assert_eq!(room.would_open(&mut pools, page, size), opens, "{} bytes", size);
                    full += usize::from(opens);
                    known += usize::from(room.run > 0);
                }
            }
            prop_assert!(held.len() < 40 || full > 0, "the pools were never full");
            prop_assert!(held.len() < 40 || known > 0, "no run was found");
        }
    }
}
