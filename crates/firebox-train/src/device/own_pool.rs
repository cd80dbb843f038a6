//! The pool of a device whose buffers lie on firebox's pages. The training loop tells it which
//! pages to have and what buffers are for.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_backend::StreamId;
use firebox_pool::{NoPlace, Pages, Region};
use firebox_trace::{Bytes, Footprint, Mark, PoolPages};

use crate::ready::OtherTensors;

/// firebox's pool on a device. Only firebox's own backends have one.
pub struct OwnPool(Box<dyn Controls>);

impl OwnPool {
    #[cfg(feature = "cards")]
    pub(crate) fn new(pool: impl Controls + 'static) -> Self {
        Self(Box::new(pool))
    }

    /// The bytes of its buffers that are smaller than [`SMALL`](firebox_pool::SMALL) bytes.
    pub(crate) fn small_in_use(&self) -> Bytes {
        self.0.small_in_use()
    }
}

impl fmt::Debug for OwnPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnPool").finish_non_exhaustive()
    }
}

/// What training asks of a pool, for any runtime below it.
pub(crate) trait Controls: Send + Sync {
    /// See `firebox_pool::Control::begin`.
    fn begin(&self, stream: StreamId, limit: Bytes);
    /// The bytes of its buffers that are smaller than [`SMALL`](firebox_pool::SMALL) bytes.
    fn small_in_use(&self) -> Bytes;
    /// See `firebox_pool::Control::enter`.
    fn enter(&self, region: Region);
    /// See `firebox_pool::Control::prepare`. Returns the bytes of all pages.
    ///
    /// # Errors
    ///
    /// Those of `firebox_pool::Control::prepare`.
    fn prepare(&self, pages: Pages) -> Result<Bytes, NoPlace>;
    /// See `firebox_pool::Control::end`.
    fn end(&self);
}

/// The pool of a device during training.
pub(crate) struct TrainingPool {
    pool: Box<dyn Controls>,
    /// Runs what the training thread has queued.
    drain: Box<dyn Fn() + Send + Sync>,
    /// Tensors that do not belong to training.
    others: OtherTensors,
    state: Mutex<State>,
}

/// The latest settings of the pool.
#[derive(Debug)]
struct State {
    limit: Bytes,
    pages: PoolPages,
    /// The bytes of all pages and of what the runtime below takes, minus those of other tensors.
    reserved: Bytes,
}

impl fmt::Debug for TrainingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainingPool").field("state", &self.state).finish_non_exhaustive()
    }
}

impl TrainingPool {
    /// Begins training on the calling thread, next to `others`. `drain` runs what this thread has
    /// queued.
    pub(crate) fn begin(
        OwnPool(pool): OwnPool,
        drain: impl Fn() + Send + Sync + 'static,
        others: OtherTensors,
    ) -> Self {
        pool.begin(StreamId::current(), Bytes::MAX);
        let (limit, reserved) = (Bytes::MAX, Bytes::ZERO);
        let state = State { limit, pages: PoolPages::default(), reserved };
        Self { pool, drain: Box::new(drain), others, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limits what training may take to `budget`.
    pub(crate) fn limit(&self, budget: Bytes) {
        let limit = budget + self.others.held;
        let mut state = self.state();
        if limit != state.limit {
            state.limit = limit;
            self.pool.begin(StreamId::current(), limit);
        }
    }

    /// Prepares the pages that all plans need if there is room for them, otherwise those of the
    /// plan that runs. Returns the bytes of all pages, minus those of other tensors.
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

    /// Prepares the pages of a part of a step that runs before its batch does: to read a value
    /// while it is planned, or to check gradients. Returns the bytes of all pages, minus those of
    /// other tensors, or [`Bytes::MAX`] if the pages cannot be had.
    pub(crate) fn prepare_for(&self, footprint: &Footprint) -> Bytes {
        let Some(pages) = footprint.paging.as_ref().and_then(|paging| paging.pool) else {
            return Bytes::ZERO;
        };
        self.prepare([pages, pages]).unwrap_or_else(|error| {
            log::debug!("no pages for a part of a step: {error}");
            Bytes::MAX
        })
    }

    /// Does what training does at a mark: part of a step that runs while it is planned then lies as
    /// the twin has predicted.
    pub(crate) fn passes(&self, mark: &Mark) {
        match mark {
            Mark::Drain | Mark::Settle => (self.drain)(),
            Mark::OptimizerStep => self.lasting(true),
            Mark::IterationEnd => self.lasting(false),
            _ => {}
        }
    }

    /// Sets whether buffers made from now on outlive the step.
    pub(crate) fn lasting(&self, lasting: bool) {
        self.pool.enter(if lasting { Region::Lasting } else { Region::Step });
    }
}

impl Drop for TrainingPool {
    fn drop(&mut self) {
        self.pool.end();
    }
}
