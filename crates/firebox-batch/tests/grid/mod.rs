//! A matrix without a backend. It keeps the tests that cut along a dimension fast.

use std::ops::Range;

use firebox_batch::{MicroBatch, MicroBatchError, SliceDim};

/// A matrix of rank 2: rows of equal length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grid(pub Vec<Vec<u32>>);

impl SliceDim for Grid {
    fn dim_items(&self, dim: usize) -> Result<usize, MicroBatchError> {
        match dim {
            0 => Ok(self.0.len()),
            1 => Ok(self.0.first().map_or(0, Vec::len)),
            _ => Err(MicroBatchError::DimOutOfRank {
                owner: "Grid",
                field: String::new(),
                dim,
                rank: 2,
            }),
        }
    }

    fn dim_range(&self, dim: usize, range: Range<usize>) -> Self {
        match dim {
            0 => Self(self.0[range].to_vec()),
            _ => Self(self.0.iter().map(|row| row[range.clone()].to_vec()).collect()),
        }
    }
}

impl MicroBatch for Grid {
    fn items(&self) -> Result<usize, MicroBatchError> {
        self.dim_items(0)
    }

    fn range(&self, range: Range<usize>) -> Self {
        self.dim_range(0, range)
    }
}
