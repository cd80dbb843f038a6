//! A transformer encoder that classifies sequences.

use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Sequences, classes, classified, numbers};

const LENGTH: usize = 64;
const FEATURES: usize = 16;
const WIDTH: usize = 32;

#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    embed: Linear<B>,
    layers: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Encoder<B> {
    const NAME: &'static str = "encoder";
    const ITEMS: usize = 200;
    type Batch = Sequences<B>;

    fn new(device: &B::Device) -> Self {
        Self {
            embed: LinearConfig::new(FEATURES, WIDTH).init(device),
            layers: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2).init(device),
            output: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Sequences<B> {
        Sequences {
            inputs: numbers(items, &[LENGTH, FEATURES], device),
            targets: classes(items, device),
        }
    }
}

impl<B: Backend> Encoder<B> {
    fn output(&self, batch: Sequences<B>) -> ClassificationOutput<B> {
        let x = TransformerEncoderInput::new(self.embed.forward(batch.inputs));
        let x = self.layers.forward(x).mean_dim(1).squeeze_dim(1);
        classified(self.output.forward(x), batch.targets)
    }
}

steps!(Encoder: Sequences -> ClassificationOutput);
