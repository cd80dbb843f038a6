//! What the Learner and the twin ask of a pool: which pages to have, and what buffers are for.

use cubecl_common::bytes::Bytes;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerError;

use crate::pool::{Lifted, Needed, PageId, Pages, Place, Pool, PoolMemory, Region, SMALL};
use crate::server::{Buffer, Course, NoPlace, PoolServer};
use crate::space::Fit;

/// A buffer that is moved, and what it holds.
type Moved = (Lifted<Buffer>, Result<Bytes, ServerError>);
/// The place of one that has kept it, and what it holds.
type Kept = (Place, Result<Bytes, ServerError>);

impl<R: Runtime> PoolServer<R> {
    /// Only finds out from now on which pages are needed. Forgets all buffers and pages.
    pub(crate) fn measure(&mut self) {
        self.pool = Pool::new(self.utilities.properties.memory.alignment, Fit::Best);
        self.pages.clear();
        self.measures = true;
        self.course = None;
        self.refused = None;
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

    /// From now on one thread trains, and all pages together have no more than `limit` bytes.
    pub(crate) fn begin(&mut self, stream: StreamId, limit: u64) {
        let region = self.course.map_or(Region::Step, |course| course.region);
        self.course = Some(Course { stream: stream.value, region, limit });
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
            self.pool.open(*region, u64::MAX);
        }
        for buffer in lifted {
            let (region, size) = (home(buffer.region, buffer.place.size), buffer.place.size);
            drop(self.pool.place(buffer.id, buffer.holder, size, region));
        }
        self.pool.forget_high();
    }

    /// Has one page of the size that is asked for in each region, or of what lies there if that is more, and moves what lies on
    /// others there.
    ///
    /// What is moved goes through the host's memory, so that old and new pages are never there at once.
    pub(crate) fn prepare(&mut self, pages: Pages) -> Result<(), NoPlace> {
        self.close(None);
        let is_there = |region: &Region| {
            let open: Vec<u64> = self.pool.pages_of(*region).map(|(_, size)| size).collect();
            let asked = self.pool.taken_by(pages.of(*region));
            open.is_empty() && asked == 0 || matches!(open[..], [size] if size == asked)
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
        let mut result = Ok(());
        let mut kept = Vec::new();
        for region in &moves {
            self.release(*region);
            self.close(Some(*region));
        }
        for region in Region::ALL {
            let here = |lifted: &&(Lifted<Buffer>, _)| {
                home(lifted.0.region, lifted.0.place.size) == region
            };
            let needed: u64 = lifted.iter().filter(here).map(|(buffer, _)| buffer.place.size).sum();
            let size = self.pool.taken_by(pages.of(region)).max(needed);
            if size == 0 || !moves.contains(&region) {
                continue;
            }
            match self.open(Needed { region, size }, size) {
                Ok(page) => {
                    self.pool.stays(page, true);
                    if region == Region::Step && keeps {
                        (lifted, kept) = self.keep_places(page, lifted);
                    }
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        for (place, bytes) in kept {
            self.write_moved(Some(place), bytes);
        }
        for (buffer, bytes) in lifted {
            self.put_back(buffer, bytes);
        }
        result
    }

    /// Puts the buffers of steps back on a page of another size, at the places where they were. Gives the others, and these.
    fn keep_places(&mut self, page: PageId, lifted: Vec<Moved>) -> (Vec<Moved>, Vec<Kept>) {
        let (mut others, mut kept) = (Vec::new(), Vec::new());
        for (buffer, bytes) in lifted {
            if home(buffer.region, buffer.place.size) != Region::Step {
                others.push((buffer, bytes));
                continue;
            }
            match self.pool.place_at(page, buffer) {
                Ok(place) => kept.push((place, bytes)),
                Err(buffer) => others.push((buffer, bytes)),
            }
        }
        (others, kept)
    }

    /// Gives a buffer a place again, on a page of its own if there is none.
    fn put_back(&mut self, buffer: Lifted<Buffer>, bytes: Result<Bytes, ServerError>) {
        let Lifted { id, holder, region, place: Place { size, .. } } = buffer;
        let region = home(region, size);
        let place = match self.pool.place(id, holder, size, region) {
            Ok(place) => Some(place),
            Err((holder, needed)) => match self.open(needed, size) {
                Ok(_) => self.pool.place(id, holder, size, region).ok(),
                Err(_) => None,
            },
        };
        self.write_moved(place, bytes);
    }

    fn write_moved(&mut self, place: Option<Place>, bytes: Result<Bytes, ServerError>) {
        match (place, bytes) {
            (Some(place), Ok(bytes)) => self.write_place(place, bytes),
            (_, Err(error)) => log::error!("a buffer was lost when it was moved: {error}"),
            (None, Ok(bytes)) => {
                let size = bytes.len();
                log::error!("a buffer of {size} bytes was lost when it was moved: it has no place");
            }
        }
    }
}

/// Where a buffer belongs while one trains.
fn home(region: Region, size: u64) -> Region {
    if size < SMALL { Region::Small } else { region }
}
