//! Tests checkpoints that cannot be written, and stops requested by a user. burn reports both in
//! the same way.

use std::fs;
use std::path::Path;

use burn::prelude::*;
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder, Recorder};
use firebox::{DurableRecorder, TrainError};
use firebox_testing::task::{Content, Net, files, random_state, weights};

use crate::attempts::{B, State, Training, fit, training};

type Json = PrettyJsonFileRecorder<FullPrecisionSettings>;

/// A model whose clones share its weights.
fn model() -> Net<B> {
    let model = Net::new(&Default::default());
    firebox::initialize(&model);
    model
}

/// Weights after one epoch.
fn after_an_epoch(model: &Net<B>) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().expect("a folder");
    weights(&fit(model.clone(), training(folder.path(), &[4])).expect("it fits").model)
}

/// Training on one batch per epoch, with a checkpoint after each epoch.
fn checkpointed(folder: &Path, epochs: usize) -> Training<Net<B>> {
    training(folder, &[4]).with_file_checkpointer(Json::new()).num_epochs(epochs)
}

/// Trains where a checkpoint cannot be written, and returns the state that is left.
#[track_caller]
fn failure(model: Net<B>, training: Training<Net<B>>) -> State<Net<B>> {
    let (cause, state) = fit(model, training).expect_err("nothing was saved").into_parts();
    let TrainError::Checkpoint { message } = &cause else { panic!("{cause}") };
    assert!(!message.is_empty());
    state.expect("training had begun")
}

#[test]
fn a_checkpoint_folder_below_a_file_is_no_interrupt() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "in the way").expect("writable");
    let model = model();
    let after = after_an_epoch(&model);
    let state = failure(model, checkpointed(&file.join("artifacts"), 1));
    assert_eq!((state.epoch, state.iteration), (1, 1), "the epoch itself is whole");
    assert_eq!(weights(&state.model), after);
    assert!(state.optimizer.is_some_and(|record| !record.is_empty()));
    assert_eq!(fs::read_to_string(&file).ok().as_deref(), Some("in the way"));
}

#[test]
fn checkpoints_of_earlier_epochs_outlive_one_that_cannot_be_written() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let model = model();
    let after = after_an_epoch(&model);
    let training = checkpointed(folder.path(), 2);
    fs::create_dir(folder.path().join("checkpoint/model-2.json")).expect("a folder in the way");
    let state = failure(model.clone(), training);
    assert_eq!((state.epoch, state.iteration), (2, 1));
    let left = files(folder.path());
    for name in ["model-1", "optim-1", "scheduler-1"] {
        let content = left.get(&format!("checkpoint/{name}.json"));
        assert!(matches!(content, Some(Content::Record(_))), "{name} is whole: {content:?}");
    }
    let record = Recorder::<B>::load(
        &Json::new(),
        folder.path().join("checkpoint/model-1"),
        &Default::default(),
    );
    let restored = model.load_record(record.expect("the first checkpoint is readable"));
    assert_eq!(weights(&restored), after);
}

#[test]
fn an_interrupt_is_no_error() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let training = training(folder.path(), &[4, 4]);
    training.interrupter().stop(Some("enough"));
    assert!(fit(model(), training).is_ok());
}

#[test]
fn a_cut_checkpoint_to_go_on_from_is_an_error_that_names_a_whole_one() {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let recorder = || DurableRecorder::new(Json::new());
    let epochs = |epochs| {
        let training: Training<Net<B>> = training(folder.path(), &[4]);
        training.with_file_checkpointer(recorder()).num_epochs(epochs)
    };
    fit(model(), epochs(2)).expect("there is room");
    fit(model(), epochs(3).checkpoint(2)).expect("it is whole");
    let names = files(folder.path());
    assert!(!names.keys().any(|name| name.contains("unfinished")), "{names:?}");

    let cut = folder.path().join("checkpoint/model-3.json");
    let length = fs::metadata(&cut).expect("the last one").len();
    fs::File::options()
        .write(true)
        .open(&cut)
        .and_then(|file| file.set_len(length / 2))
        .expect("cut");
    let error = fit(model(), epochs(4).checkpoint(3)).expect_err("it is cut");
    let (cause, _) = error.into_parts();
    let TrainError::Resume { message } = &cause else { panic!("{cause}") };
    assert!(message.contains("model-3.json") && message.contains("model-2.json"), "{message}");
}
