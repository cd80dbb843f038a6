//! An LSTM that classifies sequences by all of its hidden states.

use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::prelude::*;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{CLASSES, Sequences, classes, classified, numbers};

const LENGTH: usize = 12;
const FEATURES: usize = 8;
const WIDTH: usize = 32;

#[derive(Module, Debug)]
pub struct Recurrent<B: Backend> {
    lstm: Lstm<B>,
    output: Linear<B>,
}

impl<B: Backend> Zoo<B> for Recurrent<B> {
    const NAME: &'static str = "lstm";
    const ITEMS: usize = 4000;
    type Batch = Sequences<B>;

    fn new(device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(FEATURES, WIDTH, true).init(device),
            output: LinearConfig::new(LENGTH * WIDTH, CLASSES).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Sequences<B> {
        Sequences {
            inputs: numbers(items, &[LENGTH, FEATURES], device),
            targets: classes(items, device),
        }
    }
}

impl<B: Backend> Recurrent<B> {
    fn output(&self, batch: Sequences<B>) -> ClassificationOutput<B> {
        let (states, _) = self.lstm.forward(batch.inputs, None);
        classified(self.output.forward(states.flatten(1, 2)), batch.targets)
    }
}

steps!(Recurrent: Sequences -> ClassificationOutput);
