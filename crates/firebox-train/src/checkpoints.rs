//! How training ends for burn's checkpointer: the last save is on disk, or it is an error.
//!
//! A thread for each of model, optimizer and scheduler writes while training goes on, and burn 0.21 has nothing to wait
//! with but the checkpointer's end.

use std::any::Any;

use burn::train::Interrupter;

use crate::error::{TrainError, panic_message};

/// Waits until the last checkpoint is on disk, or could not be written.
///
/// A checkpointer whose thread is gone panics when it is dropped, and a second one then ends the process. Where threads
/// may be `lost`, checkpointers are left as they are and not waited for.
pub(crate) fn end_checkpoints<C>(checkpointer: Option<C>, lost: bool) {
    if checkpointer.is_some() && lost {
        log::error!("the last checkpoint may not be on disk: its thread seems to have panicked");
        std::mem::forget(checkpointer);
    }
}

/// A failed save trips the interrupter with the checkpointer's error as its message; a user's stop says anything
/// else. burn leaves no other trace of it.
pub(crate) fn checkpoint_written(interrupter: &Interrupter) -> Result<(), TrainError> {
    const CHECKPOINTER: [&str; 3] = ["I/O Error: `", "Recorder error: `", "Unknown error: `"];
    match interrupter.get_message() {
        Some(message) if CHECKPOINTER.iter().any(|prefix| message.starts_with(prefix)) => {
            Err(TrainError::Checkpoint { message })
        }
        _ => Ok(()),
    }
}

/// What burn panics with where the checkpoint to go on from cannot be read, as an error. burn does so before it asks the strategy.
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
