//! What tells batches apart that need plans of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use firebox_lazy::{LazyBackend, Recorder};
use firebox_trace::{Step, StructuralHash};

use crate::planner::Planner;
use crate::splitter::Splitter;

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) items: usize,
    /// How the first item is cut off, which tells the shapes of the tensors that are cut. `None` where only bytes count, and
    /// where that takes no operation: from a batch of one item, and from one whose items are tensors of their own.
    cut: Option<StructuralHash>,
}

impl Shape {
    /// A batch of which nothing but its items is known.
    pub(crate) fn of_items(items: usize) -> Self {
        Self { items, cut: None }
    }

    /// The shape of a batch of at least one item. It is cut in a recording that is thrown away.
    pub(crate) fn of<B, I, S>(batch: &I, items: usize, splitter: &S, planner: &mut Planner) -> Self
    where
        B: LazyBackend,
        S: Splitter<I>,
    {
        let mut shape = Self::of_items(items);
        if !planner.looks_at_shapes || planner.memory.is_on_host() {
            return shape;
        }
        let recorder = Recorder::new().refuse_reads();
        // What is wrong with a splitter is told where the batch is cut to be run.
        let cut = catch_unwind(AssertUnwindSafe(|| {
            recorder.record::<B::Base, _>(|| splitter.range(batch, 0..1))
        }));
        match cut {
            Ok(Ok(recording)) => {
                let trace = recording.trace();
                let tells = |step: &Step| matches!(step, Step::Call(_) | Step::Upload { .. });
                shape.cut = trace.steps.iter().any(tells).then(|| trace.structural_hash());
            }
            Ok(Err(error)) => {
                log::debug!("batches are told apart by their items alone: {error}");
                planner.looks_at_shapes = false;
            }
            Err(_) => {
                log::debug!("batches are told apart by their items alone: one cannot be cut off");
                planner.looks_at_shapes = false;
            }
        }
        shape
    }
}
