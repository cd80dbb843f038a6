//! A U-Net (Ronneberger et al., 2015) with three levels. Outputs on the way down are kept and
//! joined with those on the way up.

use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::prelude::*;
use burn::tensor::activation::{relu, sigmoid};
use burn::train::RegressionOutput;

use super::Zoo;
use super::batches::{Masked, fitted, numbers};

/// Pixels along an edge.
const EDGE: usize = 32;
/// Channels of the first level.
const WIDTH: usize = 8;

/// Two convolutions.
#[derive(Module, Debug)]
struct Level<B: Backend> {
    first: Conv2d<B>,
    second: Conv2d<B>,
}

impl<B: Backend> Level<B> {
    fn new(from: usize, to: usize, device: &B::Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self { first: conv([from, to]), second: conv([to, to]) }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        relu(self.second.forward(relu(self.first.forward(x))))
    }
}

#[derive(Module, Debug)]
pub struct UNet<B: Backend> {
    down1: Level<B>,
    down2: Level<B>,
    bottom: Level<B>,
    rise2: ConvTranspose2d<B>,
    up2: Level<B>,
    rise1: ConvTranspose2d<B>,
    up1: Level<B>,
    output: Conv2d<B>,
    pool: MaxPool2d,
}

impl<B: Backend> Zoo<B> for UNet<B> {
    const NAME: &'static str = "unet";
    const ITEMS: usize = 300;
    type Batch = Masked<B>;

    fn new(device: &B::Device) -> Self {
        let level = |from, to| Level::new(from * WIDTH, to * WIDTH, device);
        let rise = |from, to| {
            let config = ConvTranspose2dConfig::new([from * WIDTH, to * WIDTH], [2, 2]);
            config.with_stride([2, 2]).init(device)
        };
        Self {
            down1: Level::new(1, WIDTH, device),
            down2: level(1, 2),
            bottom: level(2, 4),
            rise2: rise(4, 2),
            up2: level(4, 2),
            rise1: rise(2, 1),
            up1: level(2, 1),
            output: Conv2dConfig::new([WIDTH, 1], [1, 1]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Masked<B> {
        Masked {
            pixels: numbers(items, &[1, EDGE, EDGE], device),
            masks: numbers(items, &[EDGE * EDGE], device),
        }
    }
}

impl<B: Backend> UNet<B> {
    fn output(&self, batch: Masked<B>) -> RegressionOutput<B> {
        let one = self.down1.forward(batch.pixels);
        let two = self.down2.forward(self.pool.forward(one.clone()));
        let bottom = self.bottom.forward(self.pool.forward(two.clone()));
        let two = Tensor::cat(vec![two, self.rise2.forward(bottom)], 1);
        let two = self.up2.forward(two);
        let one = Tensor::cat(vec![one, self.rise1.forward(two)], 1);
        let mask = sigmoid(self.output.forward(self.up1.forward(one)));
        fitted(mask.flatten::<2>(1, 3), batch.masks)
    }
}

steps!(UNet: Masked -> RegressionOutput);
