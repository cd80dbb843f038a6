//! Batch weights for losses that are not a mean over items.
//!
//! Use these functions in `#[micro_batch(weight = path)]`. They read the tensor and count on the
//! host, so the weights of the micro-batches add up exactly to the weight of the batch.

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor};

/// The number of tokens that are not padding: the weight of a batch whose loss is a mean over real
/// tokens.
///
/// `tokens` may have any shape. `padding` lists the padding tokens.
///
/// Not for burn's `CrossEntropyLoss` with `with_pad_tokens`, which sums over real tokens but
/// divides by the number of all tokens. If all items of the batch have the same padded length, use
/// the number of items as its weight, which is the default.
///
/// ```
/// use burn_ndarray::NdArray;
/// use burn_tensor::{Int, Tensor, backend::Backend};
/// use firebox_batch::{MicroBatch, weight};
///
/// /// `next` is `[sentences, length]`; positions after the end of a sentence are 0.
/// #[derive(MicroBatch)]
/// #[micro_batch(weight = Sentences::real_tokens)]
/// struct Sentences<B: Backend> {
///     next: Tensor<B, 2, Int>,
/// }
///
/// impl<B: Backend> Sentences<B> {
///     fn real_tokens(&self) -> f64 {
///         weight::real_tokens(&self.next, &[0])
///     }
/// }
///
/// let next = Tensor::<NdArray, 2, Int>::from_ints([[5, 3, 8], [2, 0, 0]], &Default::default());
/// let batch = Sentences { next };
/// assert_eq!(batch.weight(), 4.0);
/// assert_eq!(batch.range(1..2).weight(), 1.0);
/// ```
pub fn real_tokens<B: Backend, const D: usize>(tokens: &Tensor<B, D, Int>, padding: &[i64]) -> f64 {
    let tokens = tokens.to_data();
    tokens.iter::<i64>().filter(|token| !padding.contains(token)).count() as f64
}

/// The sum of the targets' class weights: the weight of a batch whose loss is a class-weighted
/// mean, such as burn's `CrossEntropyLoss` with `with_weights`.
///
/// `targets` is `[items]`. `weights` has one entry for each class.
///
/// # Panics
/// If a target is not a class with a weight.
///
/// ```
/// use burn_ndarray::NdArray;
/// use burn_tensor::{Int, Tensor};
/// use firebox_batch::weight;
///
/// let targets = Tensor::<NdArray, 1, Int>::from_ints([0, 2, 2], &Default::default());
/// assert_eq!(weight::of_classes(&targets, &[0.5, 1.0, 4.0]), 8.5);
/// ```
pub fn of_classes<B: Backend>(targets: &Tensor<B, 1, Int>, weights: &[f32]) -> f64 {
    let weight = |class: i64| {
        let weight = usize::try_from(class).ok().and_then(|class| weights.get(class));
        let classes = weights.len();
        *weight.unwrap_or_else(|| panic!("class {class} has no weight: there are {classes}"))
    };
    targets.to_data().iter::<i64>().map(|class| f64::from(weight(class))).sum()
}
