//! How a batch is cut: through its own [`MicroBatch`], or by functions for a batch type of another
//! crate. The training loop cuts every micro-batch through a [`Splitter`].

use std::ops::Range;

use firebox_batch::{MicroBatch, MicroBatchError};

/// Cuts batches of type `I` into micro-batches.
#[diagnostic::on_unimplemented(
    message = "the builder does not know how batches of type `{I}` are cut",
    label = "`{Self}` is no splitter of `{I}`",
    note = "call `.auto_batch()` before `.build(..)`; it wants `#[derive(MicroBatch)]` on the batch",
    note = "or `.auto_batch_with(..)`, with functions that cut a batch of another crate's type"
)]
pub trait Splitter<I>: Send + Sync + 'static {
    /// The number of items in a batch.
    ///
    /// # Errors
    ///
    /// If the parts of the batch disagree about it.
    fn items(&self, batch: &I) -> Result<usize, MicroBatchError>;

    /// The items in `range`, in order.
    fn range(&self, batch: &I, range: Range<usize>) -> I;

    /// The weight of a batch in the loss. See [`MicroBatch::weight`].
    fn weight(&self, batch: &I) -> f64;
}

/// Cuts batches through their own [`MicroBatch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ByMicroBatch;

impl<I: MicroBatch> Splitter<I> for ByMicroBatch {
    fn items(&self, batch: &I) -> Result<usize, MicroBatchError> {
        batch.items()
    }

    fn range(&self, batch: &I, range: Range<usize>) -> I {
        batch.range(range)
    }

    fn weight(&self, batch: &I) -> f64 {
        batch.weight()
    }
}

/// Cuts batches with two functions: one returns the number of items, the other the items of a
/// range. The weight is the number of items.
///
/// ```
/// use firebox_train::{ByFunctions, Splitter};
///
/// struct Foreign(Vec<f32>);
/// let splitter = ByFunctions::new(
///     |b: &Foreign| b.0.len(),
///     |b: &Foreign, r| Foreign(b.0[r].to_vec())
/// );
/// assert_eq!(splitter.range(&Foreign(vec![1.0, 2.0, 3.0]), 1..3).0, [2.0, 3.0]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ByFunctions<F, G> {
    items: F,
    range: G,
}

impl<F, G> ByFunctions<F, G> {
    /// Makes a splitter from two functions.
    pub fn new<I>(items: F, range: G) -> Self
    where
        F: Fn(&I) -> usize,
        G: Fn(&I, Range<usize>) -> I,
    {
        Self { items, range }
    }
}

impl<I, F, G> Splitter<I> for ByFunctions<F, G>
where
    F: Fn(&I) -> usize + Send + Sync + 'static,
    G: Fn(&I, Range<usize>) -> I + Send + Sync + 'static,
{
    fn items(&self, batch: &I) -> Result<usize, MicroBatchError> {
        Ok((self.items)(batch))
    }

    fn range(&self, batch: &I, range: Range<usize>) -> I {
        (self.range)(batch, range)
    }

    fn weight(&self, batch: &I) -> f64 {
        (self.items)(batch) as f64
    }
}
