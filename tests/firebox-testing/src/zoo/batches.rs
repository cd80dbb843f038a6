//! The batches of the zoo, and the host data that they are made of.

use burn::nn::loss::{CrossEntropyLossConfig, MseLoss, Reduction};
use burn::prelude::*;
use burn::train::{ClassificationOutput, RegressionOutput};
use firebox::MicroBatch;

/// Number of classes.
pub const CLASSES: usize = 10;

/// Rows of numbers with classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Rows<B: Backend> {
    /// `[items, features]`
    pub inputs: Tensor<B, 2>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

/// Sequences with classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Sequences<B: Backend> {
    /// `[items, length, features]`
    pub inputs: Tensor<B, 3>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

/// Images with classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Images<B: Backend> {
    /// `[items, channels, height, width]`
    pub pixels: Tensor<B, 4>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

/// Images with a target for each pixel.
#[derive(Clone, Debug, MicroBatch)]
pub struct Masked<B: Backend> {
    /// `[items, channels, height, width]`
    pub pixels: Tensor<B, 4>,
    /// `[items, height * width]`
    pub masks: Tensor<B, 2>,
}

/// Images alone.
#[derive(Clone, Debug, MicroBatch)]
pub struct Pictures<B: Backend> {
    /// `[items, channels, height, width]`
    pub pixels: Tensor<B, 4>,
}

/// Pairs of images, and whether they show the same thing.
#[derive(Clone, Debug, MicroBatch)]
pub struct Pairs<B: Backend> {
    /// `[items, channels, height, width]`
    pub left: Tensor<B, 4>,
    /// `[items, channels, height, width]`
    pub right: Tensor<B, 4>,
    /// `[items, 1]`
    pub same: Tensor<B, 2>,
}

/// Texts, and the same texts shifted by one token.
#[derive(Clone, Debug, MicroBatch)]
pub struct Texts<B: Backend> {
    /// `[items, length]`
    pub tokens: Tensor<B, 2, Int>,
    /// `[items, length]`
    pub next: Tensor<B, 2, Int>,
}

/// Numbers between -1 and 1 for each item, with shape `[items, item...]`.
pub fn numbers<B: Backend, const D: usize>(
    items: &[usize],
    item: &[usize],
    device: &B::Device,
) -> Tensor<B, D> {
    const PERIOD: usize = 1013;
    let wave: Vec<f32> =
        (0..PERIOD).map(|i| ((i * 7919 % PERIOD) as f32 / PERIOD as f32 - 0.5) * 2.0).collect();
    let numbers: usize = item.iter().product();
    // Allocated with exact size: spare capacity of a vector stays with the tensor that takes it
    // over.
    let mut values = Vec::with_capacity(items.len() * numbers);
    for &number in items {
        let end = values.len() + numbers;
        let mut from = number * 31 % PERIOD;
        while values.len() < end {
            let some = (PERIOD - from).min(end - values.len());
            values.extend_from_slice(&wave[from..from + some]);
            from = 0;
        }
    }
    let shape: Vec<usize> = std::iter::once(items.len()).chain(item.iter().copied()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Class of each item.
pub fn classes<B: Backend>(items: &[usize], device: &B::Device) -> Tensor<B, 1, Int> {
    let classes: Vec<i32> = items.iter().map(|item| (item % CLASSES) as i32).collect();
    Tensor::from_data(TensorData::new(classes, [items.len()]), device)
}

/// A text of `length` tokens per item, from a vocabulary of `tokens`, starting at its token `from`.
pub fn texts<B: Backend>(
    items: &[usize],
    (from, length, tokens): (usize, usize, usize),
    device: &B::Device,
) -> Tensor<B, 2, Int> {
    let text =
        |item: usize| (from..from + length).map(move |i| ((item * 7 + i * i) % tokens) as i32);
    let mut values = Vec::with_capacity(items.len() * length);
    values.extend(items.iter().flat_map(|item| text(*item)));
    Tensor::from_data(TensorData::new(values, [items.len(), length]), device)
}

/// Cross-entropy of logits `[items, classes]`.
pub fn classified<B: Backend>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> ClassificationOutput<B> {
    let loss = CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits.clone(), targets.clone());
    ClassificationOutput::new(loss, logits, targets)
}

/// Mean squared error of `[items, numbers]`.
pub fn fitted<B: Backend>(output: Tensor<B, 2>, targets: Tensor<B, 2>) -> RegressionOutput<B> {
    let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
    RegressionOutput::new(loss, output, targets)
}
