//! With room for the whole batch, training is burn's own, bit for bit.

use std::collections::BTreeMap;
use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::optim::AdamConfig;
use burn::record::DefaultRecorder;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    EarlyStoppingStrategy, LearningComponentsMarker, MetricEarlyStoppingStrategy,
    StoppingCondition, SupervisedTraining,
};
use firebox::{Bytes, Lazy, Learner};

use crate::task::{Net, files, loader, points, random_state, weights};

type Plain = Autodiff<Flex>;
type Decorated = Autodiff<Lazy<Flex>>;
type Adam<B> = burn::optim::adaptor::OptimizerAdaptor<burn::optim::Adam, Net<B>, B>;

#[derive(Clone, Copy)]
struct Case {
    coupled: bool,
    dropout: bool,
    early_stopping: bool,
    resume_from: Option<usize>,
    epochs: usize,
}

/// What a run leaves: weights, and the files that it wrote.
type Left = (Vec<Vec<f32>>, BTreeMap<String, Option<String>>);

fn model<B: AutodiffBackend>(case: Case) -> Net<B> {
    let device = Default::default();
    B::seed(&device, 11);
    let model = if case.coupled { Net::coupled(&device, case.dropout) } else { Net::new(&device) };
    firebox_initialize(&model);
    B::seed(&device, 12);
    model
}

/// Uses every parameter once, so that both runs start from the same weights.
fn firebox_initialize<B: Backend>(model: &Net<B>) {
    weights(model);
}

fn training<B: AutodiffBackend>(
    folder: &Path,
    case: Case,
) -> SupervisedTraining<LearningComponentsMarker<B, f64, Net<B>, Adam<B>>> {
    let train = loader::<B>(points(70), 16, Some(5));
    let valid = loader::<B::InnerBackend>(points(20), 16, None);
    let mut training = SupervisedTraining::new(folder, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .with_file_checkpointer(DefaultRecorder::new())
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

/// burn asks for the metric of the epoch while its metrics thread may still be at work on it; whether it stops is then
/// a matter of chance, with and without firebox. This strategy waits before it asks.
#[derive(Clone)]
struct Patient(MetricEarlyStoppingStrategy);

impl EarlyStoppingStrategy for Patient {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        std::thread::sleep(std::time::Duration::from_millis(300));
        self.0.should_stop(epoch, store)
    }
}

fn by_burn(folder: &Path, case: Case) -> Left {
    let learner = burn::train::Learner::new(model::<Plain>(case), AdamConfig::new().init(), 1e-2);
    let result = training::<Plain>(folder, case).launch(learner);
    (weights(&result.model), files(folder))
}

fn by_firebox(folder: &Path, case: Case) -> Left {
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model::<Decorated>(case), AdamConfig::new().init(), 1e-2)
        .fit(training::<Decorated>(folder, case))
        .expect("it fits");
    let report = fitted.report.expect("batches were planned");
    assert!(report.plan.is_whole(), "{}", report.plan);
    (weights(&fitted.model), files(folder))
}

#[track_caller]
fn check(case: Case) {
    let _lock = random_state();
    let (burn, firebox) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let expected = by_burn(burn.path(), case);
    let found = by_firebox(firebox.path(), case);
    assert!(expected.0 == found.0, "weights differ");
    let logs = expected.1.values().flatten().count();
    assert!(logs >= 4, "metrics were logged: {:?}", expected.1.keys());
    assert_eq!(expected.1, found.1, "files and logged metrics");
    let Some(epoch) = case.resume_from.is_none().then_some(case.epochs - 1) else { return };
    if case.early_stopping || case.dropout {
        return;
    }
    let more = Case { resume_from: Some(epoch), epochs: case.epochs + 1, ..case };
    assert!(by_burn(burn.path(), more).0 == by_firebox(firebox.path(), more).0, "after resuming");
}

const CASE: Case =
    Case { coupled: true, dropout: true, early_stopping: false, resume_from: None, epochs: 3 };

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
