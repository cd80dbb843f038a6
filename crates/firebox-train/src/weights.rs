//! The weights of batches and micro-batches in the loss. The training loop scales gradients by
//! them.

use crate::error::TrainError;
use crate::reduction::Reduction;

/// The weight of a batch. `None` if nothing in it counts, so that it has no mean.
pub(crate) fn of_batch(weight: f64, reduction: Reduction) -> Result<Option<f64>, TrainError> {
    match reduction {
        _ if !weight.is_finite() => Err(TrainError::Weight { weight }),
        Reduction::Sum => Ok(Some(weight)),
        Reduction::Mean if weight < 0.0 => Err(TrainError::Weight { weight }),
        Reduction::Mean => Ok((weight > 0.0).then_some(weight)),
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
            assert!(matches!(of_batch(bad, Reduction::Mean), Err(TrainError::Weight { .. })));
        }
        assert!(of_batch(f64::NAN, Reduction::Sum).is_err());
        assert!(matches!(of_batch(0.0, Reduction::Mean), Ok(None)));
        assert!(matches!(of_batch(0.0, Reduction::Sum), Ok(Some(0.0))));
        assert!(matches!(of_batch(2.5, Reduction::Mean), Ok(Some(2.5))));
        assert_eq!(Reduction::Mean.scale(0.0, 4.0), None);
        assert_eq!(Reduction::Mean.scale(1.0, 4.0), Some(0.25));
        assert_eq!(Reduction::Sum.scale(0.0, 4.0), Some(1.0));
        assert_eq!(Reduction::Mean.rest(4.0, 8.0), 0.5);
        assert_eq!(Reduction::Mean.rest(4.0, 4.000_000_1), 1.0);
        assert_eq!(Reduction::Sum.rest(4.0, 8.0), 1.0);
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
