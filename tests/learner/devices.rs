//! Tests devices that a Learner cannot train on: two at the same time, and one that does not exist.
//!
//! The CPU backends have one device each. The backend of `places.rs` has two.

use std::collections::BTreeMap;

use burn::backend::Autodiff;
use burn::optim::AdamConfig;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use burn_router::BackendRouter;
use firebox::{Bytes, Lazy, Learner, TrainError};
use firebox_testing::task::{Given, Net, batch, files, random_state};

use crate::places::{Place, Places};

type B = Autodiff<Lazy<BackendRouter<Places>>>;

/// Trains a model for an epoch. On failure returns the cause, and whether there is a state to
/// resume from.
fn train(model: Net<B>) -> Result<(), (TrainError, bool)> {
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        Given::loader(vec![batch::<B>(4)]),
        Given::loader(vec![batch(4)]),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(1);
    let result = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training);
    assert_eq!(files(folder.path()), BTreeMap::new(), "nothing was written");
    result.map(drop).map_err(|error| {
        let (cause, state) = error.into_parts();
        (cause, state.is_some())
    })
}

#[test]
fn a_model_on_two_devices_is_refused() {
    let _lock = random_state();
    let (cause, begun) = train(Net::across(&Place(0), &Place(1))).expect_err("one at a time");
    assert!(matches!(cause, TrainError::SeveralDevices(2)), "{cause}");
    assert!(!begun, "training had not begun");
    train(Net::new(&Place(0))).expect("either of them is fine");
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let _lock = random_state();
    // burn creates parameters when they are first used, so the backend looks for the device only
    // then.
    let model = Net::<B>::new(&Place(7));
    let (error, _) = train(model).expect_err("there are two");
    let TrainError::NotReady { message } = &error else { panic!("{error}") };
    assert_eq!(message, "there is no place 7");
    train(Net::new(&Place(0))).expect("nothing else was broken");
}
