//! What tells batches apart that need plans of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use firebox_lazy::{LazyBackend, Recorder};
use firebox_trace::{Bytes, Step, StructuralHash};

use crate::error::Phase;
use crate::planner::Planner;
use crate::splitter::Splitter;

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) items: usize,
    /// How the first item is cut off, which tells the shapes of the tensors that are cut. `None` where only bytes count, and
    /// where that takes no operation: from a batch of one item, and from one whose items are tensors of their own.
    cut: Option<StructuralHash>,
    /// The bytes of the smallest batch of so many items that did not fit as smaller ones do, and is not larger than this one: where only
    /// bytes count, batches from there on have a plan of their own.
    from: Bytes,
}

impl Shape {
    /// A batch of which nothing but its items is known.
    pub(crate) fn of_items(items: usize) -> Self {
        Self { items, cut: None, from: Bytes::ZERO }
    }

    /// The shape of a batch of at least one item, of which the planner is told the bytes where only these count. It is cut in a recording
    /// that is thrown away.
    pub(crate) fn of<B, I, S>(
        phase: Phase,
        batch: &I,
        items: usize,
        splitter: &S,
        planner: &mut Planner,
    ) -> Self
    where
        B: LazyBackend,
        S: Splitter<I>,
    {
        let mut shape = Self::of_items(items);
        planner.batch = Bytes::ZERO;
        if !planner.looks_at_shapes {
            return shape;
        }
        let on_host = planner.memory.is_on_host();
        let recorder = Recorder::new().glance();
        // What is wrong with a splitter is told where the batch is cut to be run.
        let cut = catch_unwind(AssertUnwindSafe(|| {
            recorder.record::<B::Base, _>(|| {
                // All of a batch is no part of it.
                splitter.range(batch, if on_host { 0..items.max(2) - 1 } else { 0..1 })
            })
        }));
        match cut {
            Ok(Ok(recording)) if on_host => {
                let inputs = recording.inputs().into_iter();
                planner.batch =
                    inputs.map(|input| Bytes::of_elements(&input.shape, input.dtype)).sum();
                shape.from = planner.outgrown(phase, items);
            }
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
