//! A siamese network. One encoder sees both images of a pair, so its parameters have two gradients.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::RegressionOutput;

use super::Zoo;
use super::batches::{Pairs, fitted, numbers};

/// Pixels along an edge.
const EDGE: usize = 28;

#[derive(Module, Debug)]
pub struct Siamese<B: Backend> {
    conv1: Conv2d<B>,
    conv2: Conv2d<B>,
    pool: MaxPool2d,
    embed: Linear<B>,
}

impl<B: Backend> Zoo<B> for Siamese<B> {
    const NAME: &'static str = "siamese";
    const ITEMS: usize = 600;
    type Batch = Pairs<B>;

    fn new(device: &B::Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            conv1: conv([1, 8]),
            conv2: conv([8, 8]),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            embed: LinearConfig::new(8 * (EDGE / 4).pow(2), 32).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Pairs<B> {
        let others: Vec<usize> = items.iter().map(|item| item + item % 2).collect();
        let same: Vec<f32> = items.iter().map(|item| (item % 2) as f32).collect();
        Pairs {
            left: numbers(items, &[1, EDGE, EDGE], device),
            right: numbers(&others, &[1, EDGE, EDGE], device),
            same: Tensor::from_data(TensorData::new(same, [items.len(), 1]), device),
        }
    }
}

impl<B: Backend> Siamese<B> {
    fn encode(&self, pixels: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.pool.forward(relu(self.conv1.forward(pixels)));
        let x = self.pool.forward(relu(self.conv2.forward(x)));
        self.embed.forward(x.flatten(1, 3))
    }

    fn output(&self, batch: Pairs<B>) -> RegressionOutput<B> {
        let difference = self.encode(batch.left) - self.encode(batch.right);
        let likeness = difference.square().sum_dim(1).neg().exp();
        fitted(likeness, batch.same)
    }
}

steps!(Siamese: Pairs -> RegressionOutput);
