//! The CNN of PyTorch's MNIST example (1.2 million parameters), with batch normalization added.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

#[derive(Clone, Debug, MicroBatch)]
pub struct Images<B: Backend> {
    /// `[items, 1, 28, 28]`
    pub pixels: Tensor<B, 4>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Images<B> {
    pub fn new(items: usize, device: &B::Device) -> Self {
        let pixels = Tensor::arange(0..(items * 28 * 28) as i64, device).float();
        let targets = Tensor::arange(0..items as i64, device).remainder_scalar(10);
        Self { pixels: (pixels * 0.37).sin().reshape([items, 1, 28, 28]), targets }
    }
}

impl<B: Backend> Cnn<B> {
    pub fn new(device: &B::Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]).init(device);
        Self {
            conv1: conv([1, 32]),
            norm1: BatchNormConfig::new(32).init(device),
            conv2: conv([32, 64]),
            norm2: BatchNormConfig::new(64).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            hidden: LinearConfig::new(64 * 12 * 12, 128).init(device),
            output: LinearConfig::new(128, 10).init(device),
            relu: Relu::new(),
        }
    }

    fn classify(&self, images: Images<B>) -> ClassificationOutput<B> {
        let x = self.relu.forward(self.norm1.forward(self.conv1.forward(images.pixels)));
        let x = self.relu.forward(self.norm2.forward(self.conv2.forward(x)));
        let x = self.dropout.forward(self.pool.forward(x).flatten(1, 3));
        let logits = self.output.forward(self.relu.forward(self.hidden.forward(x)));
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), images.targets.clone());
        ClassificationOutput::new(loss, logits, images.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Cnn<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(images);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Cnn<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> ClassificationOutput<B> {
        self.classify(images)
    }
}
