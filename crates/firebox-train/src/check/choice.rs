//! The items that are compared: such that differ in every tensor of the batch.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::TensorData;

/// Of how many items the first ones are looked at.
pub(super) const CANDIDATES: usize = 48;

/// Items to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// Their rows.
    pub(super) rows: Vec<usize>,
    /// Whether they stand one behind the other, so that a splitter can cut them off as they are.
    pub(super) in_a_row: bool,
    /// Whether they differ in every tensor. Where they do not, a wrong weight is not seen.
    pub(super) differ: bool,
}

/// Chooses `count` of the candidates, whose rows in each tensor of the batch are given: the first that stand in a row and differ in every
/// tensor; or else such that as many tensors as possible have different rows for them; or else the first.
pub(super) fn choose(tensors: &[Vec<u64>], candidates: usize, count: usize) -> Choice {
    let distinct = |rows: &[usize], tensor: &Vec<u64>| {
        let mut values: Vec<u64> = rows.iter().map(|row| tensor[*row]).collect();
        values.sort_unstable();
        values.dedup();
        values.len()
    };
    let all_differ = |rows: &[usize]| {
        !tensors.is_empty() && tensors.iter().all(|tensor| distinct(rows, tensor) > 1)
    };
    let in_a_row =
        |start: usize| -> Vec<usize> { (start..start + count.min(candidates)).collect() };
    let starts = 0..=candidates.saturating_sub(count);
    if let Some(rows) = starts.map(in_a_row).find(|rows| all_differ(rows)) {
        return Choice { rows, in_a_row: true, differ: true };
    }
    // One item after the other: the next is the first that brings the most new values.
    let mut rows: Vec<usize> = vec![0];
    while rows.len() < count.min(candidates) {
        let gain = |row: usize| {
            let with: Vec<usize> = rows.iter().copied().chain([row]).collect();
            let new = tensors.iter().map(|tensor| distinct(&with, tensor)).sum::<usize>();
            // What all others share so far counts most.
            let alike = tensors.iter().filter(|tensor| distinct(&with, tensor) == 1).count();
            (usize::MAX - alike, new, usize::MAX - row)
        };
        let next = (0..candidates).filter(|row| !rows.contains(row)).max_by_key(|row| gain(*row));
        rows.extend(next);
    }
    if all_differ(&rows) {
        return Choice { rows, in_a_row: false, differ: true };
    }
    Choice { rows: in_a_row(0), in_a_row: true, differ: false }
}

/// A number for each row of a tensor: equal rows have equal numbers.
pub(super) fn hashes(data: &TensorData, rows: usize) -> Vec<u64> {
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

    #[test]
    fn items_differ_in_every_tensor_where_some_do() {
        let inputs: Vec<u64> = (0..12).collect();
        let classes = vec![1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3];
        let choice = choose(&[inputs.clone(), classes], 12, 3);
        assert_eq!(choice, Choice { rows: vec![3, 4, 5], in_a_row: true, differ: true });
        // No three in a row differ in both.
        let lengths = vec![7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8];
        let masks = vec![1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2];
        let choice = choose(&[lengths, masks], 12, 3);
        assert_eq!(choice, Choice { rows: vec![0, 9, 1], in_a_row: false, differ: true });
        let same = vec![4; 12];
        let choice = choose(&[inputs.clone(), same], 12, 3);
        assert_eq!(choice, Choice { rows: vec![0, 1, 2], in_a_row: true, differ: false });
        assert!(!choose(&[], 12, 3).differ, "nothing is known of them");
        assert_eq!(choose(&[inputs], 2, 3).rows, [0, 1]);
    }

    #[test]
    fn rows_are_told_apart_by_their_values() {
        let data = TensorData::new(vec![1.0f32, 2.0, 1.0, 2.0, 1.0, 3.0], [3, 2]);
        let hashes = hashes(&data, 3);
        assert!(hashes[0] == hashes[1] && hashes[1] != hashes[2]);
    }
}
