//! The training of `plain.rs`, with firebox.

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::optim::AdamConfig;
use burn::record::CompactRecorder;
use burn::train::SupervisedTraining;
use burn::train::metric::{AccuracyMetric, LossMetric};
use firebox::{DurableRecorder, Lazy, Learner};

use crate::Options;
use crate::data::{MnistBatcher, load};
use crate::model::Model;

type B = Autodiff<Lazy<Flex>>;

/// Trains the model and prints burn's summary.
pub fn train(options: &Options) -> anyhow::Result<()> {
    let (train, valid) = load(options.data.as_deref())?;
    let batch_size = options.batch_size as usize;
    let train =
        DataLoaderBuilder::new(MnistBatcher).batch_size(batch_size).shuffle(42).build(train);
    let valid = DataLoaderBuilder::new(MnistBatcher).batch_size(batch_size).build(valid);
    let training = SupervisedTraining::new(&options.artifacts, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_file_checkpointer(DurableRecorder::new(CompactRecorder::new()))
        .num_epochs(options.epochs as usize)
        .summary();

    let model = Model::<B>::new(&Default::default());
    let builder = Learner::builder().auto_batch().memory(options.memory).stop_on_ctrl_c();
    builder.build(model, AdamConfig::new().init(), 1e-3).fit(training)?;
    Ok(())
}
