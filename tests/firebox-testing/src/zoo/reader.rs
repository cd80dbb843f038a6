//! A model that reads values of its data: its largest activation during the forward pass, by which
//! it divides.

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::tensor::activation::relu;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Rows, classes, classified, numbers};

const FEATURES: usize = 64;
const WIDE: usize = 1024;
const NARROW: usize = 32;

#[derive(Module, Debug)]
pub struct Reader<B: Backend> {
    widen: Linear<B>,
    narrow: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Reader<B> {
    const NAME: &'static str = "reader";
    const ITEMS: usize = 4000;
    type Batch = Rows<B>;

    fn new(device: &B::Device) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            widen: layer(FEATURES, WIDE),
            narrow: layer(WIDE, NARROW),
            output: layer(NARROW, CLASSES),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Rows<B> {
        Rows { inputs: numbers(items, &[FEATURES], device), targets: classes(items, device) }
    }
}

impl<B: Backend> Reader<B> {
    fn output(&self, batch: Rows<B>) -> ClassificationOutput<B> {
        let x = relu(self.widen.forward(batch.inputs));
        let largest: f32 = x.clone().max().into_scalar().elem();
        let x = x / largest.max(1.0);
        classified(self.output.forward(relu(self.narrow.forward(x))), batch.targets)
    }
}

steps!(Reader: Rows -> ClassificationOutput);
