//! The model zoo: one model of each kind that people train, for the tests and benches that compare what a step needs
//! with what was predicted.
//!
//! The models are small to compute and wide in memory: a software GPU has to run them, and what is compared are bytes.
//! Their items are numbers, and batches are made of these on the host, so that no data set is needed.

#![allow(dead_code, unused_imports, reason = "no suite uses all of it")]

use std::fmt::Debug;
use std::marker::PhantomData;

use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;
use firebox::MicroBatch;

/// A model of the zoo, and the batches it is trained on.
pub trait Zoo<B: Backend>: Module<B> {
    /// Its name on the command line.
    const NAME: &'static str;
    /// The items of a batch that opens pages of several sizes.
    const ITEMS: usize;

    /// What one step sees.
    type Batch: MicroBatch + Clone + Debug + Send + 'static;

    /// The model with random weights.
    fn new(device: &B::Device) -> Self;

    /// The batch of the items with these numbers: one upload of host data for each of its tensors.
    fn batch(items: &[usize], device: &B::Device) -> Self::Batch;
}

/// Makes batches of the model `M` out of the numbers of their items.
pub struct Numbered<M>(PhantomData<fn() -> M>);

impl<M> Clone for Numbered<M> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<M> Numbered<M> {
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<B: Backend, M: Zoo<B>> Batcher<B, usize, M::Batch> for Numbered<M> {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> M::Batch {
        M::batch(&items, device)
    }
}

/// Makes a model trainable: `step` maps a batch to its output, in training and in validation.
macro_rules! steps {
    ($model:ident: $batch:ident -> $output:ident) => {
        impl<B: burn::tensor::backend::AutodiffBackend> burn::train::TrainStep for $model<B> {
            type Input = $batch<B>;
            type Output = burn::train::$output<B>;

            fn step(&self, batch: $batch<B>) -> burn::train::TrainOutput<Self::Output> {
                let output = self.output(batch);
                burn::train::TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl<B: burn::tensor::backend::Backend> burn::train::InferenceStep for $model<B> {
            type Input = $batch<B>;
            type Output = burn::train::$output<B>;

            fn step(&self, batch: $batch<B>) -> Self::Output {
                self.output(batch)
            }
        }
    };
}

mod batches;
pub mod iterations;

mod autoencoder;
mod cnn;
mod encoder;
mod gpt;
mod lstm;
mod mlp;
mod reader;
mod resnet;
mod siamese;
mod unet;

pub use autoencoder::Autoencoder;
pub use cnn::Cnn;
pub use encoder::Encoder;
pub use gpt::Gpt;
pub use lstm::Recurrent;
pub use mlp::Mlp;
pub use reader::Reader;
pub use resnet::ResNet;
pub use siamese::Siamese;
pub use unet::UNet;
