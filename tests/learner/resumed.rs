//! Tests what a resumed run goes on with, besides what burn's checkpoints hold.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::DefaultRecorder;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use firebox::train::StepUse;
use firebox::{Bytes, DurableRecorder, Lazy, Learner, TrainError};
use firebox_testing::lengths::{Lengths, Net, Sequences};
use firebox_testing::task::{Given, random_state, weights};

use crate::attempts::B;

const SHORT: usize = 40;
const LONG: usize = 90;

/// Batches in an order that turns by one from epoch to epoch.
struct Turning<I> {
    batches: Vec<I>,
    epochs: AtomicUsize,
}

impl<B: Backend, I: Clone + Send + Sync + 'static> DataLoader<B, I> for Turning<I> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<I> + 'a> {
        let mut batches = self.batches.clone();
        let turns = self.epochs.fetch_add(1, Ordering::Relaxed) % batches.len();
        batches.rotate_left(turns);
        Given::iterator(batches)
    }

    fn num_items(&self) -> usize {
        self.batches.len()
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, I>> {
        let epochs = self.epochs.load(Ordering::Relaxed).into();
        Arc::new(Self { batches: self.batches.clone(), epochs })
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<B, I>> {
        unreachable!("only one device trains")
    }
}

/// How a run goes on after an earlier one in the same folder.
#[derive(Clone, Copy, PartialEq)]
enum GoesOn {
    /// As the Learner is asked to.
    Resumes,
    /// From burn's checkpoint of the first epoch alone.
    FromCheckpoint,
}

/// The bits of the weights, and how many micro-batches each step had.
type Ran = (Vec<u32>, Vec<usize>);

fn train(
    folder: &Path,
    width: usize,
    budget: Bytes,
    epochs: usize,
    goes_on: GoesOn,
) -> Result<Ran, TrainError> {
    let device = Default::default();
    Flex::seed(&device, 7);
    let model = Net::<B>::new(width, &device);
    firebox::initialize(&model);
    let batch = |length: usize| {
        let batch: Sequences<B> = Lengths { width }.batch(vec![length; 32], &device);
        Sequences { tokens: batch.tokens + 0.5 }
    };
    let batches = vec![batch(SHORT), batch(LONG), batch(SHORT)];
    let train = Arc::new(Turning { batches, epochs: 0.into() });
    let training = SupervisedTraining::new(folder, train, Given::loader(Vec::new()))
        .with_file_checkpointer(DurableRecorder::new(DefaultRecorder::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(epochs);
    let log = folder.join("steps.jsonl");
    let _ = std::fs::remove_file(&log);
    let builder = Learner::builder().auto_batch().memory(budget).seed(3).quiet().log_json(&log);
    let (builder, training) = match goes_on {
        GoesOn::Resumes => (builder.resume(folder), training),
        GoesOn::FromCheckpoint => (builder, training.checkpoint(1)),
    };
    let learner = builder.build(model, AdamConfig::new().init(), 1e-2);
    let fitted = learner.fit(training).map_err(|error| error.into_parts().0)?;
    let lines = std::fs::read_to_string(log).expect("it was written");
    let steps = lines.lines().map(|line| serde_json::from_str(line).expect("a step"));
    let micro_batches = steps.map(|step: StepUse| step.micro_batches).collect();
    let weights = weights::<Lazy<Flex>, _>(&fitted.model).concat();
    Ok((weights.iter().map(|value| value.to_bits()).collect(), micro_batches))
}

#[test]
fn batches_are_split_as_before() {
    let _lock = random_state();
    let (width, budget) = (48, Bytes::mib(12));
    let run = |folder: &Path, epochs, goes_on| {
        train(folder, width, budget, epochs, goes_on).expect("it fits")
    };
    let whole = tempfile::tempdir().expect("a folder");
    let (expected, steps) = run(whole.path(), 2, GoesOn::Resumes);
    let second = &steps[3..];
    assert!(second[0] > second[1], "the long one is split otherwise than the short: {steps:?}");

    let folder = tempfile::tempdir().expect("a folder");
    run(folder.path(), 1, GoesOn::Resumes);
    // The second epoch begins with the long batch.
    let (_, anew) = run(folder.path(), 2, GoesOn::FromCheckpoint);
    assert_ne!(anew, second, "planned anew, batches are split otherwise");
    let folder = tempfile::tempdir().expect("a folder");
    run(folder.path(), 1, GoesOn::Resumes);
    let (weights, resumed) = run(folder.path(), 2, GoesOn::Resumes);
    assert_eq!(resumed, second);
    assert_eq!(weights, expected);
}

#[test]
fn a_checkpoint_of_another_model_is_an_error() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), 16, Bytes::mib(64), 1, GoesOn::Resumes).expect("it fits");
    for goes_on in [GoesOn::Resumes, GoesOn::FromCheckpoint] {
        let error =
            train(folder.path(), 24, Bytes::mib(64), 2, goes_on).expect_err("it is another");
        let text = error.to_string();
        assert!(matches!(error, TrainError::OtherModel(_)), "{text}");
        assert!(text.contains("`layers.0.weight` has shape [16, 16] and not [24, 24]"), "{text}");
    }
}
