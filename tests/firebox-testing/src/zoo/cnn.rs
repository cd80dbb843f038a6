//! A convolutional network with batch normalization and dropout.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Images, classes, classified, numbers};

/// Pixels along an edge.
const EDGE: usize = 32;

#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Cnn<B> {
    const NAME: &'static str = "cnn";
    const ITEMS: usize = 300;
    type Batch = Images<B>;

    fn new(device: &B::Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            conv1: conv([1, 16]),
            norm1: BatchNormConfig::new(16).init(device),
            conv2: conv([16, 16]),
            norm2: BatchNormConfig::new(16).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            hidden: LinearConfig::new(16 * (EDGE / 4).pow(2), 64).init(device),
            output: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Images<B> {
        Images { pixels: numbers(items, &[1, EDGE, EDGE], device), targets: classes(items, device) }
    }
}

impl<B: Backend> Cnn<B> {
    fn output(&self, batch: Images<B>) -> ClassificationOutput<B> {
        let x = relu(self.norm1.forward(self.conv1.forward(batch.pixels)));
        let x = self.pool.forward(x);
        let x = relu(self.norm2.forward(self.conv2.forward(x)));
        let x = self.pool.forward(x).flatten::<2>(1, 3);
        let x = relu(self.hidden.forward(self.dropout.forward(x)));
        classified(self.output.forward(x), batch.targets)
    }
}

steps!(Cnn: Images -> ClassificationOutput);
