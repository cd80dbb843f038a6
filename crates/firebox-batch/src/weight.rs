//! Weights of batches for losses that are no mean over items.
//!
//! Both functions read the tensor and count on the host, so that the weights of micro-batches add up to that of their batch
//! exactly.

use burn_tensor::backend::Backend;
use burn_tensor::{Int, Tensor};

/// The number of tokens that are not padding: the weight of a batch whose loss is a mean over real tokens.
///
/// `tokens` has any shape; `padding` names the tokens that stand for nothing.
///
/// burn's `CrossEntropyLoss` with `with_pad_tokens` is no such loss: it sums over real tokens and divides by the number of all.
/// Where all items of a batch have the same padded length, the number of items is its weight, which is the default.
///
/// ```
/// use burn_ndarray::NdArray;
/// use burn_tensor::{Int, Tensor, backend::Backend};
/// use firebox_batch::{MicroBatch, weight};
///
/// /// `next` is `[sentences, length]`, and what is behind the end of a sentence is 0.
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

/// The sum of the weights of the targets' classes: the weight of a batch whose loss is a mean by class weights, such as burn's
/// `CrossEntropyLoss` with `with_weights`.
///
/// `targets` is `[items]`, and `weights` has one for each class.
///
/// # Panics
/// If a target is no class that has a weight.
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
