//! An autoencoder: strided convolutions down, transposed convolutions up.

use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::RegressionOutput;

use super::Zoo;
use super::batches::{Pictures, fitted, numbers};

const CHANNELS: usize = 3;
/// Pixels along an edge.
const EDGE: usize = 32;

#[derive(Module, Debug)]
pub struct Autoencoder<B: Backend> {
    down1: Conv2d<B>,
    down2: Conv2d<B>,
    up2: ConvTranspose2d<B>,
    up1: ConvTranspose2d<B>,
}

impl<B: Backend> Zoo<B> for Autoencoder<B> {
    const NAME: &'static str = "autoencoder";
    const ITEMS: usize = 400;
    type Batch = Pictures<B>;

    fn new(device: &B::Device) -> Self {
        let down = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let up = |channels| {
            let config = ConvTranspose2dConfig::new(channels, [4, 4]).with_stride([2, 2]);
            config.with_padding([1, 1]).init(device)
        };
        Self {
            down1: down([CHANNELS, 16]),
            down2: down([16, 16]),
            up2: up([16, 16]),
            up1: up([16, CHANNELS]),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Pictures<B> {
        Pictures { pixels: numbers(items, &[CHANNELS, EDGE, EDGE], device) }
    }
}

impl<B: Backend> Autoencoder<B> {
    fn output(&self, batch: Pictures<B>) -> RegressionOutput<B> {
        let code = relu(self.down1.forward(batch.pixels.clone()));
        let code = relu(self.down2.forward(code));
        let pixels = self.up1.forward(relu(self.up2.forward(code)));
        fitted(pixels.flatten::<2>(1, 3), batch.pixels.flatten::<2>(1, 3))
    }
}

steps!(Autoencoder: Pictures -> RegressionOutput);
