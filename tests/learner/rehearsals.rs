//! Tests that a step can tell whether the model learns from it.

use std::panic::catch_unwind;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::ElementConversion;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{ClassificationOutput, SupervisedTraining, TrainOutput, TrainStep};
use firebox::{Bytes, Lazy, Learner, is_rehearsal};
use firebox_testing::task::{Given, Net, Points, batch, random_state};

use crate::attempts::{self, validates_as_its_net};

type B = Autodiff<Lazy<Flex>>;

/// Number of steps, and of those that the model learns from.
static STEPS: AtomicUsize = AtomicUsize::new(0);
static LEARNED: AtomicUsize = AtomicUsize::new(0);

#[derive(Module, Debug)]
struct Counting<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Counting<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        STEPS.fetch_add(1, Ordering::Relaxed);
        if !is_rehearsal() {
            LEARNED.fetch_add(1, Ordering::Relaxed);
        }
        TrainStep::step(&self.net, batch)
    }
}

validates_as_its_net!(Counting);

#[test]
fn a_step_knows_whether_something_is_learned_from_it() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let valid = Given::loader(vec![batch::<Lazy<Flex>>(6)]);
    let training = SupervisedTraining::new(folder.path(), Given::loader(vec![batch(10)]), valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(2);
    let learner = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(4).quiet();
    let model = Counting { net: Net::<B>::new(&Default::default()) };
    learner.build(model, SgdConfig::new().init(), 1e-2).fit(training).expect("it fits");
    assert_eq!(LEARNED.load(Ordering::Relaxed), 6, "4 + 4 + 2 in two epochs");
    assert!(STEPS.load(Ordering::Relaxed) > 6, "they are planned and compared first");
    assert!(!is_rehearsal());
}

/// A model that checks its loss during training, as some of burn's losses check their targets.
#[derive(Module, Debug)]
struct Checking<B: Backend> {
    net: Net<B>,
}

const POSITIVE: &str = "a loss of these points is positive";

impl<B: AutodiffBackend> TrainStep for Checking<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = TrainStep::step(&self.net, batch);
        let loss: f32 = output.item.loss.clone().into_scalar().elem();
        assert!(loss > 0.0, "{POSITIVE}");
        output
    }
}

validates_as_its_net!(Checking);

/// Marks a child process. The test inspects its output, and a process has one panic hook.
const CHILD: &str = "FIREBOX_TEST_CHILD";

#[test]
fn what_a_step_makes_of_a_refused_value_is_not_printed() {
    const OTHER: &str = "another panic";
    if std::env::var_os(CHILD).is_some() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = Checking { net: Net::<B>::new(&Default::default()) };
        let training = attempts::training(folder.path(), &[9, 4]);
        attempts::fit(model, training).expect("the loss is positive");
        catch_unwind(|| panic!("{OTHER}")).expect_err("it panics");
        return;
    }
    let name = "rehearsals::what_a_step_makes_of_a_refused_value_is_not_printed";
    let test = std::env::current_exe().expect("a test has a path");
    let mut child = Command::new(test);
    let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output();
    let output = output.expect("a test can be run");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert!(!printed.contains(POSITIVE) && printed.contains(OTHER), "{printed}");
}
