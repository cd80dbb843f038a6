//! The pool: which buffer lies where, without a device.

use std::collections::BTreeMap;
use std::fmt;

use rustc_hash::FxHashMap;

use crate::space::{Fit, Space};

/// What a buffer is asked for. Each has pages of its own, so that what lives long does not lie between what is soon gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// What outlives steps: parameters, the optimizer's state, everything that is made outside of training.
    Lasting,
    /// What the micro-steps of training make.
    Step,
    /// What is small, whatever it is for: losses, running statistics, biases.
    Small,
    /// What other threads make while one trains.
    Beside,
}

impl Region {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Lasting, Self::Step, Self::Small, Self::Beside];
}

/// What is smaller than this is small.
pub const SMALL: u64 = 64 * 1024;

/// The size of pages for small buffers where no plan says another.
const SHARED_PAGE: u64 = 2 * 1024 * 1024;

/// The pages that training was planned with: one of so many bytes for each region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// For [`Region::Lasting`].
    pub lasting: u64,
    /// For [`Region::Step`].
    pub step: u64,
    /// For [`Region::Small`].
    pub small: u64,
    /// For [`Region::Beside`].
    pub beside: u64,
}

impl Pages {
    /// The bytes of all.
    pub fn total(&self) -> u64 {
        Region::ALL.into_iter().map(|region| self.of(region)).sum()
    }

    /// The bytes of the page of a region.
    pub fn of(&self, region: Region) -> u64 {
        match region {
            Region::Lasting => self.lasting,
            Region::Step => self.step,
            Region::Small => self.small,
            Region::Beside => self.beside,
        }
    }

    /// The bytes of the page of a region, to be changed.
    pub fn of_mut(&mut self, region: Region) -> &mut u64 {
        match region {
            Region::Lasting => &mut self.lasting,
            Region::Step => &mut self.step,
            Region::Small => &mut self.small,
            Region::Beside => &mut self.beside,
        }
    }

    /// Each as large as the larger of both.
    pub fn max(mut self, other: Self) -> Self {
        for region in Region::ALL {
            *self.of_mut(region) = self.of(region).max(other.of(region));
        }
        self
    }
}

/// Whoever holds a buffer outside of the pool.
pub trait Holder {
    /// Whether nobody does any more.
    fn is_free(&self) -> bool;
}

/// A page, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub(crate) u32);

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page.
    pub page: PageId,
    /// Where it begins there, in bytes.
    pub offset: u64,
    /// Its bytes, up to the next multiple of the alignment.
    pub size: u64,
}

/// A page that a buffer needs which finds no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needed {
    /// The region that has no place.
    pub region: Region,
    /// The bytes of the page.
    pub size: u64,
}

struct Page {
    region: Region,
    space: Space,
    /// Whether it stays open although nothing lies on it.
    stays: bool,
}

struct Slot<H> {
    id: u64,
    holder: H,
    place: Place,
    region: Region,
}

/// A buffer that is not on a page yet.
fn nowhere(size: u64) -> Place {
    Place { page: PageId(u32::MAX), offset: 0, size }
}

/// What is known of a pool's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolMemory {
    /// Of all pages; of a page without a size, what was ever used of it.
    pub reserved: u64,
    /// Of the buffers, up to the alignment.
    pub in_use: u64,
    /// The most that `in_use` was, as far as frees were noticed.
    pub most_in_use: u64,
    /// The buffers.
    pub buffers: u64,
    /// Of the largest buffer there ever was.
    pub largest: u64,
}

/// Which buffer lies where, on pages that somebody else opens.
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
}

impl<H> fmt::Debug for Pool<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, buffers) = (self.pages.len(), self.slots.len());
        f.debug_struct("Pool").field("pages", &pages).field("buffers", &buffers).finish()
    }
}

impl<H: Holder> Pool<H> {
    /// A pool without pages whose buffers begin at multiples of `alignment` bytes.
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
        }
    }

    /// The bytes that a buffer takes on its page.
    pub fn taken_by(&self, size: u64) -> u64 {
        size.next_multiple_of(self.alignment)
    }

    /// Frees the places of buffers that nobody holds any more.
    pub fn collect(&mut self) {
        let mut at = 0;
        while at < self.slots.len() {
            if self.slots[at].holder.is_free() {
                self.remove(at);
            } else {
                at += 1;
            }
        }
    }

    fn remove(&mut self, at: usize) {
        let slot = self.slots.swap_remove(at);
        self.by_id.remove(&slot.id);
        if let Some(moved) = self.slots.get(at) {
            self.by_id.insert(moved.id, at);
        }
        self.in_use -= slot.place.size;
        let page = self.pages.get_mut(&slot.place.page).expect("a buffer lies on a page");
        page.space.give(slot.place.offset, slot.place.size);
    }

    /// Finds a place for `size` bytes of the buffer `id`, held by `holder`.
    ///
    /// # Errors
    ///
    /// The holder, and the page that has to be opened.
    pub fn place(
        &mut self,
        id: u64,
        holder: H,
        size: u64,
        region: Region,
    ) -> Result<Place, (H, Needed)> {
        let taken = self.taken_by(size);
        match self.page_for(taken, Some(region)) {
            Some(page) => Ok(self.put(page, Slot { id, holder, place: nowhere(taken), region })),
            None => {
                let shared = size < SMALL && region != Region::Step;
                let size = if shared { self.taken_by(SHARED_PAGE).max(taken) } else { taken };
                Err((holder, Needed { region, size }))
            }
        }
    }

    /// The same, on a page of another region if its own has no room. `None` if no page has.
    pub fn place_anywhere(
        &mut self,
        id: u64,
        holder: H,
        size: u64,
        region: Region,
    ) -> Option<Place> {
        let taken = self.taken_by(size);
        let page = self.page_for(taken, Some(region)).or_else(|| self.page_for(taken, None))?;
        Some(self.put(page, Slot { id, holder, place: nowhere(taken), region }))
    }

    /// Gives a buffer that was lifted the place on `page` where it was on another, if that is free.
    ///
    /// # Errors
    ///
    /// The buffer.
    pub fn place_at(&mut self, page: PageId, buffer: Lifted<H>) -> Result<Place, Lifted<H>> {
        let Place { offset, size, .. } = buffer.place;
        let space = self.pages.get_mut(&page).map(|page| &mut page.space);
        if !space.is_some_and(|space| space.take_at(offset, size)) {
            return Err(buffer);
        }
        let Lifted { id, holder, region, .. } = buffer;
        let place = Place { page, offset, size };
        self.note(Slot { id, holder, place, region });
        Ok(place)
    }

    /// Whether any page has room for `size` bytes.
    pub fn has_room(&self, size: u64) -> bool {
        self.page_for(self.taken_by(size), None).is_some()
    }

    /// Of the pages of a region, or of all, the one whose gap fits best; then the first that has room behind its last buffer.
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

    fn note(&mut self, slot: Slot<H>) {
        let size = slot.place.size;
        self.by_id.insert(slot.id, self.slots.len());
        self.slots.push(slot);
        self.in_use += size;
        self.largest = self.largest.max(size);
        self.most_in_use = self.most_in_use.max(self.in_use);
    }

    /// Opens a page.
    pub fn open(&mut self, region: Region, size: u64) -> PageId {
        let id = PageId(self.next_page);
        self.next_page += 1;
        // What lasts is replaced in every step by as much of the same sizes, while other threads may hold a part for longer.
        let fit = if region == Region::Lasting { Fit::Same } else { self.fit };
        self.pages.insert(id, Page { region, space: Space::new(size, fit), stays: false });
        id
    }

    /// Keeps a page open although nothing lies on it, or no longer does.
    pub fn stays(&mut self, page: PageId, stays: bool) {
        if let Some(page) = self.pages.get_mut(&page) {
            page.stays = stays;
        }
    }

    /// Where a buffer lies.
    pub fn find(&self, id: u64) -> Option<Place> {
        self.by_id.get(&id).map(|at| self.slots[*at].place)
    }

    /// Takes the buffers of some regions off their pages, and others off the pages of these regions, in the order in which they are put
    /// back: the largest first, and the older of two that are as large. The pages are empty then.
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
            let slot = self.slots.swap_remove(at);
            self.by_id.remove(&slot.id);
            if let Some(moved) = self.slots.get(at) {
                self.by_id.insert(moved.id, at);
            }
            self.in_use -= slot.place.size;
            let page = self.pages.get_mut(&slot.place.page).expect("a buffer lies on a page");
            page.space.give(slot.place.offset, slot.place.size);
            let Slot { id, holder, place, region } = slot;
            lifted.push(Lifted { id, holder, place, region });
        }
        lifted.sort_by_key(|lifted| (std::cmp::Reverse(lifted.place.size), lifted.id));
        lifted
    }

    /// The pages of a region.
    pub fn pages_of(&self, region: Region) -> impl Iterator<Item = (PageId, u64)> + use<'_, H> {
        let pages = self.pages.iter().filter(move |(_, page)| page.region == region);
        pages.map(|(id, page)| (*id, page.space.size()))
    }

    /// Closes the pages that nothing lies on and that need not stay, of a region or of all.
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

    /// The bytes that each region has to have: what was ever used of its last page, and all before it, which were full.
    pub fn high(&self) -> Pages {
        let mut high = Pages::default();
        for region in Region::ALL {
            let mut pages = self.pages.values().filter(|page| page.region == region).rev();
            let last = pages.next().map_or(0, |page| page.space.high());
            *high.of_mut(region) = last + pages.map(|page| page.space.size()).sum::<u64>();
        }
        high
    }

    /// The bytes of the buffers of less than [`SMALL`] bytes, and of all others.
    pub fn in_use_by_size(&self) -> [u64; 2] {
        let of = |is_small: bool| {
            let sizes = self.slots.iter().map(|slot| slot.place.size);
            sizes.filter(|size| (*size < SMALL) == is_small).sum()
        };
        [of(true), of(false)]
    }

    /// Forgets what was used before.
    pub fn forget_high(&mut self) {
        self.collect();
        self.pages.values_mut().for_each(|page| page.space.forget_high());
        self.most_in_use = self.in_use;
    }

    /// What is known of its memory.
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

    /// The longest piece that is free on the pages of a region.
    pub fn largest_gap(&self, region: Region) -> u64 {
        let pages = self.pages.values().filter(|page| page.region == region);
        pages.map(|page| page.space.largest_gap()).max().unwrap_or(0)
    }
}

/// A buffer that is taken off its page.
pub struct Lifted<H> {
    /// Its number.
    pub id: u64,
    /// Who holds it.
    pub holder: H,
    /// Where it was.
    pub place: Place,
    /// What it is for.
    pub region: Region,
}
