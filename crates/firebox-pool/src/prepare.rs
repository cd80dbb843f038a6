//! What the Learner asks of a pool: which pages to have, and which region buffers
//! belong to. [`Control`](crate::Control) forwards to these methods.

use cubecl_common::bytes::Bytes;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerError;

use crate::buffer::Buffer;
use crate::no_place::{NoPlace, Why};
use crate::pool::{Lifted, Needed, PageId, Place};
use crate::refusal::Refusals;
use crate::region::{Pages, Region};
use crate::server::{PoolServer, Training};
use crate::space::Fit;

/// A buffer being moved, and its contents.
type Moved = (Lifted<Buffer>, Result<Bytes, ServerError>);

impl<R: Runtime> PoolServer<R> {
    /// Begins training on the thread of `stream`. All pages together have at most `limit` bytes,
    /// and each has at most `largest_page`.
    pub(crate) fn begin(&mut self, stream: StreamId, limit: u64, largest_page: u64) {
        let largest_page = self.pool.largest_page(largest_page);
        let begun = self.training.map(|training| (training.region, training.is_prepared));
        if begun.is_none() {
            self.refusals = Refusals::default();
        }
        let (region, is_prepared) = begun.unwrap_or((Region::Step, false));
        self.training =
            Some(Training { stream: stream.value, region, limit, largest_page, is_prepared });
    }

    /// Sets the region for the training thread's buffers from now on.
    pub(crate) fn enter(&mut self, region: Region) {
        if let Some(training) = &mut self.training {
            training.region = region;
        }
    }

    /// Ends training and closes the pages without buffers.
    pub(crate) fn end(&mut self) {
        self.training = None;
        self.refusals = Refusals::default();
        for region in Region::ALL {
            self.release(region);
        }
        self.close(None);
    }

    /// Allows the pages of a region to be closed.
    fn release(&mut self, region: Region) {
        let pages: Vec<_> = self.pool.pages_of(region).collect();
        pages.into_iter().for_each(|(page, _)| self.pool.stays(page, false));
    }

    /// Opens pages for each region with the requested bytes, or with the bytes already in use there
    /// if that is more, and moves buffers to them. The first call of a training moves everything.
    ///
    /// Moved buffers go through the host's memory, so old and new pages never exist at the same
    /// time.
    pub(crate) fn prepare(&mut self, pages: Pages) -> Result<(), NoPlace> {
        self.close(None);
        let is_prepared = self.training.is_none_or(|training| training.is_prepared);
        let is_there = |region: &Region| {
            let open: Vec<u64> = self.pool.pages_of(*region).map(|(_, size)| size).collect();
            open == self.sizes(pages.of(*region)) && (is_prepared || open.is_empty())
        };
        let moves: Vec<Region> =
            Region::ALL.into_iter().filter(|region| !is_there(region)).collect();
        // Step buffers keep their offsets on a larger page. The buffers that follow are then placed
        // as the dry device predicted.
        let fit = match pages.step_from {
            0 => Fit::Best,
            from => Fit::TwoEnded { from },
        };
        let keeps = fit == Fit::Best && self.fit_of_steps() == Some(Fit::Best);
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
            let here = |(buffer, _): &&Moved| buffer.region.home(buffer.place.size) == *region;
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
        self.fit_step_page(fit, &mut lifted);
        // Buffers that keep their offsets come first.
        lifted.sort_by_key(|(buffer, _)| {
            step.is_none() || buffer.region.home(buffer.place.size) != Region::Step
        });
        for moved in lifted {
            if let Err(lost) = self.put_back(step, moved) {
                result = Err(lost);
            }
        }
        if let Some(training) = &mut self.training {
            training.is_prepared = result.is_ok();
        }
        result
    }

    /// Places buffers on the step page as planned. If that differs from how they were placed so
    /// far, the buffers that are there, such as a batch, are lifted. Several pages are each filled
    /// by best fit.
    fn fit_step_page(&mut self, fit: Fit, lifted: &mut Vec<Moved>) {
        let pages: Vec<_> = self.pool.pages_of(Region::Step).collect();
        let [(page, _)] = pages[..] else { return };
        if self.fit_of_steps() == Some(fit) {
            return;
        }
        for buffer in self.pool.lift(&[Region::Step]) {
            let bytes = self.read_place(buffer.place);
            lifted.push((buffer, bytes));
        }
        self.pool.set_fit(page, fit);
    }

    /// How places on the only step page are chosen. `None` if there is none, or there are several.
    fn fit_of_steps(&self) -> Option<Fit> {
        let pages: Vec<_> = self.pool.pages_of(Region::Step).collect();
        let [(page, _)] = pages[..] else { return None };
        self.pool.fit(page)
    }

    /// The page sizes of a region with `bytes` bytes in total.
    fn sizes(&self, bytes: u64) -> Vec<u64> {
        let largest = self.training.map_or(u64::MAX, |training| training.largest_page);
        let (mut left, mut sizes) = (self.pool.taken_by(bytes), Vec::new());
        while left > largest {
            sizes.push(largest);
            left -= largest;
        }
        sizes.extend((left > 0).then_some(left));
        sizes
    }

    /// Gives a moved buffer a place again. If `step` is set, a step buffer keeps its offset on that
    /// page if possible. Otherwise it goes to any page with room, or to a new page, above the limit
    /// if necessary.
    fn put_back(&mut self, step: Option<PageId>, (buffer, bytes): Moved) -> Result<(), NoPlace> {
        let is_step = buffer.region.home(buffer.place.size) == Region::Step;
        let kept = match step.filter(|_| is_step) {
            Some(page) => self.pool.place_at(page, buffer),
            None => Err(buffer),
        };
        let place = kept.or_else(|buffer| self.put(buffer))?;
        self.write_moved(place, bytes)
    }

    fn put(&mut self, buffer: Lifted<Buffer>) -> Result<Place, NoPlace> {
        let Lifted { id, holder, region, place: Place { size, .. } } = buffer;
        let region = region.home(size);
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

    /// Opens a page regardless of the limit, if the device has memory for it.
    fn open_beyond(&mut self, needed: Needed, size: u64) {
        let training = self.training;
        self.training = training.map(|training| Training { limit: u64::MAX, ..training });
        let _page = self.open(needed, size);
        self.training = training;
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
