//! Distinguishes batches that need plans of their own. The planner keys its plans by phase and
//! [`Shape`].

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::backend::Backend;
use firebox_lazy::{LazyBackend, StepRecorder, bytes_made};
use firebox_trace::{Bytes, Step, StructuralHash};
use serde::{Deserialize, Serialize};

use crate::error::Phase;
use crate::planner::Planner;
use crate::splitter::Splitter;

/// The most bytes of a batch that are alive while it is made of what loader threads have asked for.
/// `all` clones it.
fn bytes_to_make<B: Backend, I>(all: impl FnOnce() -> I) -> Bytes {
    let glance = StepRecorder::new().glance();
    let cloned = catch_unwind(AssertUnwindSafe(|| glance.record::<B, _>(all)));
    cloned.ok().and_then(Result::ok).map_or(Bytes::ZERO, |cloned| cloned.bytes_to_make())
}

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) items: usize,
    /// The structural hash of cutting off the first item. It contains the shapes of the tensors
    /// that are cut. `None` where only bytes count, and where the cut takes no operation: for a
    /// batch of one item, and for a batch whose items are tensors of their own.
    cut: Option<StructuralHash>,
    /// The bytes of the largest batch of this many items that outgrew its plan and is no larger
    /// than this batch. Where only bytes count, batches from that size on have a plan of their own.
    from: Bytes,
}

impl Shape {
    /// The shape of a batch of which only the number of items is known.
    pub(crate) fn of_items(items: usize) -> Self {
        Self { items, cut: None, from: Bytes::ZERO }
    }

    /// The shape of a batch of at least one item. The planner is told what making the batch takes,
    /// and where only bytes count, the batch's bytes.
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
        let shape = Self::by_cutting::<B, _, _>(phase, batch, items, splitter, planner);
        let to_make = match planner.planned(phase, shape) {
            None => bytes_to_make::<B::Base, _>(|| splitter.range(batch, 0..items)),
            Some(_) => Bytes::ZERO,
        };
        planner.plans.making = bytes_made().max(to_make);
        shape
    }

    /// Cuts the batch in a recording that is thrown away.
    fn by_cutting<B, I, S>(
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
        planner.plans.batch = Bytes::ZERO;
        planner.plans.form = None;
        if !planner.plans.looks_at_shapes {
            return shape;
        }
        let on_host = planner.memory.is_on_host();
        let recorder = StepRecorder::new().glance();
        // Errors and panics of a splitter are reported when the batch is cut to be run.
        let cut = catch_unwind(AssertUnwindSafe(|| {
            recorder.record::<B::Base, _>(|| {
                // A range of all items would not cut anything.
                splitter.range(batch, if on_host { 0..items.max(2) - 1 } else { 0..1 })
            })
        }));
        if let Ok(Ok(recording)) = &cut {
            let trace = recording.trace();
            let tells = |step: &Step| matches!(step, Step::Call(_) | Step::Upload { .. });
            planner.plans.form = trace.steps.iter().any(tells).then(|| trace.structural_hash());
        }
        match cut {
            Ok(Ok(recording)) if on_host => {
                let inputs = recording.inputs().into_iter();
                planner.plans.batch =
                    inputs.map(|input| Bytes::of_elements(&input.shape, input.dtype)).sum();
                shape.from = planner.outgrown(phase, items);
            }
            Ok(Ok(_)) => shape.cut = planner.plans.form,
            Ok(Err(error)) => {
                log::debug!("batches are told apart by their items alone: {error}");
                planner.plans.looks_at_shapes = false;
            }
            Err(_) => {
                log::debug!("batches are told apart by their items alone: one cannot be cut off");
                planner.plans.looks_at_shapes = false;
            }
        }
        shape
    }
}
