//! What must not wait for ever, under a time limit.

use std::sync::mpsc;
use std::time::Duration;

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::{Bytes, Lazy, Learner};

use crate::attempts::{B, validates_as_its_net};
use crate::task::{Given, Net, PointBatcher, Points, batch, points, random_state};

/// How long a run may take that takes a second.
const LIMIT: Duration = Duration::from_secs(120);

/// A model whose step learns from points of a loader of its own, too, which has threads.
#[derive(Module, Debug)]
struct Pulling<B: Backend> {
    net: Net<B>,
}

impl<B: AutodiffBackend> TrainStep for Pulling<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let loader = DataLoaderBuilder::<B, _, Points<B>>::new(PointBatcher)
            .batch_size(4)
            .num_workers(2)
            .build(InMemDataset::new(points(40)));
        let more = loader.iter().map(|more| InferenceStep::step(&self.net, more).loss);
        let more = more.reduce(|sum, loss| sum + loss).expect("there are points");
        let item = InferenceStep::step(&self.net, batch);
        TrainOutput::new(self, (item.loss.clone() + more).backward(), item)
    }
}

validates_as_its_net!(Pulling);

#[test]
fn a_step_that_waits_for_a_loader_of_its_own() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let _lock = random_state();
        let folder = tempfile::tempdir().expect("a folder");
        let train = DataLoaderBuilder::<B, _, _>::new(PointBatcher)
            .batch_size(20)
            .num_workers(2)
            .build(InMemDataset::new(points(60)));
        let valid = Given::loader::<Lazy<Flex>>(vec![batch(6)]);
        let training = SupervisedTraining::new(folder.path(), train, valid)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let model = Pulling { net: Net::new(&Default::default()) };
        let learner = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
        let fitted = learner.build(model, SgdConfig::new().init(), 1e-2).fit(training);
        done.send(fitted.map(|_| ()).map_err(|error| error.to_string())).expect("it is waited for");
    });
    is_done.recv_timeout(LIMIT).expect("it does not hang").expect("it trains");
}
