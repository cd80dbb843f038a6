//! One turn of the Learner on images, and the duration of its timed steps.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, LearningComponentsMarker, SupervisedTraining, TrainStep};
use firebox::{Bytes, Learner, TrainingBackend, initialize};

use crate::full_size::cnn::Images;

/// Makes gray images and records the time of each request for a batch.
#[derive(Clone)]
pub struct Gray {
    edge: usize,
    begun: Arc<Mutex<Vec<Instant>>>,
}

impl Gray {
    /// Images of `edge` × `edge` pixels.
    pub fn new(edge: usize) -> Self {
        Self { edge, begun: Arc::default() }
    }

    /// The duration of the timed steps of a training that has ended.
    fn timed(&self, Steps { warm_up, timed, .. }: Steps) -> Duration {
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        begun[warm_up + timed] - begun[warm_up]
    }
}

impl<B: Backend> Batcher<B, usize, Images<B>> for Gray {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Images<B> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        let (items, edge) = (items.len(), self.edge);
        let pixels = TensorData::new(vec![0.5f32; items * edge * edge], [items, 1, edge, edge]);
        let targets = TensorData::new(vec![1i32; items], [items]);
        Images {
            pixels: Tensor::from_data(pixels, device),
            targets: Tensor::from_data(targets, device),
        }
    }
}

/// Number and size of the steps in a turn.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Steps that do not count. All planning happens in them.
    pub warm_up: usize,
    /// Steps that count.
    pub timed: usize,
    /// Images in a batch.
    pub items: usize,
}

/// Trains `model` on `batches` and returns the duration of the timed steps.
pub fn turn<B, M>(model: M, batches: Gray, steps: Steps, device: &B::Device) -> Duration
where
    B: TrainingBackend,
    M: TrainStep<Input = Images<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Images<B::InnerBackend>>,
{
    initialize(&model);
    let folder = tempfile::tempdir().expect("a folder");
    Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(4))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-3)
        .fit(training::<B, M>(&batches, steps, device, folder.path()))
        .expect("it fits");
    batches.timed(steps)
}

/// The same with burn's own Learner.
pub fn turn_of_burn<B, M>(model: M, batches: Gray, steps: Steps, device: &B::Device) -> Duration
where
    B: AutodiffBackend,
    M: TrainStep<Input = Images<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Images<B::InnerBackend>>,
{
    initialize(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let learner = burn::train::Learner::new(model, AdamConfig::new().init(), 1e-3);
    training::<B, M>(&batches, steps, device, folder.path()).launch(learner);
    batches.timed(steps)
}

type Training<B, M> = SupervisedTraining<
    LearningComponentsMarker<B, f64, M, OptimizerAdaptor<burn::optim::Adam, M, B>>,
>;

fn training<B, M>(batches: &Gray, steps: Steps, device: &B::Device, folder: &Path) -> Training<B, M>
where
    B: AutodiffBackend,
    M: TrainStep<Input = Images<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Images<B::InnerBackend>>,
{
    let Steps { warm_up, timed, items } = steps;
    let numbers = |batches: usize| InMemDataset::new((0..batches * items).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(batches.clone())
        .batch_size(items)
        .set_device(device.clone())
        .build(numbers(warm_up + timed + 1));
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Gray::new(batches.edge))
        .batch_size(items)
        .set_device(device.clone())
        .build(numbers(1));
    SupervisedTraining::new(folder, train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
}
