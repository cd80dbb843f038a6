//! What is sent to burn's metrics thread, and how much that thread may hold.

use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::optim::LearningRate;
use burn::train::{EventProcessorTraining, LearnerEvent, TrainingItem};
use firebox_lazy::{LoaderGuard, TrainingGuard, latest_recording};

/// Of how many earlier micro-steps the metrics thread may hold the outputs while a micro-step runs.
pub(crate) const OUTPUTS_HELD: usize = 1;

/// How long the metrics thread is waited for before loader threads beyond their limit may go on: a metric may have a loader of its own.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where in a run an output is from.
pub(super) struct Place {
    pub(super) loader: Progress,
    pub(super) epoch: Progress,
    /// The loader batch of the epoch, from 1 on.
    pub(super) iteration: usize,
    pub(super) lr: Option<LearningRate>,
}

impl Place {
    fn item<T>(&self, output: T) -> TrainingItem<T> {
        let (progress, epoch) = (self.loader.clone(), self.epoch.clone());
        TrainingItem::new(output, progress, epoch, Some(self.iteration), self.lr)
    }
}

/// An output, and the recording that made it: `latest_recording` behind its micro-step.
pub(super) struct Output<T> {
    item: T,
    recording: u64,
}

impl<T> Output<T> {
    /// That of the micro-step that has just run.
    pub(super) fn of_latest(item: T) -> Self {
        Self { item, recording: latest_recording() }
    }
}

/// What sends outputs to burn's metrics thread.
pub(super) struct Sender<'a, P> {
    pub(super) processor: &'a mut P,
    /// Where that thread leaves what it has used, on devices that fuse.
    pub(super) training: Option<&'a TrainingGuard>,
    /// Holds the threads of loaders back.
    pub(super) gate: &'a LoaderGuard,
}

impl<P> Sender<'_, P> {
    pub(super) fn trained<T, V>(&mut self, at: &Place, output: Output<T>)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let event = LearnerEvent::ProcessedItem(at.item(output.item));
        self.gate.waiting_for(PATIENCE, || self.processor.process_train(event));
        self.catch_up(output.recording);
    }

    pub(super) fn validated<T, V>(&mut self, at: &Place, output: Output<V>)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let event = LearnerEvent::ProcessedItem(at.item(output.item));
        self.gate.waiting_for(PATIENCE, || self.processor.process_valid(event));
        self.catch_up(output.recording);
    }

    /// Ends the training of an epoch. The metrics thread is done with its outputs then, so that validation begins without them.
    pub(super) fn end_trained<T, V>(&mut self, items: usize)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let event = LearnerEvent::EndEpoch(items);
        self.gate.waiting_for(PATIENCE, || self.processor.process_train(event));
        self.done_with_all();
    }

    /// Ends the validation of an epoch, in the same way.
    pub(super) fn end_validated<T, V>(&mut self, items: usize)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let event = LearnerEvent::EndEpoch(items);
        self.gate.waiting_for(PATIENCE, || self.processor.process_valid(event));
        self.done_with_all();
    }

    /// Waits until the metrics thread is done with all outputs.
    pub(super) fn done_with_all<T, V>(&mut self)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        self.catch_up(latest_recording() + 1);
    }

    /// Waits until the metrics thread has taken what was sent last, and so is done with all before it: how far behind it is
    /// would otherwise be a race, and outputs may be large. What recordings before this one have made may end then, and what is later
    /// ends at the next time: so the memory of an output is free from a certain point on, however fast that thread is.
    ///
    /// burn's channel to that thread has room for one event, and the start of validation is one with which it does nothing.
    fn catch_up<T, V>(&mut self, recording: u64)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        self.gate.waiting_for(PATIENCE, || self.processor.process_valid(LearnerEvent::Start));
        if let Some(training) = self.training {
            training.done_before(recording);
            // Before the next batch takes a place.
            training.collect();
        }
    }
}
