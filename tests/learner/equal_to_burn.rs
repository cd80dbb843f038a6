//! With room for the whole batch, training equals burn's own, bit for bit: weights, metrics and
//! checkpoint contents.

use std::collections::BTreeMap;
use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::AdamConfig;
use burn::record::{
    FullPrecisionSettings, NamedMpkBytesRecorder, PrettyJsonFileRecorder, Recorder,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    EarlyStoppingStrategy, LearningComponentsMarker, MetricEarlyStoppingStrategy,
    StoppingCondition, SupervisedTraining,
};
use firebox::{Bytes, Lazy, Learner};
use firebox_testing::task::{Content, Net, files, loader, points, random_state, weights};

type Plain = Autodiff<Flex>;
type Decorated = Autodiff<Lazy<Flex>>;
type Adam<B> = burn::optim::adaptor::OptimizerAdaptor<burn::optim::Adam, Net<B>, B>;

#[derive(Clone, Copy)]
struct Case {
    coupled: bool,
    dropout: bool,
    early_stopping: bool,
    resume_from: Option<usize>,
    /// Whether one point of the training data is not a number.
    nan: bool,
    epochs: usize,
}

/// Results of a run: weights, and the files that it wrote, including checkpoints of the optimizer.
type Left = (Vec<Vec<u32>>, BTreeMap<String, Content>);

type Precision = FullPrecisionSettings;

/// The start of both runs: weights, and the ids that an optimizer's record uses for them.
fn start(case: Case) -> Vec<u8> {
    let device = Default::default();
    Flex::seed(&device, 11);
    let record = new::<Plain>(case).into_record();
    Recorder::<Plain>::record(&NamedMpkBytesRecorder::<Precision>::new(), record, ())
        .expect("bytes hold a record")
}

fn new<B: Backend>(case: Case) -> Net<B> {
    let device = Default::default();
    if case.coupled { Net::coupled(&device, case.dropout) } else { Net::new(&device) }
}

fn model<B: AutodiffBackend>(case: Case, start: &[u8]) -> Net<B> {
    let device = Default::default();
    let record =
        Recorder::<B>::load(&NamedMpkBytesRecorder::<Precision>::new(), start.to_vec(), &device);
    let model = new(case).load_record(record.expect("the record was just made"));
    B::seed(&device, 12);
    model
}

fn training<B: AutodiffBackend>(
    folder: &Path,
    case: Case,
) -> SupervisedTraining<LearningComponentsMarker<B, f64, Net<B>, Adam<B>>> {
    let mut items = points(70);
    if case.nan {
        items[20].0[0] = f32::NAN;
    }
    let train = loader::<B>(items, 16, Some(5));
    let valid = loader::<B::InnerBackend>(points(20), 16, None);
    let mut training = SupervisedTraining::new(folder, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .with_file_checkpointer(PrettyJsonFileRecorder::<Precision>::new())
        // Not burn's default, which asks the metrics for the best epoch while they may still work
        // on the last.
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .num_epochs(case.epochs);
    if case.early_stopping {
        training = training.early_stopping(Patient(MetricEarlyStoppingStrategy::new(
            &LossMetric::<B>::new(),
            Aggregate::Mean,
            Direction::Highest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 1 },
        )));
    }
    match case.resume_from {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    }
}

/// An early stopping strategy that waits before it asks for the epoch's metric.
///
/// burn asks while its metrics thread may still be working on that epoch. Whether it stops is then
/// a matter of chance, with and without firebox.
#[derive(Clone)]
struct Patient(MetricEarlyStoppingStrategy);

impl EarlyStoppingStrategy for Patient {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        std::thread::sleep(std::time::Duration::from_millis(300));
        self.0.should_stop(epoch, store)
    }
}

/// Bits of all weights, including values that are not numbers.
fn bits<B: Backend>(model: &Net<B>) -> Vec<Vec<u32>> {
    weights(model).iter().map(|tensor| tensor.iter().map(|v| v.to_bits()).collect()).collect()
}

fn by_burn(folder: &Path, case: Case, start: &[u8]) -> Left {
    let learner =
        burn::train::Learner::new(model::<Plain>(case, start), AdamConfig::new().init(), 1e-2);
    let result = training::<Plain>(folder, case).launch(learner);
    (bits(&result.model), files(folder))
}

fn by_firebox(folder: &Path, case: Case, start: &[u8]) -> Left {
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model::<Decorated>(case, start), AdamConfig::new().init(), 1e-2)
        .fit(training::<Decorated>(folder, case))
        .expect("it fits");
    let report = fitted.report.expect("batches were planned");
    assert!(report.plan.is_whole(), "{}", report.plan);
    (bits(&fitted.model), files(folder))
}

#[track_caller]
fn check(case: Case) {
    let _lock = random_state();
    let (burn, firebox) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = start(case);
    let expected = by_burn(burn.path(), case, &start);
    let found = by_firebox(firebox.path(), case, &start);
    compare(&expected, &found);
    let Some(epoch) = case.resume_from.is_none().then_some(case.epochs - 1) else { return };
    if case.early_stopping || case.dropout {
        return;
    }
    let more = Case { resume_from: Some(epoch), epochs: case.epochs + 1, ..case };
    compare(&by_burn(burn.path(), more, &start), &by_firebox(firebox.path(), more, &start));
}

#[track_caller]
fn compare(expected: &Left, found: &Left) {
    assert!(expected.0 == found.0, "weights differ");
    let names = |left: &Left| left.1.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(expected), names(found), "names of the files");
    for (name, content) in &expected.1 {
        assert!(*content == found.1[name], "{name} differs");
    }
    let known = expected.1.iter().filter(|(_, content)| **content != Content::Unknown);
    let known: Vec<&str> = known.map(|(name, _)| name.as_str()).collect();
    for wanted in ["Loss.log", "Accuracy.log", "/model-", "/optim-", "/scheduler-"] {
        assert!(known.iter().any(|name| name.contains(wanted)), "no {wanted} in {known:?}");
    }
    let moments = expected.1.iter().find(|(name, _)| name.contains("/optim-"));
    assert!(moments.is_some_and(|(_, content)| content.mentions("moment_2")), "Adam has moments");
}

const CASE: Case = Case {
    coupled: true,
    dropout: true,
    early_stopping: false,
    resume_from: None,
    nan: false,
    epochs: 3,
};

#[test]
fn three_epochs_with_batch_normalization_and_dropout() {
    check(CASE);
}

#[test]
fn early_stopping() {
    check(Case { early_stopping: true, ..CASE });
}

#[test]
fn resuming_from_a_checkpoint() {
    check(Case { dropout: false, ..CASE });
}

#[test]
fn a_loss_that_is_not_a_number() {
    let _lock = random_state();
    let (burn, firebox) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let good = Case { dropout: false, epochs: 1, ..CASE };
    let start = start(good);
    by_burn(burn.path(), good, &start);
    let (_, before) = by_firebox(firebox.path(), good, &start);
    let bad = Case { nan: true, resume_from: Some(1), epochs: 2, ..good };
    let expected = by_burn(burn.path(), bad, &start);
    let found = by_firebox(firebox.path(), bad, &start);
    compare(&expected, &found);
    let is_nan = |bits: &u32| f32::from_bits(*bits).is_nan();
    assert!(found.0.iter().flatten().any(is_nan), "burn goes on, and so do weights");
    for (name, content) in before.iter().filter(|(name, _)| name.starts_with("checkpoint/")) {
        assert!(found.1[name] == *content, "{name} of the epoch before is as it was");
    }
}
