//! Sends outputs to burn's metrics thread, and limits how much that thread may hold. The training
//! and validation loops send through [`Sender`].

use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::optim::LearningRate;
use burn::train::{EventProcessorTraining, LearnerEvent, TrainingItem};
use firebox_lazy::{LoaderGuard, TrainingGuard, latest_recording};

/// While a micro-step runs, the metrics thread may hold the outputs of this many earlier
/// micro-steps.
pub(crate) const OUTPUTS_HELD: usize = 1;

/// How long to wait for the metrics thread before loader threads may exceed their limit. A metric
/// may have a loader of its own.
const PATIENCE: Duration = Duration::from_secs(1);

/// The position of an output in the run.
pub(super) struct Place {
    pub(super) loader: Progress,
    pub(super) epoch: Progress,
    /// The number of the loader batch in the epoch, counted from 1.
    pub(super) iteration: usize,
    pub(super) lr: Option<LearningRate>,
}

impl Place {
    fn item<T>(&self, output: T) -> TrainingItem<T> {
        let (progress, epoch) = (self.loader.clone(), self.epoch.clone());
        TrainingItem::new(output, progress, epoch, Some(self.iteration), self.lr)
    }
}

/// An output, and the recording that made it: the value of `latest_recording` after its micro-step.
pub(super) struct Output<T> {
    item: T,
    recording: u64,
}

impl<T> Output<T> {
    /// The output of the micro-step that has just run.
    pub(super) fn of_latest(item: T) -> Self {
        Self { item, recording: latest_recording() }
    }
}

/// Sends outputs to burn's metrics thread.
pub(super) struct Sender<'a, P> {
    pub(super) processor: &'a mut P,
    /// Receives what that thread has used, on fusing devices.
    pub(super) training: Option<&'a TrainingGuard>,
    /// Makes loader threads wait.
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

    /// Ends the training part of an epoch. The metrics thread is then done with its outputs, so
    /// validation begins without any.
    pub(super) fn end_trained<T, V>(&mut self, items: usize)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let event = LearnerEvent::EndEpoch(items);
        self.gate.waiting_for(PATIENCE, || self.processor.process_train(event));
        self.done_with_all();
    }

    /// Ends the validation part of an epoch, in the same way.
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

    /// Waits until the metrics thread has taken the latest event, and is therefore done with all
    /// earlier ones. Without this wait, how far it lags would be a race, and outputs may be large.
    /// Tensors made by recordings before `recording` may end now; later ones end the next time. The
    /// memory of an output is therefore free from a fixed point on, however fast that thread is.
    ///
    /// burn's channel to that thread has room for one event. The event sent here, the start of
    /// validation, has no effect.
    fn catch_up<T, V>(&mut self, recording: u64)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        self.gate.waiting_for(PATIENCE, || self.processor.process_valid(LearnerEvent::Start));
        if let Some(training) = self.training {
            training.done_before(recording);
            // Frees them before the next batch allocates memory.
            training.collect();
        }
    }
}
