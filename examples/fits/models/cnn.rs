//! A small CNN: two convolutions with batch normalization, pooling, and two linear layers.

use std::marker::PhantomData;

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;

use super::cross_entropy;
use crate::search::Subject;

/// Batches of grey images, all of one size.
pub struct Cnn<B> {
    pixels: usize,
    backend: PhantomData<fn() -> B>,
}

impl<B> Cnn<B> {
    /// Creates the model for images of `pixels` × `pixels` pixels.
    pub fn new(pixels: usize) -> Self {
        Self { pixels, backend: PhantomData }
    }
}

#[derive(Module, Debug)]
pub struct Layers<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: AutodiffBackend> Subject<B> for Cnn<B> {
    type Model = Layers<B>;
    type Batch = (Tensor<B, 4>, Tensor<B, 1, Int>);

    fn title(&self) -> String {
        format!("a small CNN on grey images of {0} x {0} pixels", self.pixels)
    }

    fn typical(&self) -> usize {
        256
    }

    fn model(&self, device: &B::Device) -> Layers<B> {
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).init(device);
        let side = (self.pixels - 4) / 2;
        Layers {
            conv1: conv([1, 32]),
            norm1: BatchNormConfig::new(32).init(device),
            conv2: conv([32, 64]),
            norm2: BatchNormConfig::new(64).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            hidden: LinearConfig::new(64 * side * side, 128).init(device),
            output: LinearConfig::new(128, 10).init(device),
            relu: Relu::new(),
        }
    }

    fn batch(&self, items: usize, device: &B::Device) -> Self::Batch {
        let images = Tensor::zeros([items, 1, self.pixels, self.pixels], device);
        (images, Tensor::zeros([items], device))
    }

    fn loss(&self, model: &Layers<B>, (images, targets): &Self::Batch) -> Tensor<B, 1> {
        let x = model.relu.forward(model.norm1.forward(model.conv1.forward(images.clone())));
        let x = model.relu.forward(model.norm2.forward(model.conv2.forward(x)));
        let x = model.dropout.forward(model.pool.forward(x).flatten(1, 3));
        let logits = model.output.forward(model.relu.forward(model.hidden.forward(x)));
        cross_entropy(logits, targets.clone())
    }
}
