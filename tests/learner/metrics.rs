//! Metrics of a run whose batches are split are those of the unsplit run: they see one output for
//! each batch. Where they see one for each micro-batch, burn weighs accuracies by items and losses
//! alike.

use std::error::Error;
use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric, MetricDefinition};
use burn::train::renderer::{
    CliMetricsRenderer, EvaluationName, EvaluationProgress, MetricState, MetricsRenderer,
    MetricsRendererEvaluation, MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{LearnerSummary, SupervisedTraining};
use firebox::train::ByMicroBatch;
use firebox::{Bytes, Lazy, Learner, LearnerBuilder, join};
use firebox_testing::task::{Content, Net, files, loader, points, random_state};

type B = Autodiff<Lazy<Flex>>;

/// Log of one metric for an epoch: the value of every event, with the number of items that burn
/// counts for it.
type Events = Vec<(f64, usize)>;

#[test]
fn what_steps_use_is_logged() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("steps.jsonl");
    let model = Net::<B>::new(&Default::default());
    let valid = loader::<Lazy<Flex>>(points(24), 24, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(36), 12, None), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).micro_batch(5).quiet();
    let learner = builder.log_json(&path).build(model, AdamConfig::new().init(), 1e-2);
    let fitted = learner.fit(training).expect("it fits");
    let text = std::fs::read_to_string(&path).expect("it was written");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let places: Vec<_> = lines
        .iter()
        .map(|line| (line["epoch"].as_u64(), line["iteration"].as_u64(), line["items"].as_u64()))
        .collect();
    let expected = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)];
    assert_eq!(places, expected.map(|(epoch, at)| (Some(epoch), Some(at), Some(12))));
    assert!(lines.iter().all(|line| line["micro_batches"] == 3 && line["lr"] == 1e-2));
    let predicted = fitted.memory.expect("it was trained").predicted;
    assert_eq!(lines[5]["predicted"].as_u64(), Some(predicted.get()));
}

/// Metrics of one epoch, in training or in validation.
struct Logged {
    accuracy: Events,
    loss: Events,
    /// burn's own summary of the epoch: accuracy and loss.
    epoch: [f64; 2],
}

/// The class that counts as padding.
const PADDING: usize = 2;

fn builder() -> LearnerBuilder<ByMicroBatch, ByMicroBatch> {
    Learner::builder().auto_batch()
}

/// Runs one epoch on a batch of 36 items and a validation on one of 24, in micro-batches of at most
/// `items`. Returns the metrics of training and of validation.
fn run_with(
    builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>,
    items: usize,
    accuracy: fn() -> AccuracyMetric<Flex>,
) -> [Logged; 2] {
    let device = Default::default();
    Flex::seed(&device, 41);
    let model = Net::<B>::new(&device);
    let folder = tempfile::tempdir().expect("a folder");
    let valid = loader::<Lazy<Flex>>(points(24), 24, None);
    let training = SupervisedTraining::new(folder.path(), loader::<B>(points(36), 36, None), valid)
        .metrics((accuracy(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    builder
        .memory(Bytes::gib(1))
        .micro_batch(items)
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("it fits");
    let summary =
        LearnerSummary::new(folder.path(), &["Accuracy", "Loss"]).expect("logs are there");
    let files = files(folder.path());
    let logged = |split: &str, summaries: &[burn::train::MetricSummary]| {
        let events = |name: &str| {
            let path = format!("{split}/epoch-1/{name}.log");
            let Content::Log(text) = &files[&path] else { panic!("{path} is no log") };
            text.lines().map(event).collect::<Events>()
        };
        let epoch = ["Accuracy", "Loss"].map(|name| {
            let summary = summaries.iter().find(|summary| summary.name == name);
            summary.expect("the metric is in the summary").entries[0].value
        });
        Logged { accuracy: events("Accuracy"), loss: events("Loss"), epoch }
    };
    [logged("train", &summary.metrics.train), logged("valid", &summary.metrics.valid)]
}

fn event(line: &str) -> (f64, usize) {
    let (value, count) = line.split_once(',').expect("a value and a count");
    (value.parse().expect("a number"), count.parse().expect("a number of items"))
}

/// Number of correct items per event.
fn right(accuracy: &Events) -> Vec<f64> {
    accuracy.iter().map(|(percent, items)| percent * *items as f64 / 100.0).collect()
}

fn sizes(accuracy: &Events) -> Vec<usize> {
    accuracy.iter().map(|(_, items)| *items).collect()
}

#[track_caller]
fn check_near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{found} is not {expected}");
}

#[test]
fn metrics_are_those_of_the_unsplit_run() {
    let _lock = random_state();
    let accuracies: [fn() -> AccuracyMetric<Flex>; 2] =
        [AccuracyMetric::new, || AccuracyMetric::new().with_pad_token(PADDING)];
    for accuracy in accuracies {
        let run = |items| run_with(builder(), items, accuracy);
        let [whole, whole_valid] = run(36);
        assert_eq!((sizes(&whole.accuracy), sizes(&whole_valid.accuracy)), (vec![36], vec![24]));
        let percent = whole.accuracy[0].0;
        assert!(0.0 < percent && percent < 100.0, "{percent} % of the items are right");
        for items in [1, 9, 23, 25] {
            let [split, valid] = run(items);
            // Validation uses the model after the same step.
            for (split, whole) in [(split, &whole), (valid, &whole_valid)] {
                assert_eq!(split.accuracy, whole.accuracy, "one event, of all items");
                assert_eq!((split.loss.len(), split.loss[0].1), (1, 1));
                check_near(split.loss[0].0, whole.loss[0].0);
                assert_eq!(split.epoch[0], whole.epoch[0]);
                check_near(split.epoch[1], whole.epoch[1]);
            }
        }
    }
}

#[test]
fn metrics_see_every_micro_batch_if_told_so() {
    let _lock = random_state();
    let run = |items| run_with(builder().metrics_see_parts(), items, AccuracyMetric::new);
    let [whole, whole_valid] = run(36);
    let correct = right(&whole.accuracy)[0].round();
    let cases: [(usize, &[usize], &[usize]); 3] =
        [(9, &[9; 4], &[9, 9, 6]), (25, &[25, 11], &[24]), (23, &[23, 13], &[23, 1])];
    for (items, expected, expected_valid) in cases {
        let [split, valid] = run(items);
        assert_eq!(sizes(&split.accuracy), expected, "every micro-batch with its own size");
        assert_eq!(sizes(&valid.accuracy), expected_valid);
        let rights = right(&split.accuracy);
        assert_eq!(rights.iter().map(|items| items.round()).sum::<f64>(), correct);
        assert!(rights.iter().all(|items| (items - items.round()).abs() < 1e-9), "{rights:?}");
        check_near(split.epoch[0], whole.epoch[0]);
        check_near(valid.epoch[0], whole_valid.epoch[0]);
    }
    let [split, _] = run(25);
    assert!(split.loss.iter().all(|(_, items)| *items == 1), "burn counts an event as one item");
    let losses: Vec<f64> = split.loss.iter().map(|(loss, _)| *loss).collect();
    check_near(split.epoch[1], losses.iter().sum::<f64>() / 2.0);
    check_near((25.0 * losses[0] + 11.0 * losses[1]) / 36.0, whole.epoch[1]);
}

#[test]
fn what_the_user_joins_is_joined() {
    let _lock = random_state();
    // Only one of the two output types is joined.
    let builder = builder().metrics_see_parts().metrics_see_whole(join::classification::<B>);
    let [split, valid] = run_with(builder, 9, AccuracyMetric::new);
    assert_eq!((sizes(&split.accuracy), sizes(&valid.accuracy)), (vec![36], vec![9, 9, 6]));
}

/// Notes how many epochs the summary of each training has, if there is one.
#[derive(Clone, Default)]
struct Summaries(Arc<Mutex<Vec<Option<usize>>>>);

impl MetricsRendererTraining for Summaries {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        let epochs = summary.map(|summary| summary.epochs);
        self.0.lock().expect("nobody panics with it").push(epochs);
        Ok(())
    }
}

impl MetricsRendererEvaluation for Summaries {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Summaries {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

#[test]
fn a_training_that_failed_has_no_summary_of_an_earlier_one() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let summaries = Summaries::default();
    let run = |memory: Bytes| {
        let valid = loader::<Lazy<Flex>>(points(24), 24, None);
        let train = loader::<B>(points(36), 36, None);
        let training = SupervisedTraining::new(folder.path(), train, valid)
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .renderer(summaries.clone())
            .num_epochs(2)
            .summary();
        let model = Net::<B>::new(&Default::default());
        let builder = builder().memory(memory).quiet();
        let fitted = builder.build(model, AdamConfig::new().init(), 1e-2).fit(training);
        fitted.is_ok()
    };
    assert!(run(Bytes::gib(1)) && !run(Bytes::new(1)));
    let seen = summaries.0.lock().expect("nobody panics with it").clone();
    // How many epochs burn has written by then is a race of its threads.
    assert!(matches!(seen[..], [Some(1 | 2), None]), "{seen:?}");
}
