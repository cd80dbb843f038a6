//! A stack of any number of small linear layers, for programs of any length.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

const WIDTH: usize = 8;

#[derive(Module, Debug)]
pub struct Stack<B: Backend> {
    layers: Vec<Linear<B>>,
    relu: Relu,
}

#[derive(Clone, Debug, MicroBatch)]
pub struct Rows<B: Backend> {
    /// `[items, WIDTH]`
    features: Tensor<B, 2>,
    /// `[items]`
    targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Rows<B> {
    pub fn new(items: usize, device: &B::Device) -> Self {
        let targets = Tensor::arange(0..items as i64, device).remainder_scalar(WIDTH as i64);
        Self { features: Tensor::ones([items, WIDTH], device), targets }
    }
}

impl<B: Backend> Stack<B> {
    pub fn new(layers: usize, device: &B::Device) -> Self {
        let layers = (0..layers).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device)).collect();
        Self { layers, relu: Relu::new() }
    }

    fn classify(&self, rows: Rows<B>) -> ClassificationOutput<B> {
        let layer = |x, layer: &Linear<B>| self.relu.forward(layer.forward(x));
        let logits = self.layers.iter().fold(rows.features, layer);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), rows.targets.clone());
        ClassificationOutput::new(loss, logits, rows.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Stack<B> {
    type Input = Rows<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, rows: Rows<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(rows);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Stack<B> {
    type Input = Rows<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, rows: Rows<B>) -> ClassificationOutput<B> {
        self.classify(rows)
    }
}
