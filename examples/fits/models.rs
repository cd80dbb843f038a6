//! The models that the example can search for.

mod cnn;
mod gpt;
mod resnet;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::prelude::*;

pub use cnn::Cnn;
pub use gpt::Gpt;
pub use resnet::ResNet;

/// Mean cross-entropy of `logits`, `[items, classes]`.
fn cross_entropy<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets)
}
