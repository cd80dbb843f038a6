//! The batches of a loader, read so that its threads prepare no more ahead than plans count.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::backend::Backend;
use firebox_lazy::LoaderGuard;

/// The batches of a loader. See [`StepPlanner::batches`](crate::StepPlanner::batches).
pub struct Batches<'a, I> {
    iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    gate: Arc<LoaderGuard>,
}

impl<'a, I> Batches<'a, I> {
    pub(super) fn start<B: Backend>(
        loader: &'a dyn DataLoader<B, I>,
        gate: Arc<LoaderGuard>,
    ) -> Self {
        let iterator = gate.starting(|| loader.iter());
        Self { iterator, gate }
    }
}

impl<I> Iterator for Batches<'_, I> {
    type Item = I;

    fn next(&mut self) -> Option<I> {
        self.gate.waiting(|| self.iterator.next())
    }
}
