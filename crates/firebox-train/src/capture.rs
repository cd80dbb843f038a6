//! The record of an optimizer that burn's Learner keeps to itself.
//!
//! burn gives an optimizer's state away in one place: to a checkpointer. So a checkpoint is taken, into memory.

use std::sync::{Arc, Mutex};

use burn::record::Record;
use burn::tensor::backend::Backend;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerOptimizerRecord, LearningCheckpointer, LearningComponentsTypes};

/// The record of the learner's optimizer.
pub(crate) fn optimizer_record<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    store: &EventStoreClient,
) -> Option<LearnerOptimizerRecord<LC>> {
    let slot = Arc::new(Mutex::new(None));
    let mut checkpointer = LearningCheckpointer::<LC>::new(
        AsyncCheckpointer::new(Discard),
        AsyncCheckpointer::new(Keep(slot.clone())),
        AsyncCheckpointer::new(Discard),
        Box::new(SaveAlways),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Waits for the threads of the checkpointers.
    drop(checkpointer);
    slot.lock().ok()?.take()
}

struct SaveAlways;

impl CheckpointingStrategy for SaveAlways {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

struct Keep<R>(Arc<Mutex<Option<R>>>);

impl<R: Record<B> + Send, B: Backend> Checkpointer<R, B> for Keep<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(record);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize, _device: &B::Device) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is restored from memory".to_owned()))
    }
}

struct Discard;

impl<R: Record<B>, B: Backend> Checkpointer<R, B> for Discard {
    fn save(&self, _epoch: usize, _record: R) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize, _device: &B::Device) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is restored from memory".to_owned()))
    }
}
