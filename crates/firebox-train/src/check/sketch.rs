//! Represents a gradient by a few numbers, so that several gradients of a large model take little
//! memory. The check compares these sketches.
//!
//! It is a count sketch (Charikar, Chen and Farach-Colton, "Finding frequent items in data
//! streams", 2002). Each element is added to one of a few buckets with a sign; a hash of its index
//! determines both. The sketch is linear, so a sum of gradients has the sum of their sketches. It
//! preserves lengths and distances to within a few hundredths.

/// How many numbers represent the gradient of a parameter. A parameter with at most this many
/// elements is not reduced.
const BUCKETS: usize = 1024;

/// The sketch of `elements` elements.
pub(super) fn sketch(elements: usize, values: impl Iterator<Item = f64>) -> Vec<f64> {
    if elements <= BUCKETS {
        return values.collect();
    }
    let mut buckets = vec![0.0; BUCKETS];
    for (at, value) in values.enumerate() {
        let hash = scatter(at as u64);
        let sign = if hash >> 63 == 0 { 1.0 } else { -1.0 };
        buckets[hash as usize % BUCKETS] += sign * value;
    }
    buckets
}

/// The sketch of a gradient of zeros.
pub(super) fn of_zeros(elements: usize) -> Vec<f64> {
    vec![0.0; elements.min(BUCKETS)]
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn scatter(at: u64) -> u64 {
    let mut hash = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norm(values: &[f64]) -> f64 {
        values.iter().map(|value| value * value).sum::<f64>().sqrt()
    }

    #[test]
    fn lengths_are_kept_and_sums_are_sums() {
        const ELEMENTS: usize = 200_000;
        let first: Vec<f64> = (0..ELEMENTS).map(|at| (at as f64 * 0.7).sin()).collect();
        // Like an embedding with few used rows.
        let second: Vec<f64> =
            (0..ELEMENTS).map(|at| if at % 4096 < 8 { 1.5 } else { 0.0 }).collect();
        let of = |values: &[f64]| sketch(values.len(), values.iter().copied());
        for values in [&first, &second] {
            let ratio = norm(&of(values)) / norm(values);
            assert!((0.85..1.15).contains(&ratio), "{ratio}");
        }
        let sum: Vec<f64> = first.iter().zip(&second).map(|(a, b)| a + b).collect();
        let of_sum = of(&sum);
        for ((a, b), sum) in of(&first).iter().zip(of(&second)).zip(&of_sum) {
            assert!((a + b - sum).abs() < 1e-9);
        }
        assert_eq!(of_sum.len(), of_zeros(ELEMENTS).len());
    }

    #[test]
    fn few_elements_stand_for_themselves() {
        assert_eq!(sketch(3, [1.0, f64::NAN, 2.0].into_iter())[2], 2.0);
        assert_eq!(of_zeros(3), [0.0; 3]);
        let lost = sketch(5000, (0..5000).map(|at| if at == 17 { f64::NAN } else { 0.0 }));
        assert!(lost.iter().any(|value| value.is_nan()), "what is no number stays none");
    }
}
