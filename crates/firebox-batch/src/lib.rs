//! Cuts batches into micro-batches: the [`MicroBatch`] trait, its impls and its derive.
//!
//! The loader yields a batch, the plan gives the sizes of its micro-batches, and this crate cuts
//! them out. It knows tensors and containers, but neither the plan nor the training loop.
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
//! /// Cuts a batch into pieces of `size` items. The last piece may be smaller.
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
mod shapes;
mod tally;
mod tensor;

pub use elements::Elements;
pub use error::MicroBatchError;
/// Implements `MicroBatch` for a struct with named or tuple fields. Every field is cut into the
/// same ranges.
///
/// ```
/// use burn_tensor::{Bool, Int, Tensor, backend::Backend};
/// use firebox_batch::MicroBatch;
///
/// #[derive(Clone, Debug, MicroBatch)]
/// struct TextBatch<B: Backend> {
///     ids: Tensor<B, 2, Int>,                   // [items, tokens]: cut along dim 0
///     padding: Option<Tensor<B, 2, Bool>>,      // cut if present
///     texts: Vec<String>,                       // one per item
///     #[micro_batch(dim = 1)]
///     states: Tensor<B, 3>,                     // [layers, items, features]: cut along dim 1
///     #[micro_batch(shared)]
///     class_weights: Tensor<B, 1>,              // [classes]: every item uses all of it
/// }
/// ```
///
/// # Fields
///
/// An attribute says how its field is cut:
/// - No attribute: the field is cut as its type says. Tensors are cut along dim 0, `Vec<T>` by
///   elements; `Option`, tuples and nested batches by their contents. The type must be
///   `MicroBatch`.
/// - `#[micro_batch(dim = 1)]`: the field is cut along dim 1, counted from 0. The type must be a
///   tensor or an `Option` of one.
/// - `#[micro_batch(each)]`: the field is a list, and every element is cut. The type must be
///   `Vec<T>`, `[T; N]` or an `Option` of these, with `T: MicroBatch`.
/// - `#[micro_batch(each, dim = 1)]`: the field is a list, and every element is cut along dim 1.
///   The type must be a list as above, with `T` a tensor.
/// - `#[micro_batch(shared)]`: the whole field is cloned into every micro-batch and counts no
///   items. The type must be `Clone`.
///
/// All fields that count items must agree on their number. Otherwise `items` returns an error that
/// names two fields that disagree. A `Vec` of tensors is one tensor per item unless it is marked
/// `each`.
///
/// ```
/// use firebox_batch::MicroBatch;
///
/// #[derive(MicroBatch)]
/// struct Inputs {
///     ids: Vec<u32>,
///     #[micro_batch(each)]
///     views: [Vec<f32>; 2],
/// }
///
/// #[derive(MicroBatch)]
/// struct Batch {
///     inputs: Inputs,
///     targets: Vec<u8>,
/// }
///
/// let views = [vec![0.1, 0.2], vec![0.3]];
/// let batch = Batch { inputs: Inputs { ids: vec![5, 6], views }, targets: vec![0, 1] };
/// assert_eq!(
///     batch.items().unwrap_err().to_string().split(';').next(),
///     Some("items disagree in `Batch`: `inputs.ids` has 2 and `inputs.views[1]` has 1"),
/// );
/// ```
///
/// # Weight
///
/// The weight of a batch is its number of items by default. `#[micro_batch(weight = path)]` on the
/// struct names a function from `&Self` to `f64` instead, for a loss that is a mean over something
/// else, such as tokens that are not padding or class weights. The module [`weight`] has functions
/// for both. firebox's Learner needs it only where the recorded step does not show what the loss is
/// divided by: it reads values, or several ranks share it.
///
/// ```
/// use firebox_batch::MicroBatch;
///
/// #[derive(MicroBatch)]
/// #[micro_batch(weight = Sentences::tokens)]
/// struct Sentences {
///     ids: Vec<Vec<u32>>,
/// }
///
/// impl Sentences {
///     fn tokens(&self) -> f64 {
///         self.ids.iter().map(Vec::len).sum::<usize>() as f64
///     }
/// }
///
/// let batch = Sentences { ids: vec![vec![4, 8], vec![15, 16, 23, 42]] };
/// assert_eq!(batch.items(), Ok(2));
/// assert_eq!(batch.weight(), 6.0);
/// assert_eq!(batch.range(0..1).weight(), 2.0);
/// ```
///
/// # Generics
///
/// The impl has the generics and bounds of the struct. It adds the bound listed under *Fields* for
/// each field whose type the struct leaves open: the type is a type parameter, or contains one
/// without any bound. If a type parameter has a bound in the struct, declare every bound its fields
/// need: `T: Clone` for a `Vec<T>`, `K: BasicOps<B>` for a `Tensor<B, 2, K>`. `B: Backend` is
/// enough for the usual batch.
///
/// ```
/// use burn_tensor::{BasicOps, Tensor, backend::Backend};
/// use firebox_batch::MicroBatch;
///
/// #[derive(MicroBatch)]
/// struct Labelled<B: Backend, K: BasicOps<B>, Labels> {
///     values: Tensor<B, 2, K>,
///     labels: Labels,                           // adds the bound `Labels: MicroBatch`
/// }
/// ```
///
/// # What is refused
///
/// Enums and unions, structs without fields, structs in which every field is shared, and attributes
/// that are unknown, repeated or contradictory. All wrong attributes are reported in one compiler
/// run, each at its place.
///
/// The macro looks for the trait in the crate `firebox` and then in `firebox-batch`, under whatever
/// name `Cargo.toml` gives the crate. If neither is a dependency, the error says so.
#[doc(inline)]
pub use firebox_derive::MicroBatch;
pub use micro_batch::MicroBatch;
pub use shapes::item_shapes;
pub use tally::Tally;
pub use tensor::SliceDim;

#[cfg(feature = "burn-0-21")]
pub mod weight;

/// What the derive's generated code uses in addition to [`MicroBatch`]. Not a public interface.
///
/// A crate that re-exports [`MicroBatch`] must re-export this module too.
#[doc(hidden)]
pub mod __derive {
    pub use crate::part::{along, each, each_along, field, of_fields};
    pub use crate::{Elements, MicroBatchError, SliceDim, Tally};
}
