//! The gradients that go into one optimizer step. The training loop fills it batch by batch.

use crate::gradients::WeightedGradients;
use crate::reduction::Reduction;

/// The gradients of the loader batches since the last optimizer step.
pub(super) struct Accumulated<M> {
    /// Relative to the weight of the first loader batch.
    pub(super) gradients: WeightedGradients<M>,
    pub(super) batches: usize,
}

impl<M> Accumulated<M> {
    pub(super) fn new(reduction: Reduction) -> Self {
        Self { gradients: WeightedGradients::new(reduction, 1.0), batches: 0 }
    }

    /// Notes that the gradients of a batch of weight `total` are added from here on.
    pub(super) fn begin_batch(&mut self, total: f64) {
        if self.batches == 0 {
            self.gradients.relative_to(total);
        }
        self.batches += 1;
    }
}
