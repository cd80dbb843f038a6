//! ResNet-18 (He et al., Deep Residual Learning for Image Recognition, 2016), with its layers and
//! connections and an eighth of its channels.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Images, classes, classified, numbers};

/// Channels of the first stage; 64 in the paper.
const WIDTH: usize = 8;
/// Pixels along an edge; 224 in the paper.
const EDGE: usize = 64;

/// A convolution with batch normalization.
#[derive(Module, Debug)]
struct Normed<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Normed<B> {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &B::Device) -> Self {
        let padding = kernel / 2;
        Self {
            conv: Conv2dConfig::new(channels, [kernel, kernel])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(channels[1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// Two convolutions with a shortcut around them.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    first: Normed<B>,
    second: Normed<B>,
    shortcut: Option<Normed<B>>,
}

impl<B: Backend> Block<B> {
    fn new(from: usize, to: usize, stride: usize, device: &B::Device) -> Self {
        Self {
            first: Normed::new([from, to], 3, stride, device),
            second: Normed::new([to, to], 3, 1, device),
            shortcut: (stride != 1).then(|| Normed::new([from, to], 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let around = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x.clone()),
            None => x.clone(),
        };
        let through = self.second.forward(relu(self.first.forward(x)));
        relu(through + around)
    }
}

#[derive(Module, Debug)]
pub struct ResNet<B: Backend> {
    stem: Normed<B>,
    pool: MaxPool2d,
    blocks: Vec<Block<B>>,
    average: AdaptiveAvgPool2d,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for ResNet<B> {
    const NAME: &'static str = "resnet";
    const ITEMS: usize = 250;
    type Batch = Images<B>;

    fn new(device: &B::Device) -> Self {
        let mut blocks = Vec::new();
        for stage in 0..4 {
            let to = WIDTH << stage;
            let (from, stride) = if stage == 0 { (WIDTH, 1) } else { (to / 2, 2) };
            blocks.push(Block::new(from, to, stride, device));
            blocks.push(Block::new(to, to, 1, device));
        }
        Self {
            stem: Normed::new([3, WIDTH], 7, 2, device),
            pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            blocks,
            average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(8 * WIDTH, CLASSES).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Images<B> {
        Images { pixels: numbers(items, &[3, EDGE, EDGE], device), targets: classes(items, device) }
    }
}

impl<B: Backend> ResNet<B> {
    fn output(&self, batch: Images<B>) -> ClassificationOutput<B> {
        let mut x = self.pool.forward(relu(self.stem.forward(batch.pixels)));
        for block in &self.blocks {
            x = block.forward(x);
        }
        let features = self.average.forward(x).flatten::<2>(1, 3);
        classified(self.output.forward(features), batch.targets)
    }
}

steps!(ResNet: Images -> ClassificationOutput);
