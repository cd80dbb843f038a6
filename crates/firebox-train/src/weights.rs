//! The weights of batches and micro-batches in the loss. The training loop scales gradients by
//! them.

use crate::error::TrainError;
use crate::reduction::LossReduction;

/// The weight of a batch in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchWeight {
    /// What it says, or what it divides by. In a mean it is zero if nothing in the batch counts.
    pub(crate) stated: f64,
    /// What it counts beside other batches, if that is another.
    pub(crate) counted: Option<f64>,
    /// Its number of items.
    pub(crate) items: usize,
    pub(crate) reduction: LossReduction,
}

impl BatchWeight {
    /// # Errors
    ///
    /// If there is no mean over this weight.
    pub(crate) fn new(
        stated: f64,
        items: usize,
        reduction: LossReduction,
    ) -> Result<Self, TrainError> {
        let is_negative = reduction == LossReduction::Mean && stated < 0.0;
        match !stated.is_finite() || is_negative {
            true => Err(TrainError::Weight { weight: stated }),
            false => Ok(Self { stated, counted: None, items, reduction }),
        }
    }

    /// Whether nothing in the batch counts. Its own loss may have a gradient, such as a sum over
    /// nothing next to another term, or be a mean over nothing, which is not a number.
    pub(crate) fn is_nothing(&self) -> bool {
        self.reduction == LossReduction::Mean && self.stated == 0.0
    }

    /// What its parts weigh in total, by which their gradients are added up: where nothing counts,
    /// their items.
    pub(crate) fn total(&self) -> f64 {
        if self.is_nothing() { self.items as f64 } else { self.stated }
    }

    /// What a part of `items` items weighs that states `weight`.
    pub(crate) fn of_part(&self, weight: f64, items: usize) -> f64 {
        if self.is_nothing() { items as f64 } else { weight }
    }

    /// Whether parts that weigh `parts` make up another weight than the batch states.
    pub(crate) fn differs_from(&self, parts: f64) -> bool {
        self.reduction == LossReduction::Mean && differ(parts, self.total(), self.items)
    }
}

/// Whether the weights of the parts of a batch of `items` items differ from the weight of the
/// whole. A weight that sums a tensor is rounded: in 32 bit by up to an epsilon per item, in 16 bit
/// by more. The gradient does not depend on that, because it is divided by the sum over the parts.
pub(crate) fn differ(parts: f64, whole: f64, items: usize) -> bool {
    let tolerance = (items as f64 * f64::from(f32::EPSILON)).clamp(1e-4, 1e-2);
    !parts.is_finite() || (parts - whole).abs() > tolerance * whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_needs_a_weight_and_a_sum_none() {
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            let weight = BatchWeight::new(bad, 4, LossReduction::Mean);
            assert!(matches!(weight, Err(TrainError::Weight { .. })));
        }
        assert!(BatchWeight::new(f64::NAN, 4, LossReduction::Sum).is_err());
        let of = |stated, reduction| BatchWeight::new(stated, 4, reduction).expect("a weight");
        assert!(of(0.0, LossReduction::Mean).is_nothing());
        assert!(
            !of(0.0, LossReduction::Sum).is_nothing() && !of(2.5, LossReduction::Mean).is_nothing()
        );
        assert_eq!(
            (of(2.5, LossReduction::Mean).total(), of(0.0, LossReduction::Mean).total()),
            (2.5, 4.0)
        );
        assert_eq!(LossReduction::Mean.scale(0.0, 4.0), None);
        assert_eq!(LossReduction::Mean.scale(1.0, 4.0), Some(0.25));
        assert_eq!(LossReduction::Sum.scale(0.0, 4.0), Some(1.0));
        assert_eq!(LossReduction::Mean.rest(4.0, 8.0), 0.5);
        assert_eq!(LossReduction::Mean.rest(4.0, 4.000_000_1), 1.0);
        assert_eq!(LossReduction::Sum.rest(4.0, 8.0), 1.0);
    }

    #[test]
    fn sums_of_class_weights_in_32_bit_are_equal_and_other_weights_are_not() {
        const ITEMS: usize = 20_000;
        let weight = |item: usize| [0.1f32, 0.7, 3.3][item % 3];
        let sum = |items: std::ops::Range<usize>| f64::from(items.map(weight).sum::<f32>());
        let whole = sum(0..ITEMS);
        let parts: f64 = (0..ITEMS).step_by(50).map(|start| sum(start..start + 50)).sum();
        assert!((parts - whole).abs() > 1e-6 * whole, "rounding shows: {parts} and {whole}");
        assert!(!differ(parts, whole, ITEMS));
        assert!(differ(parts * 1.02, whole, ITEMS));
        assert!(differ(8.0, 8.01, 8) && differ(f64::NAN, 1.0, 1));
    }
}
