//! The share of its batch that a step sees, for loss terms that count once per batch. Each
//! micro-step runs inside [`with_share`].

use std::cell::Cell;

thread_local! {
    static SHARE: Cell<f64> = const { Cell::new(1.0) };
}

/// The share of its batch that the running step sees, by number of items. It is 1 for a whole
/// batch, and outside of steps.
///
/// With [summed](crate::LossReduction::Sum) losses, a term that belongs to the batch and not to its
/// items, such as a penalty on the weights, counts once per micro-batch where the recorded step
/// does not show it: several ranks share a step, or it reads values. Multiplied by this share
/// it counts once per loader batch, because the shares of its micro-batches add up to 1. If several
/// loader batches are accumulated into one optimizer step, the term counts once for each, as
/// without firebox. Several [ranks](crate::LearnerBuilder::ranks) share an optimizer step, and so
/// does each of their shares; a rank without a batch in the step has none of it. With
/// [`LossReduction::Mean`](crate::LossReduction::Mean) losses are weighted as a whole, and the
/// share is not needed.
///
/// ```
/// use burn::prelude::*;
///
/// fn loss<B: Backend>(of_items: Tensor<B, 1>, weight: Tensor<B, 2>) -> Tensor<B, 1> {
///     of_items.sum() + weight.powi_scalar(2).sum() * (0.01 * firebox_train::batch_share())
/// }
/// ```
pub fn batch_share() -> f64 {
    SHARE.get()
}

/// Runs a step that sees `share` of its batch.
pub(crate) fn with_share<R>(share: f64, step: impl FnOnce() -> R) -> R {
    struct Before(f64);

    impl Drop for Before {
        fn drop(&mut self) {
            SHARE.set(self.0);
        }
    }

    let _before = Before(SHARE.replace(share));
    step()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_panics_leaves_no_share() {
        let panics = || with_share(0.25, || std::panic::resume_unwind(Box::new(batch_share())));
        let share = std::panic::catch_unwind(panics).map(|()| 0.0);
        let share = share.expect_err("it panics").downcast::<f64>().expect("a share");
        assert_eq!((*share, batch_share()), (0.25, 1.0));
    }
}
