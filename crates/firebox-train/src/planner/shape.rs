//! Distinguishes batches that need plans of their own. The planner keys its plans by phase and
//! [`Shape`].

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::backend::Backend;
use firebox_lazy::{LazyBackend, Recording, StepRecorder, bytes_made};
use firebox_trace::{Bytes, Step, StructuralHash};
use serde::{Deserialize, Serialize};

use crate::error::Phase;
use crate::planner::Planner;
use crate::splitter::Splitter;

/// Cuts a batch in a recording that is thrown away, or says why that is not possible. Errors and
/// panics of a splitter are reported when the batch is cut to be run.
fn glance<B: Backend, I>(cut: impl FnOnce() -> I) -> Result<Recording<B, I>, String> {
    let recorder = StepRecorder::new().glance();
    let cut = catch_unwind(AssertUnwindSafe(|| recorder.record(cut)));
    cut.map_err(|_| "one cannot be cut off".to_owned())?.map_err(|error| error.to_string())
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
        let mut shape = Self::of_items(items);
        planner.plans.batch = Bytes::ZERO;
        planner.plans.form = None;
        let on_host = planner.memory.is_on_host();
        // A range of all items would not cut anything.
        let some = if on_host { 0..items.max(2) - 1 } else { 0..1 };
        let cut = planner.plans.looks_at_shapes;
        let cut = cut.then(|| glance::<B::Base, _>(|| splitter.range(batch, some)));
        if let Some(Ok(recording)) = &cut {
            let trace = recording.trace();
            let tells = |step: &Step| matches!(step, Step::Call(_) | Step::Upload { .. });
            planner.plans.form = trace.steps.iter().any(tells).then(|| trace.structural_hash());
        }
        match cut {
            Some(Ok(recording)) if on_host => {
                let inputs = recording.inputs().into_iter();
                planner.plans.batch =
                    inputs.map(|input| Bytes::of_elements(&input.shape, input.dtype)).sum();
                shape.from = planner.outgrown(phase, items);
            }
            Some(Ok(_)) => shape.cut = planner.plans.form,
            Some(Err(why)) => {
                log::debug!("batches are told apart by their items alone: {why}");
                planner.plans.looks_at_shapes = false;
            }
            None => {}
        }
        // Once for each plan.
        let to_make = match planner.planned(phase, shape) {
            None => glance::<B::Base, _>(|| splitter.range(batch, 0..items)).ok(),
            Some(_) => None,
        };
        let to_make = to_make.map(|cloned| cloned.bytes_to_make());
        planner.plans.making = bytes_made().max(to_make.unwrap_or_default());
        shape
    }
}
