//! Training with plain burn.

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::optim::AdamConfig;
use burn::record::CompactRecorder;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, SupervisedTraining};

use crate::Options;
use crate::data::{MnistBatcher, load};
use crate::model::Model;

type B = Autodiff<Flex>;

/// Trains the model and prints burn's summary.
pub fn train(options: &Options) -> anyhow::Result<()> {
    let (train, valid) = load(options.data.as_deref())?;
    let batch_size = options.batch_size as usize;
    let train =
        DataLoaderBuilder::new(MnistBatcher).batch_size(batch_size).shuffle(42).build(train);
    let valid = DataLoaderBuilder::new(MnistBatcher).batch_size(batch_size).build(valid);
    let training = SupervisedTraining::new(&options.artifacts, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_file_checkpointer(CompactRecorder::new())
        .num_epochs(options.epochs as usize)
        .summary();

    let model = Model::<B>::new(&Default::default());
    let learner = Learner::new(model, AdamConfig::new().init(), 1e-3);
    training.launch(learner);
    Ok(())
}
