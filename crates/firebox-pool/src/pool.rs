//! The pool: which buffer has which place on which page. Knows no device.
//!
//! `server.rs` runs it on a device; the dry device runs it without one, to predict pages.

use std::collections::BTreeMap;
use std::fmt;

use rustc_hash::FxHashMap;

use crate::region::{Pages, Region, SMALL, SMALL_PAGE};
use crate::space::{Fit, Space};

/// The owner of a buffer, outside of the pool.
pub trait Holder {
    /// Whether nobody holds the buffer any more.
    fn is_free(&self) -> bool;
}

/// The number of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub(crate) u32);

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page.
    pub page: PageId,
    /// Offset on the page, in bytes.
    pub offset: u64,
    /// Bytes taken: the buffer's size, rounded up to the alignment.
    pub size: u64,
}

/// The page to open for a buffer that found no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needed {
    /// The region of the page.
    pub region: Region,
    /// The size of the page in bytes.
    pub size: u64,
}

/// The place and lifetime of one buffer. Used to evaluate a placement and to draw the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// What the buffer was used for.
    pub region: Region,
    /// Where it was.
    pub place: Place,
    /// Number of the request that created it, from 1.
    pub begin: u32,
    /// Number of the first request after it was freed; `None` if it is still in use.
    pub end: Option<u32>,
}

/// The lifetimes, and the number of requests so far.
#[derive(Debug, Default)]
struct Lifetimes {
    all: Vec<Lifetime>,
    requests: u32,
}

struct Page {
    region: Region,
    space: Space,
    /// Whether the page stays open while it holds no buffer.
    stays: bool,
}

struct Slot<H> {
    id: u64,
    holder: H,
    place: Place,
    region: Region,
    /// Its index among the lifetimes, if they are kept.
    lifetime: Option<usize>,
}

/// The place of a buffer that is not on a page yet.
fn nowhere(size: u64) -> Place {
    Place { page: PageId(u32::MAX), offset: 0, size }
}

/// A snapshot of a pool's memory. All sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolMemory {
    /// Bytes of all pages. A page without a fixed size counts its high-water mark.
    pub reserved: u64,
    /// Bytes of all buffers, each rounded up to the alignment.
    pub in_use: u64,
    /// Peak of `in_use`, as far as frees have been noticed.
    pub most_in_use: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Size of the largest buffer so far.
    pub largest: u64,
}

/// Assigns buffers to places on pages. The caller decides when to open a page.
///
/// The same requests and frees in the same order give the same places, on any machine.
pub struct Pool<H> {
    alignment: u64,
    fit: Fit,
    pages: BTreeMap<PageId, Page>,
    next_page: u32,
    slots: Vec<Slot<H>>,
    by_id: FxHashMap<u64, usize>,
    in_use: u64,
    most_in_use: u64,
    largest: u64,
    lifetimes: Option<Lifetimes>,
}

impl<H> fmt::Debug for Pool<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, buffers) = (self.pages.len(), self.slots.len());
        f.debug_struct("Pool").field("pages", &pages).field("buffers", &buffers).finish()
    }
}

impl<H: Holder> Pool<H> {
    /// A pool without pages. Buffers start at multiples of `alignment` bytes.
    pub fn new(alignment: u64, fit: Fit) -> Self {
        Self {
            alignment: alignment.max(1),
            fit,
            pages: BTreeMap::new(),
            next_page: 0,
            slots: Vec::new(),
            by_id: FxHashMap::default(),
            in_use: 0,
            most_in_use: 0,
            largest: 0,
            lifetimes: None,
        }
    }

    /// Records the [lifetimes](Self::lifetimes) of all buffers from now on.
    ///
    /// # Panics
    ///
    /// If there are buffers already.
    pub fn keep_lifetimes(&mut self) {
        assert!(self.slots.is_empty(), "lifetimes are kept from the first buffer on");
        self.lifetimes = Some(Lifetimes::default());
    }

    /// The lifetimes of all buffers, in the order requested. Empty unless they are
    /// [kept](Self::keep_lifetimes).
    pub fn lifetimes(&self) -> &[Lifetime] {
        self.lifetimes.as_ref().map_or(&[], |kept| &kept.all)
    }

    /// How many requests were counted. Zero unless lifetimes are [kept](Self::keep_lifetimes).
    pub fn requests(&self) -> u32 {
        self.lifetimes.as_ref().map_or(0, |kept| kept.requests)
    }

    /// Ends a lifetime, if they are kept.
    fn end_lifetime(&mut self, lifetime: Option<usize>) {
        if let (Some(kept), Some(at)) = (&mut self.lifetimes, lifetime) {
            kept.all[at].end = Some(kept.requests + 1);
        }
    }

    /// The most bytes of a page that may have `limit` bytes: places begin and end at multiples of
    /// the alignment.
    pub fn largest_page(&self, limit: u64) -> u64 {
        match limit {
            u64::MAX => u64::MAX,
            limited => limited - limited % self.alignment,
        }
    }

    /// The bytes a buffer of `size` bytes takes on its page.
    pub fn taken_by(&self, size: u64) -> u64 {
        size.next_multiple_of(self.alignment)
    }

    /// Frees the places of buffers nobody holds any more.
    pub fn collect(&mut self) {
        let mut at = 0;
        while at < self.slots.len() {
            if self.slots[at].holder.is_free() {
                drop(self.take_off(at));
            } else {
                at += 1;
            }
        }
    }

    /// Takes a buffer off its page.
    fn take_off(&mut self, at: usize) -> Slot<H> {
        let slot = self.slots.swap_remove(at);
        self.by_id.remove(&slot.id);
        if let Some(moved) = self.slots.get(at) {
            self.by_id.insert(moved.id, at);
        }
        self.in_use -= slot.place.size;
        let page = self.pages.get_mut(&slot.place.page).expect("a buffer lies on a page");
        page.space.give(slot.place.offset, slot.place.size);
        self.end_lifetime(slot.lifetime);
        slot
    }

    /// Finds a place for `size` bytes of the buffer `id`, held by `holder`.
    ///
    /// # Errors
    ///
    /// If no page of the region has room: returns the holder, and the page to open.
    pub fn place(
        &mut self,
        id: u64,
        holder: H,
        size: u64,
        region: Region,
    ) -> Result<Place, (H, Needed)> {
        let taken = self.taken_by(size);
        match self.page_for(taken, Some(region)) {
            Some(page) => {
                Ok(self
                    .put(page, Slot { id, holder, place: nowhere(taken), region, lifetime: None }))
            }
            None => {
                let shared = size < SMALL && region != Region::Step;
                let size = if shared { self.taken_by(SMALL_PAGE).max(taken) } else { taken };
                Err((holder, Needed { region, size }))
            }
        }
    }

    /// As [`place`](Self::place), but falls back to the pages of other regions. `None` if no page
    /// has room.
    pub fn place_anywhere(
        &mut self,
        id: u64,
        holder: H,
        size: u64,
        region: Region,
    ) -> Option<Place> {
        let taken = self.taken_by(size);
        let page = self.page_for(taken, Some(region)).or_else(|| self.page_for(taken, None))?;
        Some(self.put(page, Slot { id, holder, place: nowhere(taken), region, lifetime: None }))
    }

    /// Places a lifted buffer on `page`, at the offset it had before, if that place is free.
    ///
    /// # Errors
    ///
    /// If it is not free: returns the buffer.
    pub fn place_at(&mut self, page: PageId, buffer: Lifted<H>) -> Result<Place, Lifted<H>> {
        let Place { offset, size, .. } = buffer.place;
        let space = self.pages.get_mut(&page).map(|page| &mut page.space);
        if !space.is_some_and(|space| space.take_at(offset, size)) {
            return Err(buffer);
        }
        let Lifted { id, holder, region, .. } = buffer;
        let place = Place { page, offset, size };
        self.note(Slot { id, holder, place, region, lifetime: None });
        Ok(place)
    }

    /// Whether any page has room for `size` bytes.
    pub fn has_room(&self, size: u64) -> bool {
        self.page_for(self.taken_by(size), None).is_some()
    }

    /// Among the pages of a region, or all pages: the one with the best-fitting gap. Without such a
    /// gap, the first page with a long enough free piece.
    fn page_for(&self, taken: u64, region: Option<Region>) -> Option<PageId> {
        let of_region = |page: &Page| region.is_none_or(|region| page.region == region);
        let pages = self.pages.iter().filter(|(_, page)| of_region(page));
        let gaps = pages.clone().filter_map(|(id, page)| Some((page.space.gap_for(taken)?, *id)));
        let best = gaps.min().map(|(_, id)| id);
        let mut with_room = pages.filter(|(_, page)| page.space.largest_gap() >= taken);
        best.or_else(|| with_room.next().map(|(id, _)| *id))
    }

    fn put(&mut self, page: PageId, slot: Slot<H>) -> Place {
        let size = slot.place.size;
        let space = &mut self.pages.get_mut(&page).expect("it was just found").space;
        let offset = space.take(size).expect("the page was found to have room");
        let place = Place { page, offset, size };
        self.note(Slot { place, ..slot });
        place
    }

    fn note(&mut self, mut slot: Slot<H>) {
        let size = slot.place.size;
        if let Some(kept) = &mut self.lifetimes {
            let Slot { region, place, .. } = slot;
            kept.requests += 1;
            slot.lifetime = Some(kept.all.len());
            kept.all.push(Lifetime { region, place, begin: kept.requests, end: None });
        }
        self.by_id.insert(slot.id, self.slots.len());
        self.slots.push(slot);
        self.in_use += size;
        self.largest = self.largest.max(size);
        self.most_in_use = self.most_in_use.max(self.in_use);
    }

    /// Opens a page of `size` bytes for a region.
    pub fn open(&mut self, region: Region, size: u64) -> PageId {
        let id = PageId(self.next_page);
        self.next_page += 1;
        // Every optimizer step replaces lasting buffers by others of the same sizes, while other
        // threads may hold some of the old ones longer.
        let fit = if region == Region::Lasting { Fit::Same } else { self.fit };
        self.pages.insert(id, Page { region, space: Space::new(size, fit), stays: false });
        id
    }

    /// Sets whether a page stays open while it holds no buffer.
    pub fn stays(&mut self, page: PageId, stays: bool) {
        if let Some(page) = self.pages.get_mut(&page) {
            page.stays = stays;
        }
    }

    /// Chooses the places on a page by `fit` from now on. For pages of other regions than
    /// [`Region::Lasting`], which have [`Fit::Same`].
    pub fn set_fit(&mut self, page: PageId, fit: Fit) {
        if let Some(page) = self.pages.get_mut(&page) {
            page.space.set_fit(fit);
        }
    }

    /// How places on a page are chosen.
    pub fn fit(&self, page: PageId) -> Option<Fit> {
        self.pages.get(&page).map(|page| page.space.fit())
    }

    /// The place of a buffer, if the pool has it.
    pub fn find(&self, id: u64) -> Option<Place> {
        self.by_id.get(&id).map(|at| self.slots[*at].place)
    }

    /// Takes all buffers of `regions`, and all other buffers on their pages, off their pages. The
    /// pages are empty afterwards.
    ///
    /// Returns the buffers in the order in which to put them back: the largest first, and the older
    /// of two with equal size.
    pub fn lift(&mut self, regions: &[Region]) -> Vec<Lifted<H>> {
        self.collect();
        let mut lifted = Vec::new();
        let mut at = 0;
        while at < self.slots.len() {
            let Slot { region, place, .. } = &self.slots[at];
            if !regions.contains(region) && !regions.contains(&self.pages[&place.page].region) {
                at += 1;
                continue;
            }
            let Slot { id, holder, place, region, .. } = self.take_off(at);
            lifted.push(Lifted { id, holder, place, region });
        }
        lifted.sort_by_key(|lifted| (std::cmp::Reverse(lifted.place.size), lifted.id));
        lifted
    }

    /// The pages of a region, with their sizes in bytes.
    pub fn pages_of(&self, region: Region) -> impl Iterator<Item = (PageId, u64)> + use<'_, H> {
        let pages = self.pages.iter().filter(move |(_, page)| page.region == region);
        pages.map(|(id, page)| (*id, page.space.size()))
    }

    /// Closes pages without buffers that need not stay, in one region or in all. Returns them.
    pub fn close_empty(&mut self, region: Option<Region>) -> Vec<PageId> {
        self.collect();
        let closes = |page: &Page| {
            page.space.is_empty()
                && !page.stays
                && region.is_none_or(|region| region == page.region)
        };
        let closed = self.pages.iter().filter(|(_, page)| closes(page)).map(|(id, _)| *id);
        let closed: Vec<PageId> = closed.collect();
        closed.iter().for_each(|id| drop(self.pages.remove(id)));
        closed
    }

    /// The bytes each region needs: the high-water mark of its last page, plus all pages before it,
    /// which count as full.
    pub fn high(&self) -> Pages {
        let mut high = Pages::default();
        for region in Region::ALL {
            let mut pages = self.pages.values().filter(|page| page.region == region).rev();
            let last = pages.next().map_or(0, |page| page.space.high());
            *high.of_mut(region) = last + pages.map(|page| page.space.size()).sum::<u64>();
        }
        high
    }

    /// The bytes of all buffers smaller than [`SMALL`], and the bytes of all other buffers.
    pub fn in_use_by_size(&self) -> [u64; 2] {
        let of = |is_small: bool| {
            let sizes = self.slots.iter().map(|slot| slot.place.size);
            sizes.filter(|size| (*size < SMALL) == is_small).sum()
        };
        [of(true), of(false)]
    }

    /// Restarts the high-water marks and the peak from the buffers in use now.
    pub fn forget_high(&mut self) {
        self.collect();
        self.pages.values_mut().for_each(|page| page.space.forget_high());
        self.most_in_use = self.in_use;
    }

    /// The pool's memory now.
    pub fn memory(&self) -> PoolMemory {
        let bytes = |page: &Page| match page.space.size() {
            u64::MAX => page.space.high(),
            size => size,
        };
        PoolMemory {
            reserved: self.pages.values().map(bytes).sum(),
            in_use: self.in_use,
            most_in_use: self.most_in_use,
            buffers: self.slots.len() as u64,
            largest: self.largest,
        }
    }

    /// The longest free piece on the pages of a region, in bytes. Zero without pages.
    pub fn largest_gap(&self, region: Region) -> u64 {
        let pages = self.pages.values().filter(|page| page.region == region);
        pages.map(|page| page.space.largest_gap()).max().unwrap_or(0)
    }
}

/// A buffer that was taken off its page.
pub struct Lifted<H> {
    /// The buffer's number.
    pub id: u64,
    /// The owner.
    pub holder: H,
    /// Where it was.
    pub place: Place,
    /// What it is used for.
    pub region: Region,
}
