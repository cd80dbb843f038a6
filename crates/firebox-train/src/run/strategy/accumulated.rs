//! The gradients that go into one optimizer step. The training loop fills it batch by batch.

use crate::gradients::WeightedGradients;
use crate::reduction::LossReduction;
use crate::weights::BatchWeight;

/// The gradients of the loader batches since the last optimizer step.
pub(super) struct Accumulated<M> {
    /// Relative to the weight of the first loader batch.
    gradients: WeightedGradients<M>,
    pub(super) batches: usize,
    /// Whether the batches so far weigh nothing. Their gradients are added up by their items then,
    /// and count only if those of no other batch, on any rank, go into the step.
    weighs_nothing: bool,
    reduction: LossReduction,
}

/// What gradients weigh in a step of several ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    pub(super) weight: f64,
    /// The least that the mean is taken over.
    pub(super) least: f64,
    /// Where `weight` is zero: the items behind them.
    pub(super) items: f64,
}

impl<M> Accumulated<M> {
    pub(super) fn new(reduction: LossReduction) -> Self {
        let gradients = WeightedGradients::new(reduction, 1.0);
        Self { gradients, batches: 0, weighs_nothing: true, reduction }
    }

    /// Notes that the gradients of a batch of this weight are added from here on. `None` if they
    /// do not count, because the batch weighs nothing and an earlier one weighs something.
    pub(super) fn begin_batch(&mut self, weight: BatchWeight) -> Option<&mut WeightedGradients<M>> {
        let is_first = self.batches == 0;
        self.batches += 1;
        if weight.is_nothing() && !self.weighs_nothing {
            return None;
        }
        if is_first || self.weighs_nothing && !weight.is_nothing() {
            self.gradients = WeightedGradients::new(self.reduction, weight.total());
        }
        self.weighs_nothing = weight.is_nothing();
        if let Some(counted) = weight.counted.filter(|_| !weight.is_nothing()) {
            self.gradients.count(counted, weight.total());
        }
        Some(&mut self.gradients)
    }

    pub(super) fn gradients(&mut self) -> &mut WeightedGradients<M> {
        &mut self.gradients
    }

    /// Whether there is a gradient.
    pub(super) fn has_any(&self) -> bool {
        self.gradients.so_far().is_some()
    }

    /// What they weigh in a step of several ranks.
    pub(super) fn share(&self) -> Share {
        let (weight, least) = (self.gradients.weight(), self.gradients.least());
        match self.weighs_nothing {
            true => Share { weight: 0.0, least: 0.0, items: weight },
            false => Share { weight, least, items: 0.0 },
        }
    }

    /// The gradients so far.
    pub(super) fn so_far(&self) -> Option<&burn::optim::GradientsParams> {
        self.gradients.so_far()
    }
}
