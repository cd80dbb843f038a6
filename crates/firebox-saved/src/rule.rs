//! Rules: how a number of a trace, such as a dimension, follows from the sizes of a split.
//!
//! A rule is found by comparing traces of several splits, and is a sum of at most two sizes, each
//! times a whole number, and a constant. There are more traces than a rule has parts, so that a
//! rule that fits by chance is rejected by one of them.

use firebox_plan::Split;
use serde::{Deserialize, Serialize};

/// How many sizes there are.
const SIZES: usize = 6;

/// What numbers of a trace may follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sizes([i64; SIZES]);

impl Sizes {
    /// The sizes of a split. `None` if one of them is beyond any batch.
    pub(crate) fn of(split: &Split) -> Option<Self> {
        let (first, rest) = (split.first(), split.rest());
        let (size, count) = rest.map_or((0, 0), |rest| (rest.size, rest.count));
        let of_first = first.size.checked_mul(first.count)?;
        let batch = of_first.checked_add(size.checked_mul(count)?)?;
        let sizes = [first.size, size, batch, first.count, count, of_first];
        let sizes = sizes.map(|size| i64::try_from(size).ok().filter(|size| *size <= MOST));
        sizes.iter().all(Option::is_some).then(|| Self(sizes.map(Option::unwrap_or_default)))
    }
}

impl Sizes {
    /// Whether a recorded batch can have them.
    pub(crate) fn is_sound(&self) -> bool {
        self.0.iter().all(|size| (0..=1 << 20).contains(size))
    }
}

/// No batch has more items, and no number of a trace is larger.
const MOST: i64 = 1 << 48;

/// How a number follows from [`Sizes`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Rule {
    constant: i64,
    /// Which size, and how often it counts.
    terms: Vec<(u8, i64)>,
}

impl Rule {
    /// The number for these sizes. `None` if it is larger than any number of a trace.
    pub(crate) fn at(&self, sizes: &Sizes) -> Option<i64> {
        let mut sum = self.constant;
        for (size, factor) in &self.terms {
            let size = *sizes.0.get(usize::from(*size))?;
            sum = sum.checked_add(size.checked_mul(*factor)?)?;
        }
        (sum.unsigned_abs() <= MOST as u64).then_some(sum)
    }

    /// The simplest rule that gives `values` at `sizes`.
    pub(crate) fn fit(values: &[i64], sizes: &[Sizes]) -> Option<Self> {
        let rule = |constant: i64, terms: &[(usize, i64)]| Self {
            constant,
            terms: terms.iter().map(|(size, factor)| (*size as u8, *factor)).collect(),
        };
        let holds = |rule: &Self| {
            values.iter().zip(sizes).all(|(value, sizes)| rule.at(sizes) == Some(*value))
        };
        let constant = rule(values[0], &[]);
        if holds(&constant) {
            return Some(constant);
        }
        let column = |size: usize| sizes.iter().map(move |sizes| sizes.0[size]).collect::<Vec<_>>();
        let columns: Vec<Vec<i64>> = (0..SIZES).map(column).collect();
        let single = |one: usize| {
            let [factor] = solve(values, [&columns[one]])?;
            Some(rule(values[0] - factor * columns[one][0], &[(one, factor)]))
        };
        let pair = |(one, other): (usize, usize)| {
            let [first, second] = solve(values, [&columns[one], &columns[other]])?;
            let constant = values[0] - first * columns[one][0] - second * columns[other][0];
            Some(rule(constant, &[(one, first), (other, second)]))
        };
        let pairs = || (0..SIZES).flat_map(|one| (one + 1..SIZES).map(move |other| (one, other)));
        let singles = (0..SIZES).filter_map(single);
        singles.chain(pairs().filter_map(pair)).find(holds)
    }
}

/// The whole numbers by which `columns` add up to `values`, but for a constant. They are computed
/// from as many rows as there are columns, and need not hold for the others.
fn solve<const N: usize>(values: &[i64], columns: [&[i64]; N]) -> Option<[i64; N]> {
    let difference = |column: &[i64], row: usize| i128::from(column[row] - column[0]);
    let rows = 1..values.len();
    if N == 1 {
        let row = rows.clone().find(|row| difference(columns[0], *row) != 0)?;
        let factor = exact(difference(values, row), difference(columns[0], row))?;
        return Some([factor; N]);
    }
    for one in rows.clone() {
        for other in one + 1..values.len() {
            let at = |column: usize, row: usize| difference(columns[column], row);
            let determinant = at(0, one) * at(1, other) - at(1, one) * at(0, other);
            if determinant == 0 {
                continue;
            }
            let (v, w) = (difference(values, one), difference(values, other));
            let first = exact(v * at(1, other) - at(1, one) * w, determinant)?;
            let second = exact(at(0, one) * w - v * at(0, other), determinant)?;
            let both = [first, second];
            return Some(std::array::from_fn(|at| both[at]));
        }
    }
    None
}

/// The quotient, if it is a whole number.
fn exact(dividend: i128, divisor: i128) -> Option<i64> {
    (dividend % divisor == 0).then(|| i64::try_from(dividend / divisor).ok())?
}

/// The number of splits that any rule is determined by: the rank of their sizes, with a constant.
pub(crate) fn rank(sizes: &[Sizes]) -> usize {
    let row =
        |sizes: &Sizes| std::iter::once(1).chain(sizes.0).map(i128::from).collect::<Vec<i128>>();
    let mut rows: Vec<Vec<i128>> = sizes.iter().map(row).collect();
    let mut rank = 0;
    for column in 0..=SIZES {
        let Some(pivot) = (rank..rows.len()).find(|row| rows[*row][column] != 0) else { continue };
        rows.swap(rank, pivot);
        let pivot = rows[rank].clone();
        for row in &mut rows[rank + 1..] {
            let (one, other) = (pivot[column], row[column]);
            row.iter_mut()
                .zip(&pivot)
                .for_each(|(value, pivot)| *value = *value * one - pivot * other);
            // Sizes of samples are small. Their common divisor keeps them so.
            let divisor = row.iter().fold(0, |divisor, value| greatest_common(divisor, *value));
            row.iter_mut().for_each(|value| *value /= divisor.max(1));
        }
        rank += 1;
    }
    rank
}

fn greatest_common(one: i128, other: i128) -> i128 {
    if other == 0 { one.abs() } else { greatest_common(other, one % other) }
}

#[cfg(test)]
mod tests {
    use firebox_plan::Run;
    use proptest::prelude::*;

    use super::*;

    fn sizes(first: (usize, usize), rest: Option<(usize, usize)>) -> Sizes {
        let run = |(count, size)| Run { count, size };
        Sizes::of(&Split::new(run(first), rest.map(run))).expect("a small batch")
    }

    /// Splits with three or more of both sizes.
    fn samples() -> Vec<Sizes> {
        [
            ((3, 3), (3, 2)),
            ((4, 3), (3, 2)),
            ((3, 3), (4, 2)),
            ((3, 4), (3, 2)),
            ((3, 4), (3, 3)),
            ((4, 5), (4, 3)),
            ((5, 5), (3, 4)),
            ((4, 7), (5, 2)),
        ]
        .map(|(first, rest)| sizes(first, Some(rest)))
        .to_vec()
    }

    #[test]
    fn samples_determine_every_size() {
        assert_eq!(rank(&samples()), SIZES + 1);
        assert_eq!(rank(&[sizes((1, 2), None), sizes((1, 3), None), sizes((1, 5), None)]), 2);
    }

    #[test]
    fn a_product_of_sizes_is_no_rule() {
        let squares: Vec<i64> = samples().iter().map(|sizes| sizes.0[0] * sizes.0[0]).collect();
        assert_eq!(Rule::fit(&squares, &samples()), None);
    }

    #[test]
    fn a_number_beyond_all_traces_is_none() {
        let rule = Rule { constant: 0, terms: vec![(0, i64::MAX)] };
        assert_eq!(rule.at(&sizes((1, 3), None)), None);
        let unknown = Rule { constant: 0, terms: vec![(200, 1)] };
        assert_eq!(unknown.at(&sizes((1, 3), None)), None);
    }

    proptest! {
        #[test]
        fn what_follows_a_rule_is_found(
            constant in -1000_i64..1000,
            one in 0_u8..6, other in 0_u8..6,
            factors in (-4096_i64..4096, -4096_i64..4096),
        ) {
            let truth = Rule { constant, terms: vec![(one, factors.0), (other, factors.1)] };
            let values: Vec<i64> =
                samples().iter().map(|sizes| truth.at(sizes).expect("small")).collect();
            let found = Rule::fit(&values, &samples()).expect("it follows a rule");
            // Sizes that no sample has.
            let unseen = [sizes((9, 31), Some((2, 17))), sizes((70, 64), Some((5, 63)))];
            for sizes in samples().iter().chain(&unseen) {
                prop_assert_eq!(found.at(sizes), truth.at(sizes));
            }
        }
    }
}
