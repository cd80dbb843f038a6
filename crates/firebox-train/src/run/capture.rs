//! Gets the optimizer's and the scheduler's records, which burn's Learner does not expose. The
//! strategy uses them to resume a run and to hand back its last state.
//!
//! burn passes their state out in only one place: to a checkpointer. A checkpoint is therefore
//! taken, into memory.

use std::sync::{Arc, Mutex};

use burn::record::Record;
use burn::tensor::backend::Backend;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    Learner, LearnerOptimizerRecord, LearnerSchedulerRecord, LearningCheckpointer,
    LearningComponentsTypes,
};

/// The state that a learner does not expose. `None` for a record that could not be had.
pub(crate) struct Records<LC: LearningComponentsTypes> {
    pub(crate) optimizer: Option<LearnerOptimizerRecord<LC>>,
    pub(crate) scheduler: Option<LearnerSchedulerRecord<LC>>,
}

/// Reads the records of the learner's optimizer and scheduler.
pub(crate) fn records<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    store: &EventStoreClient,
) -> Records<LC> {
    let (optimizer, scheduler) = (Slot::default(), Slot::default());
    let mut checkpointer = LearningCheckpointer::<LC>::new(
        AsyncCheckpointer::new(Discard),
        AsyncCheckpointer::new(Keep(optimizer.clone())),
        AsyncCheckpointer::new(Keep(scheduler.clone())),
        Box::new(SaveAlways),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Waits for the threads of the checkpointers.
    drop(checkpointer);
    Records { optimizer: optimizer.take(), scheduler: scheduler.take() }
}

/// The place where a record is put.
struct Slot<R>(Arc<Mutex<Option<R>>>);

impl<R> Slot<R> {
    fn set(&self, record: R) {
        *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(record);
    }

    fn take(&self) -> Option<R> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }
}

impl<R> Clone for Slot<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R> Default for Slot<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

struct SaveAlways;

impl CheckpointingStrategy for SaveAlways {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

struct Keep<R>(Slot<R>);

impl<R: Record<B> + Send, B: Backend> Checkpointer<R, B> for Keep<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        self.0.set(record);
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
