//! A multi-layer perceptron with dropout: wide layers between narrow ones.

use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Rows, classes, classified, numbers};

const FEATURES: usize = 48;
const WIDE: usize = 2048;
const NARROW: usize = 16;

#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Mlp<B> {
    const NAME: &'static str = "mlp";
    const ITEMS: usize = 3000;
    type Batch = Rows<B>;

    fn new(device: &B::Device) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            layers: vec![layer(FEATURES, WIDE), layer(WIDE, NARROW), layer(NARROW, WIDE)],
            dropout: DropoutConfig::new(0.2).init(),
            output: layer(WIDE, CLASSES),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Rows<B> {
        Rows { inputs: numbers(items, &[FEATURES], device), targets: classes(items, device) }
    }
}

impl<B: Backend> Mlp<B> {
    fn output(&self, batch: Rows<B>) -> ClassificationOutput<B> {
        let mut x = batch.inputs;
        for layer in &self.layers {
            x = self.dropout.forward(gelu(layer.forward(x)));
        }
        classified(self.output.forward(x), batch.targets)
    }
}

steps!(Mlp: Rows -> ClassificationOutput);
