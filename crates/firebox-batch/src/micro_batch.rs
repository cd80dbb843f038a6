//! The trait that a batch has so that firebox can run it in pieces.

use std::ops::Range;

use crate::MicroBatchError;

/// A batch that can be cut into micro-batches.
///
/// A batch is a list of *items*: images, sentences, rows. firebox asks how many there are, takes them range by
/// range, and adds up the gradients of the ranges by their weight in the loss. Most batches derive the trait:
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
/// # What has it
///
/// | Type | Items | A range of them |
/// |---|---|---|
/// | `Tensor<B, D, K>`, any rank and kind | the length of dim 0 | a slice along dim 0 |
/// | `Vec<T>` | the number of elements | clones of these elements |
/// | `Option<T>` | those of the value; `None` counts none | the range of the value |
/// | tuples of two to six | those of every field, which must agree | the range of every field |
///
/// Numbers, texts, arrays, maps and `Arc` do not have it: in a batch they are what every item uses, which the
/// derive calls `#[micro_batch(shared)]`.
///
/// # By hand
///
/// Where the derive does not reach, write [`items`](Self::items) and [`range`](Self::range); [`Tally`](crate::Tally)
/// counts the items of several fields and words the error when they disagree.
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
    /// [`MicroBatchError::ItemsDisagree`] if the parts of the batch hold different numbers of items,
    /// [`MicroBatchError::DimOutOfRank`] if a tensor does not have the dimension that holds its items, and
    /// [`MicroBatchError::NoItems`] if nothing in the batch counts items, as in `None`. Inside a larger batch the
    /// last one is no error: the other fields count.
    fn items(&self) -> Result<usize, MicroBatchError>;

    /// The items in `range`, in order: a micro-batch.
    ///
    /// It is a batch of the same shape but for the number of items. The whole range gives a batch equal to this
    /// one; tensors are then cloned, not sliced, so that no operation is added.
    ///
    /// # Panics
    /// If `range` is not inside `0..self.items()`. Ask [`items`](Self::items) first.
    #[must_use]
    fn range(&self, range: Range<usize>) -> Self;

    /// What this batch weighs in the loss, in any unit; by default its number of items.
    ///
    /// The gradient of a batch is the sum of its micro-batches' gradients, each times its share of the weight.
    /// That is the whole batch's gradient if the loss is a mean over what the weight counts, which is what the loss divides
    /// by: items by default, real tokens where a language model's loss is a mean over these
    /// ([`weight::real_tokens`](crate::weight::real_tokens)), the sum of the targets' class weights for a weighted
    /// cross-entropy ([`weight::of_classes`](crate::weight::of_classes)). burn's `CrossEntropyLoss` with `with_pad_tokens`
    /// divides by the number of all tokens, padding included, so that the default is right for it.
    ///
    /// The weight must be finite and not negative, and the weights of the pieces must add up to that of the whole. It may
    /// read a tensor. A micro-batch that weighs nothing has no loss that metrics would see, and a batch that weighs nothing is
    /// left out of training.
    ///
    /// Only the weight of the outermost batch is asked for: one that has a batch with a weight of its own as a
    /// field names a function for the whole.
    ///
    /// # Panics
    /// By default, if [`items`](Self::items) is an error. Ask it first.
    fn weight(&self) -> f64 {
        match self.items() {
            Ok(items) => items as f64,
            Err(error) => panic!("a batch without a number of items has no weight: {error}"),
        }
    }
}
