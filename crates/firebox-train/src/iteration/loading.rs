//! How far ahead of a training loop the threads of its loaders may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::backend::Backend;
use firebox_lazy::{LoaderGate, LoaderGuard};
use firebox_trace::Bytes;

use crate::planner::overhead::Overhead;

/// The gate of loader threads, and what is known of the loader that is read.
pub(crate) struct Loading {
    /// Makes loader threads wait.
    pub(crate) gate: Arc<LoaderGuard>,
    /// What each of them may have alive before it must wait.
    limit: Bytes,
    /// The number of items in the loader that was read last. Zero before.
    items: AtomicUsize,
}

impl Loading {
    /// Watches loader threads. `compute` lets them compute what they ask for.
    pub(crate) fn begin(compute: bool) -> Self {
        let gate = Arc::new(LoaderGate::enter());
        if compute {
            gate.compute();
        }
        Self { gate, limit: Bytes::ZERO, items: AtomicUsize::new(0) }
    }

    /// Begins to read a loader.
    pub(crate) fn read<'a, B: Backend, I>(
        &self,
        loader: &'a dyn DataLoader<B, I>,
    ) -> Batches<'a, I> {
        self.items.store(loader.num_items(), Relaxed);
        let iterator = self.gate.starting(|| loader.iter());
        Batches { iterator, gate: self.gate.clone() }
    }

    /// Lets loader threads make no more than the loop waits for, until the first batch is planned.
    pub(crate) fn hold_back(&self) {
        self.gate.limit(Bytes::new(1));
    }

    /// Sets what each loader thread may have alive before it must wait. There is no limit if loader
    /// threads make no tensors, or a loader is read in another way: its threads would wait for
    /// ever.
    pub(crate) fn let_ahead(&mut self, limit: Bytes) {
        self.limit = limit;
        let is_limited = self.items.load(Relaxed) > 0 && limit > Bytes::ZERO;
        self.gate.limit(if is_limited { limit } else { Bytes::MAX });
    }

    /// What is alive next to the step of a batch of `items` items because of loaders.
    pub(crate) fn overhead(&self, items: usize) -> Overhead {
        let loaders = Overhead::of_loaders(&self.gate, self.items.load(Relaxed), items);
        Overhead { limit: self.limit, ..loaders }
    }
}

/// The batches of a loader, read so that its threads prepare no more ahead than plans count. See
/// [`StepPlanner::batches`](crate::StepPlanner::batches).
pub struct Batches<'a, I> {
    pub(crate) iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    gate: Arc<LoaderGuard>,
}

impl<I> Iterator for Batches<'_, I> {
    type Item = I;

    fn next(&mut self) -> Option<I> {
        self.gate.waiting(|| self.iterator.next())
    }
}
