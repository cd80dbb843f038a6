//! A transformer encoder that classifies sequences: the one of burn's text classification example,
//! half as deep.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, TrainOutput, TrainStep};

const WIDTH: usize = 256;
const LENGTH: usize = 32;

#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    blocks: TransformerEncoder<B>,
    head: Linear<B>,
}

#[derive(Clone, Debug)]
pub struct Sequences<B: Backend> {
    /// `[items, LENGTH, WIDTH]`
    features: Tensor<B, 3>,
    /// `[items]`
    targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Sequences<B> {
    pub fn new(items: usize, device: &B::Device) -> Self {
        let features = Tensor::arange(0..(items * LENGTH * WIDTH) as i64, device).float();
        let targets = Tensor::arange(0..items as i64, device).remainder_scalar(10);
        Self { features: (features * 0.37).sin().reshape([items, LENGTH, WIDTH]), targets }
    }
}

impl<B: Backend> Encoder<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            blocks: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 8, 2).init(device),
            head: LinearConfig::new(WIDTH, 10).init(device),
        }
    }
}

impl<B: AutodiffBackend> TrainStep for Encoder<B> {
    type Input = Sequences<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, sequences: Sequences<B>) -> TrainOutput<ClassificationOutput<B>> {
        let x = self.blocks.forward(TransformerEncoderInput::new(sequences.features));
        let logits = self.head.forward(x.mean_dim(1).squeeze_dim::<2>(1));
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), sequences.targets.clone());
        let item = ClassificationOutput::new(loss, logits, sequences.targets);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}
