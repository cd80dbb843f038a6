//! What is sent to burn's metrics thread, and how much that thread may hold.

use burn::data::dataloader::Progress;
use burn::optim::LearningRate;
use burn::train::{EventProcessorTraining, LearnerEvent, TrainingItem};

/// Of how many earlier micro-steps the metrics thread may hold the outputs while a micro-step runs.
pub(crate) const OUTPUTS_HELD: usize = 1;

/// Where in a run an output is from.
pub(super) struct Place {
    pub(super) loader: Progress,
    pub(super) epoch: Progress,
    /// The loader batch of the epoch, from 1 on.
    pub(super) iteration: usize,
    pub(super) lr: Option<LearningRate>,
}

impl Place {
    pub(super) fn item<T>(&self, output: T) -> TrainingItem<T> {
        let (progress, epoch) = (self.loader.clone(), self.epoch.clone());
        TrainingItem::new(output, progress, epoch, Some(self.iteration), self.lr)
    }
}

pub(super) fn send_trained<T, V>(
    processor: &mut impl EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    item: TrainingItem<T>,
) {
    processor.process_train(LearnerEvent::ProcessedItem(item));
    catch_up(processor);
}

pub(super) fn send_validated<T, V>(
    processor: &mut impl EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    item: TrainingItem<V>,
) {
    processor.process_valid(LearnerEvent::ProcessedItem(item));
    catch_up(processor);
}

/// Ends the training of an epoch. The metrics thread is done with its outputs then, so that validation begins without them.
pub(super) fn end_trained<T, V>(
    processor: &mut impl EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    epoch: usize,
) {
    processor.process_train(LearnerEvent::EndEpoch(epoch));
    catch_up(processor);
}

/// Ends the validation of an epoch, in the same way.
pub(super) fn end_validated<T, V>(
    processor: &mut impl EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    epoch: usize,
) {
    processor.process_valid(LearnerEvent::EndEpoch(epoch));
    catch_up(processor);
}

/// Waits until the metrics thread has taken what was sent last, and so is done with all before it: how far behind it is
/// would otherwise be a race, and outputs may be large.
///
/// burn's channel to that thread has room for one event, and the start of validation is one with which it does nothing.
pub(super) fn catch_up<T, V>(
    processor: &mut impl EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
) {
    processor.process_valid(LearnerEvent::Start);
}
