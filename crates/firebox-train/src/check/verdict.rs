//! Judges the gradients of a few items, together and in parts: whether they agree, and if not, what
//! couples the items.

use std::fmt;

use burn::tensor::DType;

use crate::reduction::LossReduction;

/// Why the gradient of a split batch differs from the whole batch's. Displays as the cause and what
/// helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Coupling {
    /// The loss is a sum over the items, or a sum divided by a fixed number, where a mean is
    /// expected.
    Sum,
    /// The loss is a mean over the items where a sum is expected.
    Mean,
    /// The loss is a mean in which items have other weights than the batch states.
    Weights,
    /// A part of the loss occurs once per batch, and is counted once per micro-batch.
    Penalty,
    /// The loss of an item depends on the other items.
    Items,
    /// The step changes its gradients by numbers that it makes of them.
    Gradients,
}

impl fmt::Display for Coupling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "the loss is a sum over the items, which `.reduction(LossReduction::Sum)` is for",
            Self::Mean => "the loss is a mean over the items, which `LossReduction::Mean`, the default, is for",
            Self::Weights => {
                "the loss is a mean in which items weigh otherwise than the batch says: give the batch the weight that the \
                 loss divides by, as `firebox::weight` counts it for classes and for tokens"
            }
            Self::Penalty => {
                "a part of the loss does not belong to items and is counted once for each micro-batch: multiply it by \
                 `firebox::batch_share()`, take a mean, or leave the penalty to the optimizer"
            }
            Self::Items => {
                "the loss of an item depends on the other items of its batch, as in contrastive losses, hard-example mining, \
                 a root of a mean or a maximum"
            }
            Self::Gradients => "the step changes its gradients by numbers that it makes of them",
        })
    }
}

/// Whether the gradients of split batches equal the whole batches', as known at the end of
/// training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitCheck {
    /// No batch was split.
    #[default]
    NotNeeded,
    /// The recorded operations show that the gradients are equal, up to rounding.
    Proved,
    /// The gradients agree, on items from this training.
    Agrees,
    /// The gradients differ, and batches were split because of `.split_although(..)`.
    Accepted(Coupling),
    /// It could not be determined, for this reason.
    Unknown(String),
}

/// A gradient, or its [sketch](super::sketch): one vector per parameter, in the order of the model.
pub(super) type Gradient = Vec<Vec<f64>>;

/// A gradient, and the weight of its items.
#[derive(Clone, Debug)]
pub(super) struct Weighed {
    pub(super) gradient: Gradient,
    pub(super) weight: f64,
}

/// The gradients of three groups of items: all together, the first two together, and each alone.
/// With two items there are two groups and no pair.
#[derive(Clone, Debug)]
pub(super) struct Gradients {
    pub(super) whole: Weighed,
    pub(super) pair: Option<Weighed>,
    pub(super) singles: Vec<Weighed>,
    /// All items together, in another order.
    pub(super) permuted: Gradient,
}

/// The verdict on gradients.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    Equal,
    /// There is no gradient to compare.
    Nothing,
    Differs {
        coupling: Coupling,
        /// The difference, relative to the gradient.
        by: f64,
        /// The index of the parameter that differs most.
        parameter: usize,
    },
}

/// The effect of rounding on a gradient.
#[derive(Clone, Copy, Debug)]
pub(super) struct Precision {
    /// The difference that is tolerated, relative to the largest summand.
    pub(super) tolerance: f64,
    /// The distance from one to the next larger number.
    epsilon: f64,
    /// The smallest norm of a gradient. Anything below it is what rounding leaves of zeros.
    least: f64,
}

impl Precision {
    /// The precision of gradients of a type.
    pub(super) fn of(dtype: DType) -> Self {
        let (tolerance, epsilon) = match dtype {
            // burn's autodiff divides by 32-bit reciprocals, and successive normalizations magnify
            // the error.
            DType::F64 => (1e-4, f64::EPSILON),
            DType::F32 => (1e-3, f64::from(f32::EPSILON)),
            DType::F16 | DType::Flex32 => (0.05, 2f64.powi(-10)),
            _ => (0.2, 2f64.powi(-7)),
        };
        Self { tolerance, epsilon, least: epsilon.min(f64::from(f32::EPSILON)) }
    }

    /// The precision after a normalization over equal items. Their variance is zero, so rounding is
    /// divided by the root of what the normalization adds to it (1e-5 in burn).
    pub(super) fn behind_equal_items(self) -> Self {
        Self { epsilon: self.epsilon * 1e3, ..self }
    }
}

/// A difference below ten times what another order of the items changes counts as rounding.
const ABOVE_PERMUTATION: f64 = 10.0;

/// The most that another order of the items changes by rounding, relative to the gradient.
/// Successive normalizations magnify rounding.
const MOST_ROUNDING: f64 = 0.01;

impl Gradients {
    /// Compares the gradient of the whole with its parts: with two and one, and with one by one.
    pub(super) fn verdict(&self, reduction: LossReduction, precision: Precision) -> Verdict {
        let scales = self.scales();
        let most = scales.iter().copied().fold(0.0, f64::max);
        if most <= precision.least || !most.is_finite() {
            return Verdict::Nothing;
        }
        match self.worst(&self.expected(reduction), precision) {
            None => Verdict::Equal,
            Some((by, parameter)) => {
                let coupling = self.coupling(reduction, precision.tolerance * 3.0, most);
                Verdict::Differs { coupling, by, parameter }
            }
        }
    }

    /// Whether the gradient would differ if all parts had equal weight. If not, a wrong weight does
    /// not show.
    pub(super) fn depends_on_weights(&self, precision: Precision) -> bool {
        let alike: Vec<Weighed> =
            self.singles.iter().map(|single| Weighed { weight: 1.0, ..single.clone() }).collect();
        let mean = joined(&alike.iter().collect::<Vec<_>>(), LossReduction::Mean);
        self.worst(&[mean], precision).is_some()
    }

    /// The largest difference from the `expected` gradients, relative to the size of the gradient,
    /// and its parameter. `None` if it is no more than rounding.
    fn worst(&self, expected: &[Gradient], precision: Precision) -> Option<(f64, usize)> {
        let Precision { tolerance, epsilon, .. } = precision;
        let scales = self.scales();
        let most = scales.iter().copied().fold(0.0, f64::max);
        let mut worst = None;
        for (at, scale) in scales.into_iter().enumerate() {
            // A parameter whose gradient is only rounding, such as a bias before a normalization,
            // tells nothing.
            let scale = scale.max(10.0 * epsilon / tolerance * most);
            let apart = |other: &Gradient| apart(&self.whole.gradient[at], &other[at]) / scale;
            // A larger difference is not rounding: a batch may have an order, or hold more than
            // tensors.
            let permuted =
                Some(apart(&self.permuted)).filter(|apart| *apart <= MOST_ROUNDING.max(tolerance));
            let permuted = permuted.unwrap_or(0.0) * ABOVE_PERMUTATION;
            let differs = expected.iter().map(apart).fold(0.0, f64::max);
            if differs > tolerance.max(permuted) && worst.is_none_or(|(most, _)| differs > most) {
                worst = Some((differs, at));
            }
        }
        worst
    }

    fn scales(&self) -> Vec<f64> {
        (0..self.whole.gradient.len()).map(|at| self.scale(at)).collect()
    }

    /// The largest norm of a parameter's gradients. Rounding is relative to it.
    fn scale(&self, parameter: usize) -> f64 {
        let all = std::iter::once(&self.whole).chain(&self.pair).chain(&self.singles);
        all.map(|weighed| norm(&weighed.gradient[parameter])).fold(0.0, f64::max)
    }

    /// What the gradient of the whole must be, according to its parts.
    fn expected(&self, reduction: LossReduction) -> Vec<Gradient> {
        let singles: Vec<&Weighed> = self.singles.iter().collect();
        let mut expected = vec![joined(&singles, reduction)];
        if let (Some(pair), Some(last)) = (&self.pair, singles.last()) {
            expected.push(joined(&[pair, last], reduction));
        }
        expected
    }

    /// The known coupling that explains the gradients.
    fn coupling(&self, reduction: LossReduction, tolerance: f64, most: f64) -> Coupling {
        let near = |a: &Gradient, b: &Gradient| apart(&a.concat(), &b.concat()) <= tolerance * most;
        let is =
            |reduction| self.expected(reduction).iter().all(|sum| near(&self.whole.gradient, sum));
        match reduction {
            LossReduction::Mean if is(LossReduction::Sum) => Coupling::Sum,
            LossReduction::Sum if is(LossReduction::Mean) => Coupling::Mean,
            LossReduction::Sum if self.is_penalty(near) => Coupling::Penalty,
            // Nothing in a part counts, and it has a gradient all the same.
            LossReduction::Mean if self.singles.iter().any(|part| part.weight == 0.0) => {
                Coupling::Weights
            }
            LossReduction::Mean if self.is_weighted(tolerance, most) => Coupling::Weights,
            _ => Coupling::Items,
        }
    }

    /// Whether each part has the same summand once. With three parts, their sum then has it three
    /// times and the whole once, so the whole lacks it twice.
    fn is_penalty(&self, near: impl Fn(&Gradient, &Gradient) -> bool) -> bool {
        let (Some(pair), [first, second, _]) = (&self.pair, &self.singles[..]) else {
            return false;
        };
        let both = joined(&[first, second], LossReduction::Sum);
        let penalty = combined(&[(&both, 1.0), (&pair.gradient, -1.0)]);
        let singles: Vec<&Weighed> = self.singles.iter().collect();
        let sum = joined(&singles, LossReduction::Sum);
        near(&self.whole.gradient, &combined(&[(&sum, 1.0), (&penalty, -2.0)]))
    }

    /// Whether the whole is a mean of the parts with other weights, none of them zero. A maximum is
    /// not such a mean.
    fn is_weighted(&self, tolerance: f64, most: f64) -> bool {
        let fits = |target: &Gradient, parts: [&Gradient; 2]| {
            let parts = parts.map(|part| part.concat());
            let target = target.concat();
            let Some(shares) = least_squares(&parts, &target) else { return false };
            let mut sum = vec![0.0; target.len()];
            for (part, share) in parts.iter().zip(&shares) {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part * share);
            }
            let total: f64 = shares.iter().sum();
            let is_mean =
                shares.iter().all(|share| *share > 1e-4) && (total - 1.0).abs() < tolerance / 30.0;
            is_mean && apart(&sum, &target) <= tolerance * most
        };
        // Fits the first two, and then that pair with the third. Three gradients of one input may
        // be linearly dependent, but two hardly are.
        match (&self.pair, &self.singles[..]) {
            (Some(pair), [first, second, third]) => {
                fits(&pair.gradient, [&first.gradient, &second.gradient])
                    && fits(&self.whole.gradient, [&pair.gradient, &third.gradient])
            }
            (None, [first, second]) => {
                fits(&self.whole.gradient, [&first.gradient, &second.gradient])
            }
            _ => false,
        }
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// The distance between two vectors. Infinite if a value is not a number.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    if squares.is_finite() { squares.sqrt() } else { f64::INFINITY }
}

fn combined(summands: &[(&Gradient, f64)]) -> Gradient {
    let mut sum: Gradient = summands[0].0.iter().map(|values| vec![0.0; values.len()]).collect();
    for (gradient, scale) in summands {
        for (sum, values) in sum.iter_mut().zip(gradient.iter()) {
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * scale);
        }
    }
    sum
}

/// The joint gradient of parts, added up the way the Learner does.
fn joined(parts: &[&Weighed], reduction: LossReduction) -> Gradient {
    let total: f64 = parts.iter().map(|part| part.weight).sum();
    let counts = |part: &&&Weighed| reduction == LossReduction::Sum || part.weight != 0.0;
    let share = |part: &&Weighed| match reduction {
        LossReduction::Sum => 1.0,
        LossReduction::Mean => part.weight / total,
    };
    let summands = parts.iter().filter(counts).map(|part| (&part.gradient, share(part)));
    let mut summands: Vec<_> = summands.collect();
    if summands.is_empty() {
        summands.push((&parts[0].gradient, 0.0));
    }
    combined(&summands)
}

/// The coefficients for which the sum of `parts` is closest to `target`, by the normal equations.
/// `None` if parts are alike.
fn least_squares(parts: &[Vec<f64>], target: &[f64]) -> Option<Vec<f64>> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let count = parts.len();
    let mut rows: Vec<Vec<f64>> = parts
        .iter()
        .map(|a| parts.iter().map(|b| dot(a, b)).chain([dot(a, target)]).collect())
        .collect();
    let largest = rows.iter().enumerate().map(|(at, row)| row[at]).fold(0.0, f64::max);
    for column in 0..count {
        let by_size =
            |a: &usize, b: &usize| rows[*a][column].abs().total_cmp(&rows[*b][column].abs());
        let pivot = (column..count).max_by(by_size)?;
        rows.swap(column, pivot);
        if rows[column][column].abs() <= 1e-9 * largest {
            return None;
        }
        let row = rows[column].clone();
        for (at, other) in rows.iter_mut().enumerate().filter(|(at, _)| *at != column) {
            let factor = other[column] / row[column];
            debug_assert_ne!(at, column);
            other.iter_mut().zip(&row).for_each(|(value, of)| *value -= factor * of);
        }
    }
    Some((0..count).map(|at| rows[at][count] / rows[at][at]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXACT: Precision =
        Precision { tolerance: 1e-6, epsilon: f64::EPSILON, least: f64::EPSILON };

    /// What each item adds to the gradient of two parameters.
    const ITEMS: [[f64; 6]; 3] = [
        [1.0, -2.0, 0.5, 3.0, 0.1, -0.7],
        [0.4, 1.0, -1.5, 0.2, 2.0, 0.9],
        [-0.3, 0.6, 1.1, -1.0, 0.8, 2.5],
    ];

    /// The gradients of a loss. `of` returns the gradient for a list of items.
    fn gradients(of: impl Fn(&[usize]) -> [f64; 6], weight: impl Fn(usize) -> f64) -> Gradients {
        let weighed = |items: &[usize]| {
            let values = of(items);
            let gradient = vec![values[..4].to_vec(), values[4..].to_vec()];
            Weighed { gradient, weight: items.iter().map(|item| weight(*item)).sum() }
        };
        Gradients {
            whole: weighed(&[0, 1, 2]),
            pair: Some(weighed(&[0, 1])),
            singles: (0..3).map(|item| weighed(&[item])).collect(),
            permuted: weighed(&[2, 0, 1]).gradient,
        }
    }

    fn weighted(items: &[usize], weight: impl Fn(usize) -> f64, over: f64) -> [f64; 6] {
        std::array::from_fn(|at| {
            items.iter().map(|item| ITEMS[*item][at] * weight(*item)).sum::<f64>() / over
        })
    }

    fn mean(items: &[usize]) -> [f64; 6] {
        weighted(items, |_| 1.0, items.len() as f64)
    }

    #[track_caller]
    fn check(gradients: &Gradients, reduction: LossReduction, expected: Option<Coupling>) {
        let found = match gradients.verdict(reduction, EXACT) {
            Verdict::Equal => None,
            Verdict::Differs { coupling, by, .. } => {
                assert!(by > 1e-3, "{by}");
                Some(coupling)
            }
            Verdict::Nothing => panic!("there is a gradient"),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn known_losses_are_told_apart() {
        let one = |_| 1.0;
        let classes = |item: usize| [0.2, 1.0, 3.5][item];
        let by_class = |items: &[usize]| {
            weighted(items, classes, items.iter().map(|item| classes(*item)).sum())
        };
        let sum = |items: &[usize]| weighted(items, one, 1.0);
        let over_eight = |items: &[usize]| weighted(items, one, 8.0);
        let penalized = |items: &[usize]| sum(items).map(|value| value + 0.3);
        let root = |items: &[usize]| mean(items).map(|value| value / (items.len() as f64).sqrt());
        check(&gradients(mean, one), LossReduction::Mean, None);
        check(&gradients(by_class, classes), LossReduction::Mean, None);
        check(&gradients(sum, one), LossReduction::Sum, None);
        check(&gradients(by_class, one), LossReduction::Mean, Some(Coupling::Weights));
        check(&gradients(sum, one), LossReduction::Mean, Some(Coupling::Sum));
        check(&gradients(over_eight, one), LossReduction::Mean, Some(Coupling::Sum));
        check(&gradients(mean, one), LossReduction::Sum, Some(Coupling::Mean));
        check(&gradients(penalized, one), LossReduction::Sum, Some(Coupling::Penalty));
        check(&gradients(root, one), LossReduction::Mean, Some(Coupling::Items));
        let penalized_mean = |items: &[usize]| mean(items).map(|value| value + 0.3);
        check(&gradients(penalized_mean, one), LossReduction::Mean, None);
    }

    #[test]
    fn a_difference_in_a_small_parameter_is_seen_and_rounding_is_not() {
        let one = |_| 1.0;
        let rounded =
            |items: &[usize]| mean(items).map(|value| value * (1.0 + 1e-8 * items.len() as f64));
        check(&gradients(rounded, one), LossReduction::Mean, None);
        let small = |items: &[usize]| {
            let mut values = mean(items);
            values[4..].iter_mut().for_each(|value| *value *= 1e-4 * items.len() as f64);
            values
        };
        check(&gradients(small, one), LossReduction::Mean, Some(Coupling::Items));
    }

    #[test]
    fn what_another_order_changes_is_rounding_as_far_as_it_is_little() {
        let one = |_| 1.0;
        let root = |by: f64| {
            move |items: &[usize]| mean(items).map(|value| value * (1.0 + by * items.len() as f64))
        };
        let ordered = |mut gradients: Gradients, by: f64| {
            let values = gradients.permuted.iter_mut().flatten();
            values.for_each(|value| *value *= 1.0 + by);
            gradients
        };
        let noisy = |by| ordered(gradients(root(1e-3), one), by);
        check(&noisy(1e-3), LossReduction::Mean, None);
        check(&noisy(1e-5), LossReduction::Mean, Some(Coupling::Items));
        // This much is not rounding: the loss depends on the order of the items.
        check(
            &ordered(gradients(root(0.02), one), 0.5),
            LossReduction::Mean,
            Some(Coupling::Items),
        );
    }

    #[test]
    fn no_gradient_tells_nothing() {
        let none = gradients(|_| [0.0; 6], |_| 1.0);
        assert_eq!(none.verdict(LossReduction::Mean, EXACT), Verdict::Nothing);
    }

    #[test]
    fn parts_without_weight_do_not_count() {
        let weight = |item: usize| [1.0, 0.0, 2.0][item];
        let real =
            |items: &[usize]| weighted(items, weight, items.iter().map(|item| weight(*item)).sum());
        check(&gradients(real, weight), LossReduction::Mean, None);
        assert!(gradients(real, weight).depends_on_weights(EXACT));
    }

    #[test]
    fn weights_show_only_where_parts_of_another_weight_have_a_gradient() {
        // Only the last item has a gradient, and its weight is the one it would have in a mean over
        // the items.
        let last = |items: &[usize]| {
            weighted(items, |item| f64::from(u8::from(item == 2)), items.len() as f64)
        };
        let found = gradients(last, |item| [2.0, 0.0, 1.0][item]);
        check(&found, LossReduction::Mean, None);
        assert!(!found.depends_on_weights(EXACT));
    }
}
