//! The way from a batch to its micro-batches: the [`MicroBatch`] trait, its impls and its derive.
//!
//! A loader gives a batch, the plan says how large its micro-batches are, and this crate cuts them out. It knows
//! tensors and containers, and neither the plan nor the training loop.
//!
//! ```
//! use burn_tensor::{Int, Tensor, backend::Backend};
//! use firebox_batch::MicroBatch;
//!
//! #[derive(Clone, Debug, MicroBatch)]
//! struct MnistBatch<B: Backend> {
//!     images: Tensor<B, 3>,
//!     targets: Tensor<B, 1, Int>,
//! }
//!
//! /// The pieces of a batch, `size` items each; the last one may be smaller.
//! fn pieces<B: Backend>(batch: &MnistBatch<B>, size: usize) -> Vec<MnistBatch<B>> {
//!     let items = batch.items().expect("images and targets have the same length");
//!     (0..items)
//!         .step_by(size)
//!         .map(|start| batch.range(start..items.min(start + size)))
//!         .collect()
//! }
//! ```

mod container;
mod elements;
mod error;
mod micro_batch;
mod part;
mod tally;
mod tensor;

pub use elements::Elements;
pub use error::MicroBatchError;
pub use firebox_derive::MicroBatch;
pub use micro_batch::MicroBatch;
pub use tally::Tally;
pub use tensor::SliceDim;

/// What the derive writes besides [`MicroBatch`]: no public interface.
///
/// A crate that re-exports [`MicroBatch`] re-exports this module beside it.
#[doc(hidden)]
pub mod __derive {
    pub use crate::part::{along, each, each_along, field};
    pub use crate::{Elements, MicroBatchError, SliceDim, Tally};
}
