//! What parts of a batch are given of it.

use std::ops::Range;

use burn_backend::TensorData;
use firebox_trace::TensorIndex;

/// A tensor that depends on the batch alone, of which parts need the whole batch's value: all of
/// it, or the rows of their items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Given {
    /// The tensor in the recording of the batch.
    pub whole: TensorIndex,
    /// The same in the recording of the part.
    pub part: TensorIndex,
    /// The dimension that has the items, and how many slices in a row each has. `None`: all of it.
    pub rows: Option<(usize, usize)>,
    /// The power of the part's share of the items that it is multiplied by: what scales a sum is
    /// scaled, so that the sum adds up like a mean.
    pub share: i32,
}

impl Given {
    /// What a part of these items of all `items` is given of the whole batch's numbers. `None` if
    /// they are integers and would have to be scaled.
    ///
    /// # Panics
    ///
    /// If `whole` has not the dimension of the items.
    pub fn to_part(
        &self,
        whole: &TensorData,
        range: &Range<usize>,
        items: usize,
    ) -> Option<TensorData> {
        let mut data = if let Some((dim, each)) = self.rows {
            let row = whole.shape[dim + 1..].iter().product::<usize>() * whole.dtype.size();
            let of_all = whole.shape[dim] * row;
            let own = range.start * each * row..range.end * each * row;
            let rounds = whole.bytes.chunks(of_all.max(1));
            let bytes: Vec<u8> = rounds.flat_map(|round| &round[own.clone()]).copied().collect();
            let mut shape = whole.shape.clone();
            shape[dim] = range.len() * each;
            TensorData::from_bytes_vec(bytes, shape, whole.dtype)
        } else {
            whole.clone()
        };
        if self.share != 0 {
            let scale = (range.len() as f64 / items as f64).powi(self.share);
            let numbers: Vec<f64> = data.iter::<f64>().map(|number| number * scale).collect();
            let scaled = TensorData::new(numbers, data.shape.clone());
            data = data.dtype.is_float().then(|| scaled.convert_dtype(data.dtype))?;
        }
        Some(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_given_rows_and_scaled_numbers() {
        let given = |rows, share| {
            let whole = TensorData::new((0..12).map(|at| at as f32).collect(), [2, 6]);
            let tensor = TensorIndex(0);
            let given = Given { whole: tensor, part: tensor, rows, share };
            given.to_part(&whole, &(1..2), 3)
        };
        let rows = given(Some((1, 2)), 0).expect("it can");
        assert_eq!(rows, TensorData::new(vec![2.0f32, 3.0, 8.0, 9.0], [2, 2]));
        let scaled = given(Some((1, 2)), -1).expect("it can");
        assert_eq!(scaled, TensorData::new(vec![6.0f32, 9.0, 24.0, 27.0], [2, 2]));
        assert_eq!(given(None, 0).expect("it can").shape.to_vec(), [2, 6]);
        let count = Given { whole: TensorIndex(0), part: TensorIndex(0), rows: None, share: 1 };
        assert_eq!(count.to_part(&TensorData::new(vec![4i64], [1]), &(0..1), 2), None);
    }
}
