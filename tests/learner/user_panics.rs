//! Tests panics in what a user supplies in addition to the model.
//!
//! Training must return an error with the panic's own words and the state after the last whole
//! optimizer step. `fit` must not unwind, because that would lose the model.

use std::sync::Arc;

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::lr_scheduler::LrScheduler;
use burn::optim::{Adam, AdamConfig, LearningRate};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};
use burn::train::renderer::{CliMetricsRenderer, TrainingProgress};
use burn::train::{LearningComponentsMarker, SupervisedTraining};
use firebox::{Bytes, Learner, TrainError};
use firebox_testing::bench::renderer::OnOutput;
use firebox_testing::task::{
    Given, Net, Point, PointBatcher, Points, batch, points, random_state, weights,
};

use crate::attempts::B;

const WORDS: &str = "the user's own words";

/// Points, of which only the first `readable` can be read.
struct Broken {
    points: Vec<Point>,
    readable: usize,
}

impl Dataset<Point> for Broken {
    fn get(&self, index: usize) -> Option<Point> {
        assert!(index < self.readable, "{WORDS}");
        self.points.get(index).cloned()
    }

    fn len(&self) -> usize {
        self.points.len()
    }
}

/// Panics on batches of two.
#[derive(Clone)]
struct Picky;

impl<B: Backend> Batcher<B, Point, Points<B>> for Picky {
    fn batch(&self, items: Vec<Point>, device: &B::Device) -> Points<B> {
        assert_ne!(items.len(), 2, "{WORDS}");
        PointBatcher.batch(items, device)
    }
}

/// A metric that measures only the first batches.
#[derive(Clone)]
struct Tired {
    left: usize,
}

impl Metric for Tired {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Tired".to_owned())
    }

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        assert!(self.left > 0, "{WORDS}");
        self.left -= 1;
        SerializedEntry::new("1".to_owned(), "1".to_owned())
    }

    fn clear(&mut self) {}
}

/// A learning rate scheduler that knows only the first steps.
#[derive(Clone)]
struct Short {
    left: usize,
}

impl LrScheduler for Short {
    type Record<B: Backend> = usize;

    fn step(&mut self) -> LearningRate {
        assert!(self.left > 0, "{WORDS}");
        self.left -= 1;
        1e-2
    }

    fn to_record<B: Backend>(&self) -> usize {
        self.left
    }

    fn load_record<B: Backend>(self, left: usize) -> Self {
        Self { left }
    }
}

fn model() -> Net<B> {
    Flex::seed(&Default::default(), 71);
    let model = Net::new(&Default::default());
    firebox::initialize(&model);
    model
}

/// One epoch of ten points in batches of four.
fn on_points<B: AutodiffBackend, S: LrScheduler + 'static>(
    loader: DataLoaderBuilder<B, Point, Points<B>>,
    (readable, workers): (usize, usize),
) -> SupervisedTraining<Components<B, S>> {
    let loader = loader.batch_size(4);
    let loader = if workers == 0 { loader } else { loader.num_workers(workers) };
    let loader = loader.build(Broken { points: points(10), readable });
    let folder = tempfile::tempdir().expect("a folder").keep();
    SupervisedTraining::new(&folder, loader, Given::loader(vec![batch(6)]))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
}

type Components<B, S> = LearningComponentsMarker<B, S, Net<B>, OptimizerAdaptor<Adam, Net<B>, B>>;

/// Epoch, iteration and scheduler of the state that is left.
#[track_caller]
fn failure<S: LrScheduler + 'static>(
    scheduler: S,
    training: SupervisedTraining<Components<B, S>>,
) -> (usize, usize, S::Record<B>) {
    let learner = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    let learner = learner.build(model(), AdamConfig::new().init(), scheduler);
    let (cause, state) = learner.fit(training).expect_err("something panics").into_parts();
    assert!(cause.to_string().contains(WORDS), "{cause}");
    // A scheduler also steps while a batch is planned.
    let is_typed = matches!(cause, TrainError::Panicked { .. } | TrainError::StepPanicked { .. });
    assert!(is_typed, "{cause:?}");
    let state = state.expect("training had begun");
    let trained = weights(&state.model) != weights(&model());
    assert_eq!(trained, state.iteration > 0, "{:?}", (state.epoch, state.iteration));
    assert_eq!(state.optimizer.is_some_and(|record| !record.is_empty()), trained);
    (state.epoch, state.iteration, state.scheduler)
}

#[test]
fn a_data_set_that_panics() {
    let _lock = random_state();
    for workers in [0, 1, 3] {
        let loader = DataLoaderBuilder::new(PointBatcher);
        let (epoch, iteration, left) = failure(Short { left: 9 }, on_points(loader, (9, workers)));
        assert_eq!(left, 9 - iteration, "as it was at the last optimizer step");
        assert!(epoch == 1 && iteration <= 2, "{epoch}, {iteration}");
        assert!(workers > 0 || iteration == 2, "two batches are whole: {iteration}");
    }
}

#[test]
fn a_batcher_that_panics() {
    let _lock = random_state();
    for workers in [0, 2] {
        failure(1e-2, on_points(DataLoaderBuilder::new(Picky), (10, workers)));
    }
}

#[test]
fn a_metric_that_panics() {
    let _lock = random_state();
    let training = on_points(DataLoaderBuilder::new(PointBatcher), (10, 0));
    failure(1e-2, training.metric_train(Tired { left: 1 }));
}

#[test]
fn a_scheduler_that_panics() {
    let _lock = random_state();
    let training = on_points(DataLoaderBuilder::new(PointBatcher), (10, 0));
    let (epoch, iteration, left) = failure(Short { left: 3 }, training);
    assert_eq!(left, 3 - iteration);
    assert!(epoch == 1 && iteration <= 2, "{epoch}, {iteration}");
}

#[test]
fn a_renderer_that_panics() {
    let _lock = random_state();
    let training = on_points(DataLoaderBuilder::new(PointBatcher), (10, 0));
    let mut left = 1;
    let dim = move |_: &TrainingProgress| {
        assert!(left > 0, "{WORDS}");
        left -= 1;
    };
    failure(1e-2, training.renderer(OnOutput(dim)));
}
