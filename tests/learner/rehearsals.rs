//! A step can tell whether something is learned from it.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{ClassificationOutput, SupervisedTraining, TrainOutput, TrainStep};
use firebox::{Bytes, Lazy, Learner, is_rehearsal};

use crate::attempts::validates_as_its_net;
use crate::task::{Given, Net, Points, batch, random_state};

type B = Autodiff<Lazy<Flex>>;

/// Steps, and those that something is learned from.
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
