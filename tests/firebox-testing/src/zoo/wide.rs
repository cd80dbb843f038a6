//! A model that is mostly parameters, so that the optimizer's state takes the most memory.

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Rows, classes, classified, numbers};

const FEATURES: usize = 1024;
const LAYERS: usize = 6;

#[derive(Module, Debug)]
pub struct Wide<B: Backend> {
    layers: Vec<Linear<B>>,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Wide<B> {
    const NAME: &'static str = "wide";
    const ITEMS: usize = 64;
    type Batch = Rows<B>;

    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(FEATURES, FEATURES).with_bias(false).init(device);
        Self {
            layers: (0..LAYERS).map(layer).collect(),
            output: LinearConfig::new(FEATURES, CLASSES).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Rows<B> {
        Rows { inputs: numbers(items, &[FEATURES], device), targets: classes(items, device) }
    }
}

impl<B: Backend> Wide<B> {
    fn output(&self, batch: Rows<B>) -> ClassificationOutput<B> {
        let hidden = self.layers.iter().fold(batch.inputs, |x, layer| gelu(layer.forward(x)));
        classified(self.output.forward(hidden), batch.targets)
    }
}

steps!(Wide: Rows -> ClassificationOutput);
