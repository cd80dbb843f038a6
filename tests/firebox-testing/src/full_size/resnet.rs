//! ResNet-50 (He et al., "Deep residual learning for image recognition", 2016), with the stride in
//! the 3 x 3 convolutions as in torchvision: 25.6 million parameters for 1,000 classes.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

/// The blocks of each stage.
const BLOCKS: [usize; 4] = [3, 4, 6, 3];
const CLASSES: usize = 1000;

/// Color images and their classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Photos<B: Backend> {
    /// `[items, 3, size, size]`
    pub pixels: Tensor<B, 4>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Photos<B> {
    /// `items` images of `size` x `size` pixels.
    pub fn new(items: usize, size: usize, device: &B::Device) -> Self {
        let pixels = Tensor::arange(0..(items * 3 * size * size) as i64, device).float();
        let targets = Tensor::arange(0..items as i64, device).remainder_scalar(CLASSES as i64);
        Self { pixels: (pixels * 0.37).sin().reshape([items, 3, size, size]), targets }
    }
}

/// A convolution with batch normalization.
#[derive(Module, Debug)]
struct Normed<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Normed<B> {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &B::Device) -> Self {
        let padding = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel, kernel])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false);
        Self { conv: conv.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        self.norm.forward(self.conv.forward(x))
    }
}

#[derive(Module, Debug)]
struct Bottleneck<B: Backend> {
    reduce: Normed<B>,
    middle: Normed<B>,
    expand: Normed<B>,
    skip: Option<Normed<B>>,
}

impl<B: Backend> Bottleneck<B> {
    fn new(input: usize, width: usize, stride: usize, device: &B::Device) -> Self {
        let output = 4 * width;
        let changes = stride > 1 || input != output;
        Self {
            reduce: Normed::new([input, width], 1, 1, device),
            middle: Normed::new([width, width], 3, stride, device),
            expand: Normed::new([width, output], 1, 1, device),
            skip: changes.then(|| Normed::new([input, output], 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let skip = match &self.skip {
            Some(skip) => skip.forward(x.clone()),
            None => x.clone(),
        };
        let x = relu(self.reduce.forward(x));
        let x = relu(self.middle.forward(x));
        relu(self.expand.forward(x) + skip)
    }
}

#[derive(Module, Debug)]
pub struct ResNet50<B: Backend> {
    stem: Normed<B>,
    pool: MaxPool2d,
    blocks: Vec<Bottleneck<B>>,
    mean: AdaptiveAvgPool2d,
    head: Linear<B>,
}

impl<B: Backend> ResNet50<B> {
    pub fn new(device: &B::Device) -> Self {
        let (mut blocks, mut input) = (Vec::new(), 64);
        for (stage, count) in BLOCKS.into_iter().enumerate() {
            let width = 64 << stage;
            for block in 0..count {
                let stride = if block == 0 && stage > 0 { 2 } else { 1 };
                blocks.push(Bottleneck::new(input, width, stride, device));
                input = 4 * width;
            }
        }
        Self {
            stem: Normed::new([3, 64], 7, 2, device),
            pool: MaxPool2dConfig::new([3, 3])
                .with_strides([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(),
            blocks,
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(input, CLASSES).init(device),
        }
    }

    fn classify(&self, photos: Photos<B>) -> ClassificationOutput<B> {
        let mut x = self.pool.forward(relu(self.stem.forward(photos.pixels)));
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits = self.head.forward(self.mean.forward(x).flatten(1, 3));
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), photos.targets.clone());
        ClassificationOutput::new(loss, logits, photos.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for ResNet50<B> {
    type Input = Photos<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, photos: Photos<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(photos);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for ResNet50<B> {
    type Input = Photos<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, photos: Photos<B>) -> ClassificationOutput<B> {
        self.classify(photos)
    }
}
