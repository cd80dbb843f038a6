//! The pool of a device whose buffers lie on pages of our own: which pages it is told to have, and what its buffers are for.

use std::fmt;

use cubecl::Runtime;
use cubecl_common::stream_id::StreamId;
use firebox_pool::{Control, NoPlace, Pages, Region};
use firebox_trace::{Bytes, PoolPages};

use crate::error::TrainError;

/// The pool of a device, whichever runtime is below it.
pub trait OwnPool: Send + Sync {
    /// As [`Control::begin`].
    fn begin(&self, stream: StreamId, limit: Bytes);
    /// As [`Control::enter`].
    fn enter(&self, region: Region);
    /// As [`Control::prepare`].
    ///
    /// # Errors
    ///
    /// As there.
    fn prepare(&self, pages: Pages) -> Result<(), NoPlace>;
    /// As [`Control::end`].
    fn end(&self);
}

impl<R: Runtime> OwnPool for Control<R> {
    fn begin(&self, stream: StreamId, limit: Bytes) {
        self.begin(stream, limit.get());
    }

    fn enter(&self, region: Region) {
        self.enter(region);
    }

    fn prepare(&self, pages: Pages) -> Result<(), NoPlace> {
        self.prepare(pages)
    }

    fn end(&self) {
        self.end();
    }
}

/// The pool of a device while one trains on it.
pub(crate) struct TrainingPool {
    pool: Box<dyn OwnPool>,
    limit: Bytes,
    /// The bytes of tensors that are not the training's.
    others: Bytes,
    pages: PoolPages,
}

impl fmt::Debug for TrainingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingPool").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl TrainingPool {
    /// Training begins on the calling thread, beside `others`.
    pub(crate) fn begin(pool: Box<dyn OwnPool>, others: Bytes) -> Self {
        pool.begin(StreamId::current(), Bytes::MAX);
        Self { pool, limit: Bytes::MAX, others, pages: PoolPages::default() }
    }

    /// Training may take so much.
    pub(crate) fn limit(&mut self, budget: Bytes) {
        let limit = budget + self.others;
        if limit != self.limit {
            self.limit = limit;
            self.pool.begin(StreamId::current(), limit);
        }
    }

    /// Has the pages that all plans need, where there is room for them, else those of the one that is run. Gives the bytes of all that
    /// are there then, less those of others.
    pub(crate) fn prepare(&mut self, [all, one]: [PoolPages; 2]) -> Result<Bytes, TrainError> {
        let pages = if all.total() + self.others <= self.limit { all } else { one };
        if pages != self.pages {
            let bytes = Pages {
                lasting: (pages.lasting + self.others).get(),
                step: pages.step.get(),
                small: pages.small.get(),
                beside: pages.beside.get(),
            };
            self.pool.prepare(bytes)?;
            self.pages = pages;
        }
        Ok(pages.total())
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
