//! ResNet-18, as in table 1 of "Deep Residual Learning for Image Recognition" (He and others,
//! 2015).

use std::marker::PhantomData;

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;

use super::cross_entropy;
use crate::search::Subject;

/// Batches of colour images, all of one size, with a thousand classes.
pub struct ResNet<B> {
    pixels: usize,
    backend: PhantomData<fn() -> B>,
}

impl<B> ResNet<B> {
    /// Creates the model for images of `pixels` × `pixels` pixels.
    pub fn new(pixels: usize) -> Self {
        Self { pixels, backend: PhantomData }
    }
}

#[derive(Module, Debug)]
pub struct Layers<B: Backend> {
    stem: Normed<B>,
    pool: MaxPool2d,
    blocks: Vec<Block<B>>,
    average: AdaptiveAvgPool2d,
    output: Linear<B>,
    relu: Relu,
}

/// A convolution without bias, followed by batch normalization.
#[derive(Module, Debug)]
struct Normed<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

/// Two convolutions with a shortcut around them.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    first: Normed<B>,
    second: Normed<B>,
    around: Option<Normed<B>>,
    relu: Relu,
}

impl<B: Backend> Normed<B> {
    fn new(channels: [usize; 2], size: usize, stride: usize, device: &B::Device) -> Self {
        let side = size / 2;
        let conv = Conv2dConfig::new(channels, [size, size])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(side, side, side, side))
            .with_bias(false);
        Self { conv: conv.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        self.norm.forward(self.conv.forward(x))
    }
}

impl<B: Backend> Block<B> {
    fn new(from: usize, to: usize, stride: usize, device: &B::Device) -> Self {
        Self {
            first: Normed::new([from, to], 3, stride, device),
            second: Normed::new([to, to], 3, 1, device),
            around: (from != to).then(|| Normed::new([from, to], 1, stride, device)),
            relu: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let around = match &self.around {
            Some(around) => around.forward(x.clone()),
            None => x.clone(),
        };
        let x = self.relu.forward(self.first.forward(x));
        self.relu.forward(self.second.forward(x) + around)
    }
}

impl<B: AutodiffBackend> Subject<B> for ResNet<B> {
    type Model = Layers<B>;
    type Batch = (Tensor<B, 4>, Tensor<B, 1, Int>);

    fn title(&self) -> String {
        format!("ResNet-18 on colour images of {0} x {0} pixels", self.pixels)
    }

    fn typical(&self) -> usize {
        8
    }

    fn model(&self, device: &B::Device) -> Layers<B> {
        let stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)];
        let blocks = stages.into_iter().flat_map(|(from, to, stride)| {
            [Block::new(from, to, stride, device), Block::new(to, to, 1, device)]
        });
        Layers {
            stem: Normed::new([3, 64], 7, 2, device),
            pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            blocks: blocks.collect(),
            average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(512, 1000).init(device),
            relu: Relu::new(),
        }
    }

    fn batch(&self, items: usize, device: &B::Device) -> Self::Batch {
        let images = Tensor::zeros([items, 3, self.pixels, self.pixels], device);
        (images, Tensor::zeros([items], device))
    }

    fn loss(&self, model: &Layers<B>, (images, targets): &Self::Batch) -> Tensor<B, 1> {
        let x = model.relu.forward(model.stem.forward(images.clone()));
        let x = model.pool.forward(x);
        let x = model.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = model.average.forward(x).flatten(1, 3);
        cross_entropy(model.output.forward(x), targets.clone())
    }
}
