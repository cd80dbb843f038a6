//! Tests when batches of several sizes are planned, on a dry card.

use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamConfig;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use firebox::dry::{Card, Cuda, DryCuda, Lease};
use firebox::train::Phase;
use firebox::{Bytes, Lazy, Learner};
use firebox_testing::task::{Given, Net, PointBatcher, points};

type B = Autodiff<Lazy<DryCuda>>;

/// Sizes for which training was planned, in order, when batches of `sizes` arrive.
fn planned(sizes: &[usize]) -> Vec<usize> {
    let card = Card::named("T4").expect("in the table");
    let lease = Lease::<Cuda>::take(&card.properties()).expect("few cards were asked for");
    let device = lease.device();
    let folder = tempfile::tempdir().expect("a folder");
    let batches = sizes.iter().map(|items| PointBatcher.batch(points(*items), device)).collect();
    let valid = PointBatcher.batch(points(4), device);
    let training =
        SupervisedTraining::new(folder.path(), Given::loader(batches), Given::loader(vec![valid]))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(Net::<B>::new(device), AdamConfig::new().init(), 1e-2)
        .fit(training)
        .expect("a card of this size has room");
    let training = fitted.plans.iter().filter(|plan| plan.phase == Phase::Training);
    training.map(|plan| plan.plan.batch().get()).collect()
}

#[test]
fn a_size_that_comes_twice_in_a_row_is_planned_for_that() {
    assert_eq!(planned(&[8, 8, 6, 8, 6, 8]), [8, 6], "it came alone");
    assert_eq!(planned(&[8, 6, 8, 6, 6, 6, 8, 8]), [8, 6, 6], "then twice in a row");
}
