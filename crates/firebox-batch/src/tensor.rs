//! Cuts tensors along the dimension that holds their items: dim 0, or the one the batch names.

use std::ops::Range;

#[cfg(feature = "burn-0-21")]
use burn_tensor::backend::Backend;
#[cfg(feature = "burn-0-21")]
use burn_tensor::{BasicOps, Tensor};

use crate::{MicroBatch, MicroBatchError};

/// A value whose items lie along a dimension named by the batch. `#[micro_batch(dim = ...)]`
/// requires it.
///
/// Implemented for tensors of every kind and rank, and for an `Option` of them.
///
/// ```
/// use burn_tensor::{Tensor, backend::Backend};
/// use firebox_batch::SliceDim;
///
/// /// The second half of the sequences of a `[time, sequences, features]` tensor.
/// fn second_half<B: Backend>(sequences: &Tensor<B, 3>) -> Tensor<B, 3> {
///     let items = sequences.dim_items(1).expect("the rank is 3");
///     sequences.dim_range(1, items / 2..items)
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no dimensions to cut along",
    label = "`{Self}` is not a tensor",
    note = "`#[micro_batch(dim = ...)]` is for fields that are a `Tensor` or an `Option<Tensor>`; for a list \
            of tensors write `#[micro_batch(each, dim = ...)]`",
    note = "without it the field is cut as its type says, and with `#[micro_batch(shared)]` not at all"
)]
pub trait SliceDim: Sized {
    /// The number of items along `dim`, counted from 0.
    ///
    /// # Errors
    /// [`MicroBatchError::DimOutOfRank`] if the dimension does not exist,
    /// [`MicroBatchError::NoItems`] for `None`.
    fn dim_items(&self, dim: usize) -> Result<usize, MicroBatchError>;

    /// The items in `range` along `dim`, counted from 0. The whole range returns a clone and adds
    /// no operation.
    ///
    /// # Panics
    /// If the dimension does not exist, or `range` is not inside `0..self.dim_items(dim)`.
    #[must_use]
    fn dim_range(&self, dim: usize, range: Range<usize>) -> Self;
}

#[cfg(feature = "burn-0-21")]
impl<B, const D: usize, K> SliceDim for Tensor<B, D, K>
where
    B: Backend,
    K: BasicOps<B>,
{
    fn dim_items(&self, dim: usize) -> Result<usize, MicroBatchError> {
        items_along(&self.dims(), dim)
    }

    fn dim_range(&self, dim: usize, range: Range<usize>) -> Self {
        match is_whole(&self.dims(), dim, &range) {
            true => self.clone(),
            false => self.clone().slice_dim(dim, range),
        }
    }
}

/// One item per entry of dim 0.
#[cfg(feature = "burn-0-21")]
impl<B, const D: usize, K> MicroBatch for Tensor<B, D, K>
where
    B: Backend,
    K: BasicOps<B>,
{
    fn items(&self) -> Result<usize, MicroBatchError> {
        self.dim_items(0)
    }

    fn range(&self, range: Range<usize>) -> Self {
        self.dim_range(0, range)
    }
}

#[cfg(feature = "burn-0-22")]
impl<const D: usize, K> SliceDim for burn_tensor_0_22::Tensor<D, K>
where
    K: burn_tensor_0_22::kind::Basic,
{
    fn dim_items(&self, dim: usize) -> Result<usize, MicroBatchError> {
        items_along(&self.dims(), dim)
    }

    fn dim_range(&self, dim: usize, range: Range<usize>) -> Self {
        match is_whole(&self.dims(), dim, &range) {
            true => self.clone(),
            false => self.clone().slice_dim(dim, range),
        }
    }
}

/// One item per entry of dim 0.
#[cfg(feature = "burn-0-22")]
impl<const D: usize, K> MicroBatch for burn_tensor_0_22::Tensor<D, K>
where
    K: burn_tensor_0_22::kind::Basic,
{
    fn items(&self) -> Result<usize, MicroBatchError> {
        self.dim_items(0)
    }

    fn range(&self, range: Range<usize>) -> Self {
        self.dim_range(0, range)
    }
}

#[cfg(any(feature = "burn-0-21", feature = "burn-0-22"))]
fn items_along(shape: &[usize], dim: usize) -> Result<usize, MicroBatchError> {
    crate::shapes::note(shape, dim);
    shape.get(dim).copied().ok_or(MicroBatchError::DimOutOfRank {
        owner: "Tensor",
        field: String::new(),
        dim,
        rank: shape.len(),
    })
}

/// Whether `range` is all of `dim`.
///
/// # Panics
/// If it is not inside of it.
#[cfg(any(feature = "burn-0-21", feature = "burn-0-22"))]
#[track_caller]
fn is_whole(shape: &[usize], dim: usize, range: &Range<usize>) -> bool {
    let rank = shape.len();
    assert!(dim < rank, "dim {dim} is outside a tensor of shape {shape:?}: count from 0");
    assert!(
        range.start <= range.end && range.end <= shape[dim],
        "items {range:?} are outside dim {dim} of a tensor of shape {shape:?}: take a range of `items()`"
    );
    *range == (0..shape[dim])
}

impl<T: SliceDim> SliceDim for Option<T> {
    fn dim_items(&self, dim: usize) -> Result<usize, MicroBatchError> {
        match self {
            Some(value) => value.dim_items(dim),
            None => Err(MicroBatchError::NoItems { owner: "Option" }),
        }
    }

    fn dim_range(&self, dim: usize, range: Range<usize>) -> Self {
        self.as_ref().map(|value| value.dim_range(dim, range))
    }
}
