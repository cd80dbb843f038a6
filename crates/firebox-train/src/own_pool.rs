//! The pool of a device whose buffers lie on pages of our own: which pages it is told to have, and what its buffers are for.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cubecl_common::stream_id::StreamId;
use firebox_dry::Target;
use firebox_pool::{Control, NoPlace, Pages, Region};
use firebox_trace::{Bytes, PoolPages};

use crate::device::RuntimeMemory;
use crate::ready::Others;

/// The pool of a device, whichever runtime is below it.
pub trait OwnPool: Send + Sync {
    /// As [`Control::begin`].
    fn begin(&self, stream: StreamId, limit: Bytes);
    /// The bytes of its buffers of less than [`SMALL`](firebox_pool::SMALL) bytes.
    fn small_in_use(&self) -> Bytes;
    /// As [`Control::enter`].
    fn enter(&self, region: Region);
    /// As [`Control::prepare`]. Gives the bytes of all pages.
    ///
    /// # Errors
    ///
    /// As there.
    fn prepare(&self, pages: Pages) -> Result<Bytes, NoPlace>;
    /// As [`Control::end`].
    fn end(&self);
}

impl<R: RuntimeMemory> OwnPool for Control<R> {
    fn begin(&self, stream: StreamId, limit: Bytes) {
        let largest_page = <R::Target as Target>::largest_page(&self.properties());
        self.begin(stream, limit.get(), largest_page);
    }

    fn small_in_use(&self) -> Bytes {
        Bytes::new(self.in_use_by_size()[0])
    }

    fn enter(&self, region: Region) {
        self.enter(region);
    }

    fn prepare(&self, pages: Pages) -> Result<Bytes, NoPlace> {
        self.prepare(pages)?;
        Ok(Bytes::new(self.memory().reserved))
    }

    fn end(&self) {
        self.end();
    }
}

/// The pool of a device while one trains on it.
pub(crate) struct TrainingPool {
    pool: Box<dyn OwnPool>,
    /// Tensors that are not the training's.
    others: Others,
    state: Mutex<State>,
}

/// What the pool was told last.
#[derive(Debug)]
struct State {
    limit: Bytes,
    pages: PoolPages,
    /// The bytes of all pages, less those of others, with what the runtime below takes.
    reserved: Bytes,
}

impl fmt::Debug for TrainingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingPool").field("state", &self.state).finish_non_exhaustive()
    }
}

impl TrainingPool {
    /// Training begins on the calling thread, beside `others`.
    pub(crate) fn begin(pool: Box<dyn OwnPool>, others: Others) -> Self {
        pool.begin(StreamId::current(), Bytes::MAX);
        let (limit, reserved) = (Bytes::MAX, Bytes::ZERO);
        let state = State { limit, pages: PoolPages::default(), reserved };
        Self { pool, others, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Training may take so much.
    pub(crate) fn limit(&self, budget: Bytes) {
        let limit = budget + self.others.held;
        let mut state = self.state();
        if limit != state.limit {
            state.limit = limit;
            self.pool.begin(StreamId::current(), limit);
        }
    }

    /// Has the pages that all plans need, where there is room for them, else those of the one that is run. Gives the bytes of all that
    /// are there then, less those of others.
    pub(crate) fn prepare(&self, [all, one]: [PoolPages; 2]) -> Result<Bytes, NoPlace> {
        let mut state = self.state();
        let pages = if all.total() + self.others.held <= state.limit { all } else { one };
        if pages != state.pages {
            let bytes = Pages {
                lasting: (pages.lasting + self.others.held - self.others.small).get(),
                step: pages.step.get(),
                small: (pages.small + self.others.small).get(),
                beside: pages.beside.get(),
                step_from: pages.step_from.get(),
            };
            state.pages = PoolPages::default();
            state.reserved = self.pool.prepare(bytes)? + pages.below - self.others.held;
            state.pages = pages;
        }
        Ok(state.reserved)
    }

    /// What is made from now on outlives the step, or does not.
    pub(crate) fn lasting(&self, lasting: bool) {
        self.pool.enter(if lasting { Region::Lasting } else { Region::Step });
    }
}

impl Drop for TrainingPool {
    fn drop(&mut self) {
        self.pool.end();
    }
}
