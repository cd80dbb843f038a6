//! The model zoo: one model of each common kind, for the tests and benches that compare predicted
//! with measured memory.
//!
//! The models need little computing and much memory. A software GPU has to run them, and only bytes
//! are compared. Their items are numbers. Batches are made from these on the host, so no data set
//! is needed.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn::data::dataloader::batcher::Batcher;
use burn::prelude::*;
use firebox::MicroBatch;

/// A model of the zoo and the batches it trains on.
pub trait Zoo<B: Backend>: Module<B> {
    /// Name on the command line.
    const NAME: &'static str;
    /// A batch size that opens pages of several sizes.
    const ITEMS: usize;

    /// The input of one step.
    type Batch: MicroBatch + Clone + Debug + Send + 'static;

    /// Creates the model with random weights.
    fn new(device: &B::Device) -> Self;

    /// Makes the batch of the items with these numbers, with one upload of host data per tensor.
    fn batch(items: &[usize], device: &B::Device) -> Self::Batch;
}

/// Makes batches of the model `M` from the numbers of their items.
pub struct Numbered<M>(PhantomData<fn() -> M>);

impl<M> Clone for Numbered<M> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<M> Default for Numbered<M> {
    fn default() -> Self {
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
                let grads = firebox::scale_loss(output.loss.clone()).backward();
                burn::train::TrainOutput::new(self, grads, output)
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
mod wide;

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
pub use wide::Wide;
