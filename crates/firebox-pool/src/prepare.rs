//! What the Learner and the twin ask of a pool: which pages to have, and what buffers are for.

use cubecl_common::bytes::Bytes;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerError;

use crate::pool::{Lifted, Needed, PageId, Pages, Place, Pool, PoolMemory, Region, SMALL};
use crate::refusal::{NoPlace, Refusals, Why};
use crate::server::{Buffer, Course, PoolServer};
use crate::space::Fit;

/// A buffer that is moved, and what it holds.
type Moved = (Lifted<Buffer>, Result<Bytes, ServerError>);

impl<R: Runtime> PoolServer<R> {
    /// Only finds out from now on which pages are needed. Forgets all buffers and pages.
    pub(crate) fn measure(&mut self) {
        self.pool = Pool::new(self.utilities.properties.memory.alignment, Fit::Best);
        self.pages.clear();
        self.measures = true;
        self.course = None;
        self.refusals = Refusals::default();
    }

    pub(crate) fn memory(&mut self) -> PoolMemory {
        self.pool.collect();
        self.pool.memory()
    }

    pub(crate) fn high(&mut self) -> Pages {
        self.pool.collect();
        self.pool.high()
    }

    pub(crate) fn forget_high(&mut self) {
        self.pool.forget_high();
    }

    /// From now on one thread trains, all pages together have no more than `limit` bytes, and none has more than `largest_page`.
    pub(crate) fn begin(&mut self, stream: StreamId, limit: u64, largest_page: u64) {
        // Places begin and end at multiples of the alignment.
        let alignment = self.utilities.properties.memory.alignment.max(1);
        let largest_page = match largest_page {
            u64::MAX => u64::MAX,
            limited => limited - limited % alignment,
        };
        let begun = self.course.map(|course| (course.region, course.is_prepared));
        if begun.is_none() {
            self.refusals = Refusals::default();
        }
        let (region, is_prepared) = begun.unwrap_or((Region::Step, false));
        self.course =
            Some(Course { stream: stream.value, region, limit, largest_page, is_prepared });
    }

    /// What the training thread's buffers are for from now on.
    pub(crate) fn enter(&mut self, region: Region) {
        if let Some(course) = &mut self.course {
            course.region = region;
        }
    }

    /// Training is over: gives pages back that nothing lies on.
    pub(crate) fn end(&mut self) {
        self.course = None;
        self.refusals = Refusals::default();
        for region in Region::ALL {
            self.release(region);
        }
        self.close(None);
    }

    /// Lets the pages of a region be closed.
    fn release(&mut self, region: Region) {
        let pages: Vec<_> = self.pool.pages_of(region).collect();
        pages.into_iter().for_each(|(page, _)| self.pool.stays(page, false));
    }

    /// Puts what lies in each of these regions on one page, the largest first.
    pub(crate) fn settle(&mut self, regions: &[Region]) {
        debug_assert!(self.measures, "elsewhere it is `prepare` that does so");
        let lifted = self.pool.lift(regions);
        for region in regions {
            self.close(Some(*region));
        }
        for buffer in lifted {
            // Pages that are only measured have no end.
            let _place = self.put(buffer);
        }
        self.pool.forget_high();
    }

    /// Has pages of the bytes that are asked for in each region, or of what lies there if that is more, and moves what lies on others
    /// there. The first time in a training, all that is there is moved.
    ///
    /// What is moved goes through the host's memory, so that old and new pages are never there at once.
    pub(crate) fn prepare(&mut self, pages: Pages) -> Result<(), NoPlace> {
        self.close(None);
        let is_prepared = self.course.is_none_or(|course| course.is_prepared);
        let is_there = |region: &Region| {
            let open: Vec<u64> = self.pool.pages_of(*region).map(|(_, size)| size).collect();
            open == self.sizes(pages.of(*region)) && (is_prepared || open.is_empty())
        };
        let moves: Vec<Region> =
            Region::ALL.into_iter().filter(|region| !is_there(region)).collect();
        // What steps have made keeps its place on a larger page: the next buffers lie then where the twin expects them.
        let keeps = self.pool.pages_of(Region::Step).count() == 1;
        let mut lifted = Vec::new();
        for buffer in self.pool.lift(&moves) {
            let bytes = self.read_place(buffer.place);
            lifted.push((buffer, bytes));
        }
        for region in &moves {
            self.release(*region);
            self.close(Some(*region));
        }
        let mut result = Ok(());
        let mut step = None;
        for region in &moves {
            let here = |(buffer, _): &&Moved| home(buffer.region, buffer.place.size) == *region;
            let needed: u64 = lifted.iter().filter(here).map(|(buffer, _)| buffer.place.size).sum();
            for size in self.sizes(pages.of(*region).max(needed)) {
                match self.open(Needed { region: *region, size }, size) {
                    Ok(page) => {
                        self.pool.stays(page, true);
                        step = step.or((*region == Region::Step && keeps).then_some(page));
                    }
                    Err(error) => result = result.and(Err(error)),
                }
            }
        }
        // Those that keep their places come first.
        lifted.sort_by_key(|(buffer, _)| {
            step.is_none() || home(buffer.region, buffer.place.size) != Region::Step
        });
        for moved in lifted {
            if let Err(lost) = self.put_back(step, moved) {
                result = Err(lost);
            }
        }
        if let Some(course) = &mut self.course {
            course.is_prepared = result.is_ok();
        }
        result
    }

    /// The sizes of the pages of a region with so many bytes.
    fn sizes(&self, bytes: u64) -> Vec<u64> {
        let largest = self.course.map_or(u64::MAX, |course| course.largest_page);
        let (mut left, mut sizes) = (self.pool.taken_by(bytes), Vec::new());
        while left > largest {
            sizes.push(largest);
            left -= largest;
        }
        sizes.extend((left > 0).then_some(left));
        sizes
    }

    /// Gives a buffer a place again: on the page of steps, if that is `step`, the one that it had; otherwise where there is one, beyond
    /// the limit if it has to.
    fn put_back(&mut self, step: Option<PageId>, (buffer, bytes): Moved) -> Result<(), NoPlace> {
        let is_step = home(buffer.region, buffer.place.size) == Region::Step;
        let kept = match step.filter(|_| is_step) {
            Some(page) => self.pool.place_at(page, buffer),
            None => Err(buffer),
        };
        let place = kept.or_else(|buffer| self.put(buffer))?;
        self.write_moved(place, bytes)
    }

    fn put(&mut self, buffer: Lifted<Buffer>) -> Result<Place, NoPlace> {
        let Lifted { id, holder, region, place: Place { size, .. } } = buffer;
        let region = home(region, size);
        let (holder, needed) = match self.pool.place(id, holder, size, region) {
            Ok(place) => return Ok(place),
            Err(missing) => missing,
        };
        if self.open(needed, size).is_err() && !self.pool.has_room(size) {
            self.open_beyond(needed, size);
        }
        let place = self.pool.place_anywhere(id, holder, size, region);
        place.ok_or_else(|| self.no_place(needed, size, Why::Lost { page: needed.size }))
    }

    /// Opens a page whatever the limit is, if the device has memory for it.
    fn open_beyond(&mut self, needed: Needed, size: u64) {
        let course = self.course;
        self.course = course.map(|course| Course { limit: u64::MAX, ..course });
        let _page = self.open(needed, size);
        self.course = course;
    }

    fn write_moved(&self, place: Place, bytes: Result<Bytes, ServerError>) -> Result<(), NoPlace> {
        match bytes {
            Ok(bytes) => {
                self.write_place(place, bytes);
                Ok(())
            }
            Err(error) => {
                log::error!("what a buffer of {} bytes held cannot be read: {error}", place.size);
                let needed = Needed { region: Region::Lasting, size: place.size };
                Err(self.no_place(needed, place.size, Why::Unread))
            }
        }
    }
}

/// Where a buffer belongs while one trains.
fn home(region: Region, size: u64) -> Region {
    if size < SMALL { Region::Small } else { region }
}
