//! Chooses the items that the check compares, so that they differ in every tensor of the batch.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::TensorData;

/// How many of the first items are candidates.
pub(super) const CANDIDATES: usize = 48;

/// Items to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// Their rows.
    pub(super) rows: Vec<usize>,
    /// Whether they are consecutive, so that a splitter can cut them off as they are.
    pub(super) in_a_row: bool,
    /// Whether they differ in every tensor. If they do not, a wrong weight would not show.
    pub(super) differ: bool,
    /// Whether they also differ in every mark.
    pub(super) differ_in_marks: bool,
}

/// What is known of the candidates: one number each per tensor, equal for equal candidates.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    pub(super) count: usize,
    /// Numbers for each tensor, and for the weights.
    pub(super) tensors: Vec<Vec<u64>>,
    /// How often the smallest and the largest number of a tensor occur in each candidate. Padding,
    /// ignored classes and masks are such numbers.
    pub(super) marks: Vec<Vec<u64>>,
}

impl Candidates {
    /// `count` candidates of which nothing is known.
    pub(super) fn unknown(count: usize) -> Self {
        Self { count, ..Self::default() }
    }

    /// Adds a tensor with one row per candidate.
    pub(super) fn add(&mut self, data: &TensorData) {
        self.tensors.push(hashes(data, self.count));
        self.marks.extend(marks(data, self.count));
    }

    /// Adds the weight of each candidate. Does nothing if all weigh the same, because then a weight
    /// is right or wrong for all of them. A loss that counts an item of no weight, or divides by at
    /// least some weight, shows with the lightest.
    pub(super) fn add_weights(&mut self, weights: Vec<f64>) {
        let lightest = weights.iter().copied().fold(f64::INFINITY, f64::min);
        let weights: Vec<u64> = weights.into_iter().map(f64::to_bits).collect();
        if varies(&weights) {
            let is_lightest = |weight: &u64| u64::from(*weight == lightest.to_bits());
            self.marks.push(weights.iter().map(is_lightest).collect());
            self.tensors.push(weights);
        }
    }

    /// The first `count` candidates.
    pub(super) fn first(&self, count: usize) -> Choice {
        let rows: Vec<usize> = (0..count.min(self.count)).collect();
        let differ = self.differ(&rows);
        let differ_in_marks = differ && self.differ_in_marks(&rows);
        Choice { rows, in_a_row: true, differ, differ_in_marks }
    }

    /// Whether some of them differ in every tensor.
    fn differ(&self, rows: &[usize]) -> bool {
        !self.tensors.is_empty() && self.tensors.iter().all(|of| distinct(of, rows) > 1)
    }

    fn differ_in_marks(&self, rows: &[usize]) -> bool {
        self.marks.iter().all(|of| distinct(of, rows) > 1)
    }

    /// Chooses `count` candidates: the first consecutive ones that differ in every tensor and mark.
    /// If there are none, those that differ in as many as possible. If these do not differ in every
    /// tensor, the first ones.
    pub(super) fn choose(&self, count: usize) -> Choice {
        let count = count.min(self.count);
        let in_a_row = |start: usize| -> Vec<usize> { (start..start + count).collect() };
        let all = || self.tensors.iter().chain(&self.marks);
        let starts = 0..=self.count - count;
        if let Some(rows) =
            starts.map(in_a_row).find(|rows| self.differ(rows) && self.differ_in_marks(rows))
        {
            return Choice { rows, in_a_row: true, differ: true, differ_in_marks: true };
        }
        // Adds one item after the other: each time the first one that brings the most new values.
        let mut rows: Vec<usize> = vec![0];
        while rows.len() < count {
            let gain = |row: usize| {
                let with: Vec<usize> = rows.iter().copied().chain([row]).collect();
                let new = all().map(|of| distinct(of, &with)).sum::<usize>();
                // Tensors and marks in which all chosen items are still alike count most.
                let alike = all().filter(|of| distinct(of, &with) == 1).count();
                (usize::MAX - alike, new, usize::MAX - row)
            };
            let next = (0..self.count).filter(|row| !rows.contains(row));
            rows.extend(next.max_by_key(|row| gain(*row)));
        }
        if self.differ(&rows) {
            let differ_in_marks = self.differ_in_marks(&rows);
            return Choice { rows, in_a_row: false, differ: true, differ_in_marks };
        }
        Choice { rows: in_a_row(0), in_a_row: true, differ: false, differ_in_marks: false }
    }
}

/// How many different numbers the candidates `rows` have.
fn distinct(of: &[u64], rows: &[usize]) -> usize {
    let mut values: Vec<u64> = rows.iter().map(|row| of[*row]).collect();
    values.sort_unstable();
    values.dedup();
    values.len()
}

fn varies(of: &[u64]) -> bool {
    of.windows(2).any(|two| two[0] != two[1])
}

/// Counts how often each row holds the smallest number of a tensor, and how often the largest.
/// Keeps only counts that vary, and marks that more than one row holds.
fn marks(data: &TensorData, rows: usize) -> Vec<Vec<u64>> {
    let size = (data.num_elements() / rows.max(1)).max(1);
    let smallest = data.iter::<f64>().fold(f64::INFINITY, f64::min);
    let largest = data.iter::<f64>().fold(f64::NEG_INFINITY, f64::max);
    let count = |mark: f64| -> Vec<u64> {
        let mut counts = vec![0; rows];
        let marked = data.iter::<f64>().enumerate().filter(|(_, value)| *value == mark);
        marked.for_each(|(at, _)| counts[at / size] += 1);
        counts
    };
    let counts = [count(smallest), count(largest)].into_iter();
    counts.filter(|of| varies(of) && of.iter().filter(|count| **count > 0).count() > 1).collect()
}

/// One number per row of a tensor. Equal rows have equal numbers.
fn hashes(data: &TensorData, rows: usize) -> Vec<u64> {
    let bytes = data.as_bytes();
    let size = bytes.len() / rows.max(1);
    let hash = |row: usize| {
        let mut hasher = DefaultHasher::new();
        bytes[row * size..(row + 1) * size].hash(&mut hasher);
        hasher.finish()
    };
    (0..rows).map(hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tensors: &[Vec<u64>], marks: &[Vec<u64>]) -> Candidates {
        Candidates { count: 12, tensors: tensors.to_vec(), marks: marks.to_vec() }
    }

    #[test]
    fn items_differ_in_every_tensor_where_some_do() {
        let inputs: Vec<u64> = (0..12).collect();
        let classes = vec![1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3];
        let found = |rows: &[usize], in_a_row| Choice {
            rows: rows.to_vec(),
            in_a_row,
            differ: true,
            differ_in_marks: true,
        };
        let choice = of(&[inputs.clone(), classes], &[]).choose(3);
        assert_eq!(choice, found(&[3, 4, 5], true));
        // No three consecutive items differ in both.
        let lengths = vec![7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8];
        let masks = vec![1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2];
        let choice = of(&[lengths.clone(), masks.clone()], &[]).choose(3);
        assert_eq!(choice, found(&[0, 9, 1], false));
        let same = vec![4; 12];
        let choice = of(&[inputs.clone(), same.clone()], &[]).choose(3);
        assert!(choice.rows == [0, 1, 2] && choice.in_a_row && !choice.differ);
        // The last three items have padding.
        let choice = of(std::slice::from_ref(&inputs), &[masks]).choose(3);
        assert_eq!(choice, found(&[7, 8, 9], true));
        let choice = of(std::slice::from_ref(&inputs), &[same]).choose(3);
        assert!(choice.differ && !choice.differ_in_marks);
        assert!(!Candidates::unknown(12).choose(3).differ, "nothing is known of them");
        let two = Candidates { count: 2, tensors: vec![vec![1, 2]], marks: Vec::new() };
        assert_eq!(two.choose(3).rows, [0, 1]);
    }

    #[test]
    fn padding_and_masks_are_marks() {
        let of = |values: Vec<i32>| marks(&TensorData::new(values, [4, 2]), 4);
        assert_eq!(
            of(vec![3, 4, 5, 0, 0, 0, 7, 6]),
            [[0, 1, 2, 0]],
            "one row alone holds the largest"
        );
        assert_eq!(of(vec![1, 1, 1, 1, 1, 1, 1, 1]), [[0u64; 0]; 0]);
        assert_eq!(of(vec![0, 1, 0, 1, 1, 1, 1, 1]), [[1, 1, 0, 0], [1, 1, 2, 2]]);
    }

    #[test]
    fn rows_are_told_apart_by_their_values() {
        let data = TensorData::new(vec![1.0f32, 2.0, 1.0, 2.0, 1.0, 3.0], [3, 2]);
        let hashes = hashes(&data, 3);
        assert!(hashes[0] == hashes[1] && hashes[1] != hashes[2]);
    }
}
