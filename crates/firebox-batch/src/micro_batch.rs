//! The trait that lets firebox run a batch in pieces. The training loop counts, cuts and weighs
//! batches through it.

use std::ops::Range;

use crate::MicroBatchError;
use crate::part::items_of;

/// A batch that can be cut into micro-batches.
///
/// A batch is a list of *items*: images, sentences, rows. firebox asks for their number, takes them
/// range by range, and sums the gradients of the ranges, each scaled by its weight in the loss.
/// Most batches derive the trait:
///
/// ```
/// use firebox_batch::MicroBatch;
///
/// #[derive(Clone, Debug, PartialEq, MicroBatch)]
/// struct Sentences {
///     words: Vec<String>,
///     labels: Vec<u8>,
///     #[micro_batch(shared)]
///     language: String,
/// }
///
/// let batch = Sentences {
///     words: vec!["ash".into(), "ember".into(), "flame".into()],
///     labels: vec![0, 1, 1],
///     language: "en".into(),
/// };
/// assert_eq!(batch.items()?, 3);
/// assert_eq!(batch.weight(), 3.0);
/// let rest = batch.range(1..3);
/// assert_eq!(rest.words, ["ember", "flame"]);
/// assert_eq!(rest.labels, [1, 1]);
/// assert_eq!(rest.language, "en");
/// # Ok::<(), firebox_batch::MicroBatchError>(())
/// ```
///
/// # Types that implement it
///
/// | Type | Items | A range of them |
/// |---|---|---|
/// | `Tensor<B, D, K>`, any rank and kind | the length of dim 0 | a slice along dim 0 |
/// | `Vec<T>` | the number of elements | clones of these elements |
/// | `Option<T>` | those of the value; `None` counts none | the range of the value |
/// | tuples of two to six | those of every field, which must agree | the range of every field |
///
/// Numbers, strings, arrays, maps and `Arc` do not implement it. In a batch they hold what every
/// item uses; mark such fields `#[micro_batch(shared)]`.
///
/// # By hand
///
/// Where the derive does not apply, write [`items`](Self::items) and [`range`](Self::range).
/// [`Tally`](crate::Tally) counts the items of several fields and produces the error when they
/// disagree.
///
/// ```
/// use std::ops::Range;
/// use firebox_batch::{MicroBatch, MicroBatchError, Tally};
///
/// enum Samples {
///     Labelled { points: Vec<[f32; 2]>, labels: Vec<u8> },
///     Unlabelled(Vec<[f32; 2]>),
/// }
///
/// impl MicroBatch for Samples {
///     fn items(&self) -> Result<usize, MicroBatchError> {
///         match self {
///             Self::Labelled { points, labels } => Tally::new("Samples::Labelled")
///                 .field("points", points)?
///                 .field("labels", labels)?
///                 .items(),
///             Self::Unlabelled(points) => points.items(),
///         }
///     }
///
///     fn range(&self, range: Range<usize>) -> Self {
///         match self {
///             Self::Labelled { points, labels } => Self::Labelled {
///                 points: points.range(range.clone()),
///                 labels: labels.range(range),
///             },
///             Self::Unlabelled(points) => Self::Unlabelled(points.range(range)),
///         }
///     }
/// }
///
/// let samples = Samples::Labelled { points: vec![[0.0, 1.0], [1.0, 0.0]], labels: vec![7, 8] };
/// assert_eq!(samples.items(), Ok(2));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be cut into micro-batches",
    label = "`{Self}` does not have the trait `MicroBatch`",
    note = "if it holds one entry per item, give its type `#[derive(MicroBatch)]`",
    note = "if it is a field that every item uses, mark the field `#[micro_batch(shared)]`"
)]
pub trait MicroBatch: Sized {
    /// The number of items.
    ///
    /// # Errors
    /// - [`MicroBatchError::ItemsDisagree`] if parts of the batch hold different numbers of items.
    /// - [`MicroBatchError::DimOutOfRank`] if a tensor lacks the dimension that should hold its
    ///   items.
    /// - [`MicroBatchError::NoItems`] if nothing in the batch counts items, as in `None`. In a
    ///   field of a larger batch this is not an error, because the other fields count.
    fn items(&self) -> Result<usize, MicroBatchError>;

    /// The items in `range`, in order: a micro-batch.
    ///
    /// The result has the same shape as the batch, except for the number of items. The whole range
    /// returns a batch equal to this one. Tensors are then cloned, not sliced, so no operation is
    /// added.
    ///
    /// # Panics
    /// If `range` is not inside `0..self.items()`. Call [`items`](Self::items) first.
    #[must_use]
    fn range(&self, range: Range<usize>) -> Self;

    /// The weight of this batch in the loss, in any unit. Default: the number of items.
    ///
    /// firebox computes the gradient of a batch as the sum of its micro-batches' gradients, each
    /// times its share of the weight. This equals the whole batch's gradient if the weight is what
    /// the loss divides by:
    /// - the number of items, for a mean over items
    /// - the number of real tokens, where a language model's loss is a mean over these
    ///   ([`weight::real_tokens`](crate::weight::real_tokens))
    /// - the sum of the targets' class weights, for a weighted cross-entropy
    ///   ([`weight::of_classes`](crate::weight::of_classes)).
    ///
    /// burn's `CrossEntropyLoss` with `with_pad_tokens` divides by the number of all tokens,
    /// padding included, so the default is right for it.
    ///
    /// The weight must be finite and not negative, and the weights of the pieces must add up to the
    /// weight of the whole. It may read a tensor. A micro-batch of weight zero adds nothing to the
    /// gradient and has no loss for the metrics. A batch of weight zero is trained on like any
    /// other, unless its gradient is not a number.
    ///
    /// A derived batch and a tuple weigh what a batch in one of their fields weighs, if that is
    /// something else than its number of items.
    ///
    /// # Panics
    /// If two fields weigh something else than their number of items, and not the same: name a
    /// function for the whole batch, `#[micro_batch(weight = ..)]`.
    ///
    /// The default panics if [`items`](Self::items) returns an error. Call it first.
    fn weight(&self) -> f64 {
        items_of(self) as f64
    }
}
