//! The learning strategy: burn's single-device loop, with every batch run in the micro-batches of
//! its plan. A batch that is run whole is trained on as burn does.

use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::Progress;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use firebox_batch::MicroBatch;
use firebox_plan::Plan;
use firebox_trace::Bytes;

use crate::error::TrainError;
use crate::gradients::WeightedGradients;
use crate::learner::{LearnerBuilder, Outcome, parameter_bytes};
use crate::outputs::joined;
use crate::planner::Planner;
use crate::split_check::{SplitCheck, check};

/// The strategy that [`Learner::fit`](crate::Learner::fit) hands to burn.
pub(crate) struct AutoBatch {
    pub(crate) settings: LearnerBuilder,
    pub(crate) outcome: Arc<Mutex<Outcome>>,
}

impl<M> SupervisedLearningStrategy<M> for AutoBatch
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
    <M as InferenceStep>::Input: MicroBatch,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let device = learner.model().devices().first().cloned().unwrap_or_default();
        let (train, valid) = (train.to_device(&device), valid.to_device(&device.clone().inner()));
        learner.fork(&device);
        let planner = self.settings.planner(&device, parameter_bytes(&learner.model()));
        let planner = planner.map_err(|error| self.outcome().failure = Some(error)).ok();
        let Some(planner) = planner else { return (learner.model(), components.event_processor) };
        let TrainingComponents { interrupter, event_store, num_epochs, .. } = components;
        let mut run = Run {
            strategy: self,
            learner,
            planner,
            device,
            processor: components.event_processor,
            interrupter,
            accumulation: components.grad_accumulation.unwrap_or(1).max(1),
            split_check: SplitCheck::NotNeeded,
        };
        let mut checkpointer = components.checkpointer;
        let mut early_stopping = components.early_stopping;
        for epoch in starting_epoch..=num_epochs {
            if let Err(error) = run.epoch(&train, &valid, epoch) {
                self.outcome().failure = Some(error);
                break;
            }
            if checkpointer.is_some() || early_stopping.is_some() {
                run.interrupter.fail_on_error(run.processor.flush());
            }
            if run.interrupter.should_stop() {
                break;
            }
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(&run.learner, epoch, &event_store);
            }
            if early_stopping.as_mut().is_some_and(|early| early.should_stop(epoch, &event_store)) {
                break;
            }
        }
        let mut outcome = self.outcome();
        (outcome.predicted, outcome.measured) = (run.planner.predicted, run.planner.peak);
        outcome.split_check = run.split_check;
        (run.learner.model(), run.processor)
    }
}

impl AutoBatch {
    fn outcome(&self) -> std::sync::MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A training run in progress.
struct Run<'a, M: LearnerModel> {
    strategy: &'a AutoBatch,
    learner: Learner<M>,
    planner: Planner,
    device: Device,
    processor: SupervisedTrainingEventProcessor<M>,
    interrupter: Interrupter,
    /// How many loader batches one optimizer step takes.
    accumulation: usize,
    split_check: SplitCheck,
}

/// The batches of an optimizer step so far.
struct Group {
    gradients: WeightedGradients,
    batches: usize,
}

impl<M> Run<'_, M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
    <M as InferenceStep>::Input: MicroBatch,
{
    /// Trains and validates for one epoch, with burn's events.
    fn epoch(
        &mut self,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        epoch: usize,
    ) -> Result<(), TrainError> {
        if let Some(seed) = self.strategy.settings.seed {
            self.device.seed(seed.wrapping_add(epoch as u64));
        }
        let split = |loader_items| LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: loader_items,
        };
        let started = self.processor.process_train(split(train.num_items()));
        self.interrupter.fail_on_error(started);
        self.train(train)?;
        let ended = self.processor.process_train(LearnerEvent::EndSplit(epoch));
        self.interrupter.fail_on_error(ended);
        if self.interrupter.should_stop() {
            return Ok(());
        }
        let split =
            LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid.num_items() };
        let started = self.processor.process_valid(split);
        self.interrupter.fail_on_error(started);
        self.validate(valid)?;
        let ended = self.processor.process_valid(LearnerEvent::EndSplit(epoch));
        self.interrupter.fail_on_error(ended);
        let ended = self.processor.process_train(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(ended);
        Ok(())
    }

    fn train(&mut self, loader: &TrainLoader<M>) -> Result<(), TrainError> {
        let reduction = self.strategy.settings.reduction;
        let mut iterator = loader.iter();
        let mut group: Option<Group> = None;
        let mut iteration = 0;
        while let Some(batch) = iterator.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.interrupter.fail(error);
                    break;
                }
            };
            iteration += 1;
            let progress = iterator.progress();
            let items = batch.items()?;
            if items == 0 {
                return Err(TrainError::EmptyBatch);
            }
            let weight = batch.weight();
            // A batch that weighs nothing has no mean.
            let total = if weight > 0.0 { weight } else { items as f64 };
            let current = group.get_or_insert_with(|| Group {
                gradients: WeightedGradients::new(reduction, total),
                batches: 0,
            });
            let plan = self.plan(&batch, items)?;
            current.batches += 1;
            let is_last = current.batches >= self.accumulation || progress.is_completed();
            let (gauge, learner) = (self.planner.gauge(), &mut self.learner);
            let before = gauge.live();
            let (ran, peak) = gauge.peak_of(|| {
                let outputs = run_batch(learner, &batch, &plan, &mut current.gradients)?;
                if is_last {
                    step(learner, &mut current.gradients);
                }
                Ok::<_, TrainError>(outputs)
            });
            let outputs = ran?;
            drop(batch);
            let parts: f64 = outputs.iter().map(|(_, weight)| weight).sum();
            if (parts - weight).abs() > 1e-4 * weight.abs() {
                return Err(TrainError::UnequalWeights { parts, whole: weight });
            }
            self.compare(&plan, before, peak)?;
            let lr = Some(self.learner.lr_current());
            for output in joined(outputs, reduction) {
                let item = TrainingItem::new(output, progress.clone(), Some(iteration), lr.clone());
                let sent = self.processor.process_train(LearnerEvent::ProcessedItem(item));
                self.interrupter.fail_on_error(sent);
            }
            if is_last {
                group = None;
            }
            if self.interrupter.should_stop() {
                break;
            }
        }
        // A loader that does not know its end.
        if let Some(mut group) = group {
            step(&mut self.learner, &mut group.gradients);
        }
        Ok(())
    }

    /// The plan for a batch. Before the first split, gradients are compared.
    fn plan(&mut self, batch: &<M as TrainStep>::Input, items: usize) -> Result<Plan, TrainError> {
        let settings = &self.strategy.settings;
        let (plan, report) = self.planner.plan(&self.learner, batch, items)?;
        if let Some(report) = report {
            settings.say(log::Level::Info, &report.to_string());
            self.strategy.outcome().plans.push(report);
        }
        if !plan.is_whole() && self.split_check == SplitCheck::NotNeeded {
            let found = check(&self.learner, batch, items, settings.reduction);
            self.split_check = match found {
                Err(TrainError::Coupled { parameter, percent }) if settings.accepts_coupling => {
                    let text = format!("the gradient of `{parameter}` changes by {percent:.2} %");
                    settings.say(log::Level::Warn, &text);
                    SplitCheck::Agreed
                }
                found => found?,
            };
            let warning = match self.split_check {
                SplitCheck::Random => {
                    "the step draws random numbers: whether batches may be split was not checked"
                }
                SplitCheck::BatchNorm => {
                    "batch normalization in a split batch normalizes by the micro-batch"
                }
                _ => "",
            };
            if !warning.is_empty() {
                settings.say(log::Level::Warn, warning);
            }
        }
        Ok(plan)
    }

    /// Compares what a step took with its prediction.
    fn compare(&mut self, plan: &Plan, before: Bytes, peak: Bytes) -> Result<(), TrainError> {
        let (predicted, budget) = (self.planner.predicted, self.planner.budget());
        let Some(measured) = self.planner.note(plan, before, peak) else { return Ok(()) };
        let settings = &self.strategy.settings;
        if measured > budget {
            let error = TrainError::OverBudget { measured, predicted, budget };
            if settings.is_strict {
                return Err(error);
            }
            settings.say(log::Level::Warn, &format!("{error}: batches are planned anew"));
        } else {
            log::info!("a step took {measured} where {predicted} were predicted");
        }
        Ok(())
    }

    /// Validates in micro-batches that are no larger than those of training.
    fn validate(&mut self, loader: &ValidLoader<M>) -> Result<(), TrainError> {
        let reduction = self.strategy.settings.reduction;
        let model = self.learner.model().valid();
        let most = self.planner.largest();
        let mut iterator = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = iterator.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.interrupter.fail(error);
                    break;
                }
            };
            iteration += 1;
            let progress: Progress = iterator.progress();
            let items = batch.items()?;
            let size = most.unwrap_or(items).max(1);
            let mut outputs = Vec::new();
            for begin in (0..items).step_by(size) {
                let part = batch.range(begin..items.min(begin + size));
                let weight = part.weight();
                outputs.push((InferenceStep::step(&model, part), weight));
            }
            for output in joined(outputs, reduction) {
                let item = TrainingItem::new(output, progress.clone(), Some(iteration), None);
                let sent = self.processor.process_valid(LearnerEvent::ProcessedItem(item));
                self.interrupter.fail_on_error(sent);
            }
            if self.interrupter.should_stop() {
                break;
            }
        }
        Ok(())
    }
}

/// Steps the optimizer with what was accumulated, if that weighs anything.
fn step<M: LearnerModel>(learner: &mut Learner<M>, gradients: &mut WeightedGradients) {
    if gradients.weight() > 0.0 {
        let model = learner.model();
        let grads = gradients.finish(&model);
        drop(model);
        learner.lr_step();
        learner.optimizer_step(grads);
    }
}

/// Runs a batch in its micro-batches and adds their gradients. Returns their outputs with their
/// weights.
fn run_batch<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    plan: &Plan,
    gradients: &mut WeightedGradients,
) -> Result<Vec<(<M as TrainStep>::Output, f64)>, TrainError>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let model = learner.model();
    let mut outputs = Vec::with_capacity(plan.len());
    for range in plan.ranges() {
        let part = batch.range(range);
        let weight = part.weight();
        let output = learner.train_step(part);
        gradients.add(&model, output.grads, weight);
        outputs.push((output.item, weight));
    }
    Ok(outputs)
}
