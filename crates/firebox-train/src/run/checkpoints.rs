//! Checkpoints at the end of training and at its start. When training ends, the last save is on
//! disk or training fails.
//!
//! burn 0.21 writes the model, the optimizer and the scheduler on one thread each while training
//! goes on. The only way to wait for these threads is to drop the checkpointer.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::train::Interrupter;

use crate::device::panics::panic_message;
use crate::error::TrainError;

/// The folder of checkpoints in a training's directory.
pub(crate) const CHECKPOINTS: &str = "checkpoint";

/// The newest epoch with a complete checkpoint.
///
/// [`resume`](crate::LearnerBuilder::resume) goes on after it, and so does burn's
/// [`checkpoint`](burn::train::SupervisedTraining::checkpoint). `None` if there is none.
///
/// `directory` is the training's artifact directory; its checkpoints are in the folder `checkpoint`
/// below it. A checkpoint is complete if the files of model, optimizer and scheduler exist. With a
/// [`DurableRecorder`](crate::DurableRecorder) such files are whole. burn's own recorders may leave
/// truncated files.
///
/// ```no_run
/// # fn go_on<LC: burn::train::LearningComponentsTypes>(
/// #     training: burn::train::SupervisedTraining<LC>
/// # ) {
/// let training = match firebox_train::newest_checkpoint("artifacts") {
///     Some(epoch) => training.checkpoint(epoch),
///     None => training,
/// };
/// # }
/// ```
pub fn newest_checkpoint(directory: impl AsRef<Path>) -> Option<usize> {
    let entries = std::fs::read_dir(directory.as_ref().join(CHECKPOINTS)).ok()?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for name in names {
        let Some((part, rest)) = name.rsplit_once('-') else { continue };
        let epoch = rest.split_once('.').and_then(|(epoch, _)| epoch.parse().ok());
        if let Some(epoch) = epoch {
            found.entry(epoch).or_default().insert(part.to_owned());
        }
    }
    let complete = |parts: &BTreeSet<String>| {
        ["model", "optim", "scheduler"].iter().all(|part| parts.contains(*part))
    };
    found.into_iter().rev().find(|(_, parts)| complete(parts)).map(|(epoch, _)| epoch)
}

/// Waits until the last checkpoint is on disk or its save has failed.
///
/// A checkpointer whose thread is gone panics when it is dropped, and a second such panic ends the
/// process. If threads may be `lost`, checkpointers are leaked and not waited for.
pub(crate) fn end_checkpoints<C>(checkpointer: Option<C>, lost: bool) {
    if checkpointer.is_some() && lost {
        log::error!("the last checkpoint may not be on disk: its thread seems to have panicked");
        std::mem::forget(checkpointer);
    }
}

/// Returns an error if a save failed. A failed save stops the interrupter with the checkpointer's
/// error as its message; a stop by the user has another message. burn leaves no other trace of a
/// failed save.
pub(crate) fn checkpoint_written(interrupter: &Interrupter) -> Result<(), TrainError> {
    const CHECKPOINTER: [&str; 3] = ["I/O Error: `", "Recorder error: `", "Unknown error: `"];
    match interrupter.get_message() {
        Some(message) if CHECKPOINTER.iter().any(|prefix| message.starts_with(prefix)) => {
            Err(TrainError::Checkpoint { message })
        }
        _ => Ok(()),
    }
}

/// Turns burn's panic about an unreadable checkpoint into an error. burn reads the checkpoint
/// before it calls the strategy.
pub(crate) fn unreadable_checkpoint(panic: &(dyn Any + Send)) -> Option<TrainError> {
    const EXPECTED: [&str; 3] = [
        "Can load model checkpoint.: ",
        "Can load optimizer checkpoint.: ",
        "Can load learning rate scheduler checkpoint.: ",
    ];
    let message = panic_message(panic);
    let cause = EXPECTED.iter().find_map(|prefix| message.strip_prefix(prefix))?;
    Some(TrainError::Resume { message: cause.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::newest_checkpoint;

    #[test]
    fn the_newest_checkpoint_has_all_its_files() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(newest_checkpoint(folder.path()), None);
        let checkpoints = folder.path().join("checkpoint");
        std::fs::create_dir(&checkpoints).expect("a folder");
        let add = |name: &str| std::fs::write(checkpoints.join(name), "").expect("a file");
        for name in ["model-9.mpk", "optim-9.mpk", "scheduler-9-unfinished.mpk", "model-x.mpk"] {
            add(name);
        }
        assert_eq!(newest_checkpoint(folder.path()), None);
        for name in ["model-8.mpk", "optim-8.mpk", "scheduler-8.mpk", "scheduler-10.mpk"] {
            add(name);
        }
        assert_eq!(newest_checkpoint(folder.path()), Some(8));
        add("scheduler-9.mpk");
        assert_eq!(newest_checkpoint(folder.path()), Some(9));
    }
}
