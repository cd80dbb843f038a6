//! The models that are measured, and their data on the host.

use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;
use clap::ValueEnum;
use firebox_testing::full_size::cnn::{Cnn, Images};
use firebox_testing::full_size::gpt::{Gpt, Texts, VOCABULARY};

/// Length of a text in tokens.
pub const TOKENS: usize = 256;
const PIXELS: usize = 28;

/// A model to measure.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Subject {
    /// A small CNN on images of 28 × 28 pixels.
    Cnn,
    /// A GPT of twelve layers, 768 wide, on texts of 256 tokens.
    Gpt,
    /// A GPT of two layers, 128 wide, on texts of 256 tokens.
    SmallGpt,
}

impl Subject {
    /// Name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// A batch size that is common in training.
    pub fn items(self) -> usize {
        match self {
            Self::Cnn => 512,
            Self::Gpt => 16,
            Self::SmallGpt => 32,
        }
    }
}

/// Creates the CNN.
pub fn cnn<B: Backend>(device: &B::Device) -> Cnn<B> {
    Cnn::new(device)
}

/// Creates one of the GPTs.
pub fn gpt<B: Backend>(subject: Subject, device: &B::Device) -> Gpt<B> {
    match subject {
        Subject::SmallGpt => Gpt::new(2, 128, TOKENS, device),
        _ => Gpt::new(12, 768, TOKENS, device),
    }
}

/// Makes batches from host data. Items are numbers, and each number always gives the same image or
/// text.
#[derive(Clone, Copy, Debug)]
pub struct FromNumbers;

impl<B: Backend> Batcher<B, usize, Images<B>> for FromNumbers {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Images<B> {
        let pixel = |index: usize| ((index * 31) % 256) as f32 / 255.0;
        let area = PIXELS * PIXELS;
        let pixels = items.iter().flat_map(|item| (0..area).map(move |at| pixel(item + at)));
        let pixels: Vec<f32> = pixels.collect();
        let targets: Vec<i32> = items.iter().map(|item| (item % 10) as i32).collect();
        let shape = [items.len(), 1, PIXELS, PIXELS];
        Images {
            pixels: Tensor::from_data(TensorData::new(pixels, shape), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}

impl<B: Backend> Batcher<B, usize, Texts<B>> for FromNumbers {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Texts<B> {
        let text = |from: usize| {
            let token = |item: usize, at: usize| ((item * 7 + at + from) % VOCABULARY) as i32;
            let tokens = items.iter().flat_map(|item| (0..TOKENS).map(move |at| token(*item, at)));
            let data = TensorData::new(tokens.collect::<Vec<i32>>(), [items.len(), TOKENS]);
            Tensor::from_data(data, device)
        };
        Texts { tokens: text(0), next: text(1) }
    }
}
