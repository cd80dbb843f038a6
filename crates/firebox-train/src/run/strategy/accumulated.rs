//! The gradients and weights that go into one optimizer step. The training loop fills it batch by
//! batch.

use crate::gradients::GradientSum;

/// The gradients of the loader batches since the last optimizer step.
pub(super) struct Accumulated<M> {
    pub(super) sum: GradientSum<M>,
    /// The weight that the sum is relative to: the weight of the first loader batch.
    pub(super) reference: f64,
    pub(super) weight: f64,
    pub(super) batches: usize,
}

impl<M> Accumulated<M> {
    pub(super) fn new() -> Self {
        Self { sum: GradientSum::new(), reference: 0.0, weight: 0.0, batches: 0 }
    }

    /// Notes that the gradients of a batch of weight `total` are added from here on.
    pub(super) fn begin_batch(&mut self, total: f64) {
        if self.batches == 0 {
            self.reference = total;
        }
        self.batches += 1;
    }
}
