//! The images, from burn's own data set or from IDX files.

use std::panic::catch_unwind;
use std::path::Path;

use anyhow::Context;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::vision::MnistDataset;
use burn::data::dataset::{Dataset, InMemDataset};
use burn::prelude::*;
use firebox::MicroBatch;

use crate::idx;

/// An image of 28 × 28 pixels, each from 0 to 1, and the digit it shows.
#[derive(Clone, Debug)]
pub struct Image {
    pixels: Vec<f32>,
    label: u8,
}

/// Images `[items, 28, 28]` and digits `[items]`.
#[derive(Clone, Debug, MicroBatch)] // with plain burn: Clone, Debug
pub struct MnistBatch<B: Backend> {
    /// `[items, 28, 28]`
    pub images: Tensor<B, 3>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

/// Puts images into batches.
#[derive(Clone, Debug)]
pub struct MnistBatcher;

impl<B: Backend> Batcher<B, Image, MnistBatch<B>> for MnistBatcher {
    fn batch(&self, items: Vec<Image>, device: &B::Device) -> MnistBatch<B> {
        // Mean and standard deviation of the training images.
        let normalize = |pixel: &f32| (pixel - 0.1307) / 0.3081;
        let pixels: Vec<f32> = items.iter().flat_map(|i| i.pixels.iter().map(normalize)).collect();
        let labels: Vec<i32> = items.iter().map(|item| item.label.into()).collect();
        MnistBatch {
            images: Tensor::from_data(TensorData::new(pixels, [items.len(), 28, 28]), device),
            targets: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

/// Loads the training and test images, from `folder` or from burn's own data set.
pub fn load(folder: Option<&Path>) -> anyhow::Result<(InMemDataset<Image>, InMemDataset<Image>)> {
    match folder {
        Some(folder) => Ok((read(folder, "train")?, read(folder, "t10k")?)),
        None => {
            let sets = catch_unwind(|| (MnistDataset::train(), MnistDataset::test()));
            let (train, test) = sets.ok().context(
                "burn could not download MNIST: connect to a network, or put its four IDX files into a folder and \
                 give it with --data DIR",
            )?;
            Ok((convert(&train), convert(&test)))
        }
    }
}

fn convert(set: &MnistDataset) -> InMemDataset<Image> {
    let images = set.iter().map(|item| Image {
        pixels: item.image.iter().flatten().map(|pixel| pixel / 255.0).collect(),
        label: item.label,
    });
    InMemDataset::new(images.collect())
}

fn read(folder: &Path, split: &str) -> anyhow::Result<InMemDataset<Image>> {
    let images = idx::read(folder, split)?.into_iter().map(|(pixels, label)| Image {
        pixels: pixels.iter().map(|pixel| f32::from(*pixel) / 255.0).collect(),
        label,
    });
    Ok(InMemDataset::new(images.collect()))
}
