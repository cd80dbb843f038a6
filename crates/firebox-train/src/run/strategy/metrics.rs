//! Sends outputs to burn's metrics thread, and limits how much that thread may hold. The training
//! and validation loops send through [`Sender`]: joined where the plan says so, and otherwise as
//! micro-steps make them.

use std::time::Duration;

use burn::data::dataloader::Progress;
use burn::optim::LearningRate;
use burn::train::renderer::TrainingProgress;
use burn::train::{EventProcessorTraining, LearnerEvent, TrainingItem};
use firebox_lazy::{LoaderGuard, TrainingGuard, latest_recording};
use firebox_plan::Plan;

use crate::clock::Clock;
use crate::device::DeviceMemory;
use crate::error::Phase;
use crate::iteration::queue::Queue;
use crate::progress::Screen;
use crate::reduction::LossReduction;
use crate::whole::{Join, joined};

/// How long to wait for the metrics thread before loader threads may exceed their limit. A metric
/// may have a loader of its own.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is done once a batch is.
const WHOLE: (usize, usize) = (1, 1);

/// The position of an output in the run.
pub(super) struct Place {
    /// The items that the loader has yielded, this batch included, as burn counts them.
    pub(super) loader: Progress,
    /// The items that it had yielded before this batch.
    pub(super) before: usize,
    pub(super) epoch: Progress,
    /// The number of the loader batch in the epoch, counted from 1.
    pub(super) iteration: usize,
    pub(super) lr: Option<LearningRate>,
}

impl Place {
    /// The clock of a batch that belongs to an optimizer step of the epoch.
    pub(super) fn clock(&self, step: usize) -> Clock {
        let Self { epoch, iteration, loader, before, .. } = self;
        let all = loader.items_total.max(*before).max(1);
        let epoch = epoch.items_processed;
        let epochs = (epoch - 1) as f64 + *before as f64 / all as f64;
        Clock { epoch, step, batch: *iteration, epochs }
    }

    /// Whether no batch of training comes after this one, as far as the loader tells.
    pub(super) fn is_last(&self) -> bool {
        let is_at_end = |of: &Progress| of.items_processed >= of.items_total;
        is_at_end(&self.loader) && is_at_end(&self.epoch)
    }

    fn item<T>(&self, output: Output<T>) -> TrainingItem<T> {
        let progress = self.progress(output.done);
        TrainingItem::new(output.item, progress, self.epoch.clone(), Some(self.iteration), self.lr)
    }

    fn progress(&self, (done, all): (usize, usize)) -> Progress {
        let Progress { items_processed, items_total } = self.loader;
        // What burn counts need not be what the splitter counts.
        let of_batch = items_processed.saturating_sub(self.before) * done / all;
        Progress { items_processed: self.before + of_batch, items_total }
    }

    /// Shows how far a batch is whose output comes at its end.
    pub(super) fn show(&self, screen: Option<&Screen>, phase: Phase, done: (usize, usize)) {
        if let Some(screen) = screen.filter(|_| done.0 < done.1) {
            let (progress, global_progress) = (Some(self.progress(done)), self.epoch.clone());
            let iteration = Some(self.iteration);
            screen.moves(phase, &TrainingProgress { progress, global_progress, iteration });
        }
    }
}

/// An output, and the recording that made it: the value of `latest_recording` after its micro-step.
pub(super) struct Output<T> {
    item: T,
    recording: u64,
    /// How many items of its batch are done, and how many it has.
    done: (usize, usize),
}

impl<T> Output<T> {
    /// The output of the micro-step that has just run. `done` are the items of its batch that have
    /// run by then, and all of them.
    pub(super) fn of_latest(item: T, done: (usize, usize)) -> Self {
        Self { item, recording: latest_recording(), done }
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
        let recording = output.recording;
        let event = LearnerEvent::ProcessedItem(at.item(output));
        self.gate.waiting_for(PATIENCE, || self.processor.process_train(event));
        self.catch_up(recording);
    }

    pub(super) fn validated<T, V>(&mut self, at: &Place, output: Output<V>)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let recording = output.recording;
        let event = LearnerEvent::ProcessedItem(at.item(output));
        self.gate.waiting_for(PATIENCE, || self.processor.process_valid(event));
        self.catch_up(recording);
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

/// The outputs of a batch that are joined at its end, with their weights.
pub(super) struct Parts<T>(Vec<(Output<T>, f64)>);

impl<T> Parts<T> {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn add(&mut self, output: Output<T>, weight: f64) {
        self.0.push((output, weight));
    }

    /// The outputs that metrics see of the batch: one, or all if they do not go together. That of a
    /// batch that ran whole is as its step made it.
    pub(super) fn end<D: DeviceMemory>(
        self,
        join: &Join<T>,
        reduction: LossReduction,
        queue: &Queue<D>,
    ) -> Vec<Output<T>> {
        let (mut parts, mut recordings) = (Vec::new(), Vec::new());
        for (Output { item, recording, .. }, weight) in self.0 {
            parts.push((item, weight));
            recordings.push(recording);
        }
        let outputs = match parts.len() {
            0 | 1 => joined(join, reduction, parts),
            _ => queue.alone(|| joined(join, reduction, parts)),
        };
        if outputs.len() < recordings.len() {
            return outputs.into_iter().map(|item| Output::of_latest(item, WHOLE)).collect();
        }
        let outputs = outputs.into_iter().zip(recordings);
        outputs.map(|(item, recording)| Output { item, recording, done: WHOLE }).collect()
    }
}

/// The outputs of a batch's micro-steps on their way to the metrics: one by one, the last one held
/// back, or joined.
pub(super) struct Outputs<'a, P, T> {
    sender: Sender<'a, P>,
    at: &'a Place,
    join: Option<&'a Join<T>>,
    screen: Option<&'a Screen>,
    pending: Option<Output<T>>,
    parts: Parts<T>,
    /// How many items of the batch are done after the running micro-step, and how many it has.
    pub(super) done: (usize, usize),
}

impl<'a, P, T> Outputs<'a, P, T> {
    /// Begins a batch. Where it is split, outputs that are joined do not meet those of the batch
    /// before it. The screen shows how far it is meanwhile.
    pub(super) fn of_batch<V>(
        mut sender: Sender<'a, P>,
        at: &'a Place,
        (join, plan): (Option<&'a Join<T>>, &Plan),
        screen: Option<&'a Screen>,
    ) -> Self
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        if join.is_some() && !plan.is_whole() {
            sender.done_with_all();
        }
        Self { sender, at, join, screen, pending: None, parts: Parts::new(), done: WHOLE }
    }

    /// Sends the output that is held back.
    pub(super) fn send<V>(&mut self)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        if let Some(earlier) = self.pending.take() {
            self.sender.trained(self.at, earlier);
        }
    }

    /// Adds the output of the micro-step that has just run.
    pub(super) fn add<V>(&mut self, item: T, weight: f64)
    where
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let output = Output::of_latest(item, self.done);
        if self.join.is_some() {
            self.at.show(self.screen, Phase::Training, self.done);
            self.parts.add(output, weight);
        } else {
            self.send();
            self.pending = Some(output);
        }
    }

    /// Ends the batch. Returns the output that is not sent yet.
    pub(super) fn end<D, V>(
        mut self,
        reduction: LossReduction,
        queue: &Queue<D>,
    ) -> Option<Output<T>>
    where
        D: DeviceMemory,
        P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
    {
        let Some(join) = self.join else { return self.pending };
        let mut outputs = self.parts.end(join, reduction, queue);
        let last = outputs.pop();
        outputs.into_iter().for_each(|output| self.sender.trained(self.at, output));
        last
    }
}
