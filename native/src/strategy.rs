//! The learning strategy: burn's single-device loop, with every batch run in the micro-batches of
//! its plan. A batch that is run whole is trained on as burn does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::Progress;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, ExecutionError, GradientCheckpointingStrategy};
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use firebox_batch::{MicroBatch, item_shapes};
use firebox_plan::{Plan, StepLog, StepUse};

use crate::error::{Checkpointing, TrainError, panicked};
use crate::gradients::{LossReduction, WeightedGradients, are_computed};
use crate::learner::{LearnerBuilder, Outcome, parameter_bytes};
use crate::outputs::joined;
use crate::planner::{Planner, Shapes};
use crate::rehearsal::{OfLearner, Statistics, with_checkpointing};
use crate::split_check::{SplitCheck, check, check_whole};

/// In how many batches of a loader one like another is looked for.
const TRIED: usize = 64;

/// The strategy that [`Learner::fit`](crate::Learner::fit) hands to burn.
pub(crate) struct AutoBatch {
    pub(crate) settings: LearnerBuilder,
    /// The optimizer without its state.
    pub(crate) optim: ModuleOptimizer,
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
        let accumulation = components.grad_accumulation.unwrap_or(1).max(1);
        let parameters = parameter_bytes(&learner.model());
        let planner = self.settings.planner(&device, parameters, (accumulation > 1, true));
        let log = || StepLog::open(self.settings.log_path.as_deref());
        let ready = planner.and_then(|planner| Ok((planner, log()?)));
        let (planner, log) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                components.interrupter.stop(Some(&error.to_string()));
                self.outcome().failure = Some(error);
                return (learner.model(), components.event_processor);
            }
        };
        let TrainingComponents { interrupter, event_store, num_epochs, .. } = components;
        let mut run = Run {
            strategy: self,
            learner,
            planner,
            device,
            processor: components.event_processor,
            interrupter,
            accumulation,
            split_check: SplitCheck::NotNeeded,
            cut: 0,
            grouped: 0,
            has_warned_of_groups: false,
            log,
            epoch: starting_epoch,
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
        if let Some(failure) = &outcome.failure {
            // burn's `launch` has no other place for it.
            run.interrupter.stop(Some(&failure.to_string()));
        }
        (outcome.predicted, outcome.measured) = run.planner.predicted_and_measured();
        outcome.smaller = run.planner.most();
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
    /// How many batches were to be split, and how many went into a group as a whole.
    cut: usize,
    grouped: usize,
    has_warned_of_groups: bool,
    log: StepLog,
    epoch: usize,
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
        self.epoch = epoch;
        self.seed(0);
        let split = |loader_items| LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: loader_items,
        };
        let started = self.processor.process_train(split(train.num_items()));
        self.interrupter.fail_on_error(started);
        let trained = self.train(train);
        let ended = self.processor.process_train(LearnerEvent::EndSplit(epoch));
        self.interrupter.fail_on_error(ended);
        trained?;
        if self.interrupter.should_stop() {
            return Ok(());
        }
        let split =
            LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid.num_items() };
        let started = self.processor.process_valid(split);
        self.interrupter.fail_on_error(started);
        let validated = self.validate(valid);
        let ended = self.processor.process_valid(LearnerEvent::EndSplit(epoch));
        self.interrupter.fail_on_error(ended);
        validated?;
        let ended = self.processor.process_train(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(ended);
        Ok(())
    }

    /// Seeds the device for what comes from this batch of the epoch on, if the user asked for it.
    fn seed(&self, iteration: usize) {
        if let Some(seed) = self.strategy.settings.seed {
            let at = (self.epoch as u64) << 32 | iteration as u64;
            self.device.seed(seed.wrapping_add(at));
        }
    }

    fn train(&mut self, loader: &TrainLoader<M>) -> Result<(), TrainError> {
        let reduction = self.strategy.settings.reduction;
        let mut iterator = loader.iter();
        let mut group: Option<Group> = None;
        let mut iteration = 0;
        let mut has_ended = true;
        while let Some(batch) = iterator.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.interrupter.fail(error);
                    has_ended = false;
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
            if !weight.is_finite() || weight < 0.0 {
                return Err(TrainError::Weight { weight });
            }
            // What a group's first batch weighs is no more than a unit.
            let total = if weight > 0.0 { weight } else { items as f64 };
            let current = group.get_or_insert_with(|| Group {
                gradients: WeightedGradients::new(reduction, total),
                batches: 0,
            });
            let plan = match self.plan(&batch, items, iteration) {
                Err(error) => {
                    let shapes = item_shapes(&batch);
                    // What goes on is rehearsed without it.
                    drop((batch, iterator, group));
                    return Err(self.advised(error, loader, (shapes, items)));
                }
                Ok(plan) => plan,
            };
            current.batches += 1;
            let is_last = current.batches >= self.accumulation || progress.is_completed();
            let gauge = self.planner.gauge().clone();
            let (ran, peak) = gauge.peak_of(|| {
                let outputs =
                    self.run_until_computed(&batch, plan, &mut current.gradients, iteration)?;
                let parts: f64 = outputs.1.iter().map(|(_, weight)| weight).sum();
                let tolerance = (items as f64 * f64::from(f32::EPSILON)).clamp(1e-4, 1e-2);
                let is_mean = reduction == LossReduction::Mean;
                let is_weight = |(_, weight): &(_, f64)| weight.is_finite() && *weight >= 0.0;
                if let Some((_, weight)) = outputs.1.iter().find(|part| !is_weight(part)) {
                    return Err(TrainError::Weight { weight: *weight });
                }
                if is_mean && (parts - weight).abs() > tolerance * weight {
                    return Err(TrainError::UnequalWeights { parts, whole: weight });
                }
                let stepped = is_last && step(&mut self.learner, &mut current.gradients);
                Ok((outputs.0, joined(outputs.1, reduction), stepped))
            });
            let (plan, outputs, stepped) = ran?;
            drop(batch);
            if stepped {
                self.planner.has_stepped();
            }
            self.log.add(items, plan.len(), Some(self.planner.taken(peak)));
            self.planner.compare(&plan, peak, &self.strategy.settings)?;
            if is_last {
                self.end_step(iteration)?;
            }
            let lr = Some(self.learner.lr_current());
            for output in outputs {
                let item = TrainingItem::new(output, progress.clone(), Some(iteration), lr.clone());
                let sent = self.processor.process_train(LearnerEvent::ProcessedItem(item));
                self.interrupter.fail_on_error(sent);
            }
            if is_last {
                group = None;
            }
            if self.interrupter.should_stop() {
                has_ended = false;
                break;
            }
        }
        // A loader that does not know its end. An interrupted group is not stepped, as in burn.
        if let Some(mut group) = group.filter(|_| has_ended) {
            if step(&mut self.learner, &mut group.gradients) {
                self.planner.has_stepped();
            }
            self.end_step(iteration)?;
        }
        Ok(())
    }

    /// Takes down what an optimizer step used.
    fn end_step(&mut self, iteration: usize) -> Result<(), TrainError> {
        let (budget, predicted) = (self.planner.budget(), self.planner.predicted_and_measured().0);
        let epoch = Some(self.epoch);
        self.log.end(|| StepUse { epoch, iteration, budget, predicted, ..StepUse::default() })?;
        Ok(())
    }

    /// Runs a batch, and again in smaller micro-batches if the device had no memory for it. Returns
    /// the plan that it ran by.
    fn run_until_computed(
        &mut self,
        batch: &<M as TrainStep>::Input,
        mut plan: Plan,
        gradients: &mut WeightedGradients,
        iteration: usize,
    ) -> Result<(Plan, Outputs<M>), TrainError> {
        let weightless = (self.accumulation == 1, self.strategy.settings.accepts_coupling);
        if self.planner.gauge().is_of_host() {
            let outputs = run_batch(&self.learner, batch, &plan, (gradients, weightless))?;
            return Ok((plan, outputs));
        }
        // A batch of its own begins with no gradient, and others are kept for it.
        let before = gradients.shared(&self.learner.model());
        loop {
            let statistics = Statistics::of(&self.learner.model());
            let outputs = run_batch(&self.learner, batch, &plan, (gradients, weightless))?;
            let computed = match gradients.so_far() {
                Some(grads) => are_computed(&self.learner.model(), grads),
                None => Ok(()),
            };
            let Err(error) = computed else { return Ok((plan, outputs)) };
            drop(outputs);
            *gradients = before.shared(&self.learner.model());
            statistics.put_back(&self.learner.model());
            self.planner.gauge().give_back();
            let message = error.reason().to_owned();
            let smaller = match error.is_device_poisoned() {
                true => None,
                false => self.planner.halve(item_shapes(batch), &plan),
            };
            let Some(smaller) = smaller else { return Err(TrainError::DeviceFailed { message }) };
            let first = message.lines().next().unwrap_or_default();
            let text = format!("the device did not compute {plan} ({first}): again as {smaller}");
            self.strategy.settings.say(log::Level::Warn, &text);
            self.ask_to_split(batch, plan.batch().get(), &smaller)?;
            plan = smaller;
            self.seed(iteration);
        }
    }

    /// The plan for a batch. Before the first split, gradients are compared.
    fn plan(
        &mut self,
        batch: &<M as TrainStep>::Input,
        items: usize,
        iteration: usize,
    ) -> Result<Plan, TrainError> {
        let shape = (item_shapes(batch), items);
        if let Some(plan) = self.planner.known(&shape) {
            self.ask_to_split(batch, items, &plan)?;
            self.seed(iteration);
            return Ok(plan);
        }
        let settings = &self.strategy.settings;
        let (model, lr) = (self.learner.model(), self.learner.lr_current());
        let mut rehearsal = OfLearner::new((&model, lr), batch, &self.strategy.optim);
        let report = self.planner.plan(&mut rehearsal, shape)?;
        let is_first = self.strategy.outcome().plans.is_empty();
        if is_first {
            settings.write_report(&self.planner, &mut rehearsal, &report)?;
        }
        let plan = report.plan.clone();
        settings.say_plan(&report, is_first);
        self.strategy.outcome().plans.push(report);
        self.ask_to_split(batch, items, &plan)?;
        // Planning has drawn numbers. What training draws does not depend on the plan.
        self.planner.gauge().give_back();
        self.seed(iteration);
        Ok(plan)
    }

    /// Adds to the error about a batch that does not fit what burn's gradient checkpointing would
    /// do for one of these shapes and so many items.
    fn advised(
        &mut self,
        error: TrainError,
        loader: &TrainLoader<M>,
        batch: (Shapes, usize),
    ) -> TrainError {
        let strategy = self.device.gradient_checkpointing_strategy();
        let has_it = strategy != Some(GradientCheckpointingStrategy::Disabled);
        let mut unfit = match error {
            TrainError::DoesNotFit(unfit) if !has_it => unfit,
            error => return error,
        };
        // Clones share running statistics, and with them the device.
        let model = self.learner.model();
        let statistics = Statistics::of(&model);
        // A tensor that is no parameter keeps its device, and the step panics.
        let found = catch_unwind(AssertUnwindSafe(|| self.checkpointed(loader, batch)));
        statistics.put_back(&model);
        match found.map_err(|panic| panicked(&*panic)).flatten() {
            Ok(found) => unfit.checkpointing = found,
            Err(error) => log::warn!("gradient checkpointing was not rehearsed: {error}"),
        }
        TrainError::DoesNotFit(unfit)
    }

    /// Plans a batch of the loader's, of these shapes and so many items, with burn's gradient
    /// checkpointing. The loader makes it anew: batches stay on their device.
    fn checkpointed(
        &mut self,
        loader: &TrainLoader<M>,
        (shapes, items): (Shapes, usize),
    ) -> Result<Option<Checkpointing>, TrainError> {
        let device = self.device.clone().gradient_checkpointing();
        let loader = loader.to_device(&device);
        let is_alike = |batch: &<M as TrainStep>::Input| {
            item_shapes(batch) == shapes && batch.items().is_ok_and(|own| own == items)
        };
        let found = loader.iter().flatten().take(TRIED).find(is_alike);
        let Some(batch) = found else { return Ok(None) };
        let (model, lr) = (with_checkpointing(self.learner.model()), self.learner.lr_current());
        let mut rehearsal = OfLearner::new((&model, lr), &batch, &self.strategy.optim);
        self.planner.checkpointed(&mut rehearsal, (shapes, items)).map(Some)
    }

    /// Compares gradients before the first batch is split, and then with more and more batches in
    /// between: what a loss is divided by may be alike in some batches. Where several batches have
    /// one optimizer step, also those of whole ones.
    fn ask_to_split(
        &mut self,
        batch: &<M as TrainStep>::Input,
        items: usize,
        plan: &Plan,
    ) -> Result<(), TrainError> {
        let settings = &self.strategy.settings;
        if plan.is_whole() {
            self.ask_to_group(batch, items);
            return Ok(());
        }
        self.cut += 1;
        let is_open = matches!(self.split_check, SplitCheck::NotNeeded | SplitCheck::Agreed);
        if is_open && is_power_of_four(self.cut) {
            let found = catch_unwind(AssertUnwindSafe(|| {
                check(&self.learner, batch, plan.ranges().collect(), settings.reduction)
            }));
            self.planner.gauge().give_back();
            let Ok(found) = found.map_err(|panic| panicked(&*panic))? else {
                // The next batch that is split is compared instead.
                self.cut -= 1;
                settings.say(log::Level::Warn, "the device did not compute a check of the split");
                return Ok(());
            };
            self.split_check = match found {
                Err(TrainError::Coupled { parameter, percent }) if settings.accepts_coupling => {
                    let text = format!("the gradient of `{parameter}` changes by {percent:.2} %");
                    settings.say(log::Level::Warn, &text);
                    SplitCheck::Accepted
                }
                found => found?,
            };
            let warning = match self.split_check {
                SplitCheck::Random => {
                    "the step draws random numbers: whether batches may be split was not checked"
                }
                SplitCheck::BatchNorm => {
                    "batch normalization in a split batch normalizes by the micro-batch, and whether the rest of the \
                     loss may be split was not checked"
                }
                _ => "",
            };
            if !warning.is_empty() {
                settings.say(log::Level::Warn, warning);
            }
        }
        Ok(())
    }

    /// Warns if parts of a batch do not add up to it by what they weigh: neither do the batches of
    /// a group, then.
    fn ask_to_group(&mut self, batch: &<M as TrainStep>::Input, items: usize) {
        if self.accumulation == 1 || items < 2 || self.has_warned_of_groups {
            return;
        }
        self.grouped += 1;
        if !is_power_of_four(self.grouped) {
            return;
        }
        let settings = &self.strategy.settings;
        // A step may need its whole batch, and panics.
        let found = catch_unwind(AssertUnwindSafe(|| {
            check_whole(&self.learner, batch, items, settings.reduction)
        }));
        self.planner.gauge().give_back();
        let text = match found {
            Ok(Ok(None)) => return,
            Ok(Ok(Some((parameter, by)))) => format!(
                "batches are put together by what they weigh, but the gradient of `{parameter}` differs by {:.2} % from \
                 that of parts of a batch: state what items weigh (`#[micro_batch(weight = ..)]`), if the loss is a mean \
                 over something else",
                100.0 * by
            ),
            Ok(Err(_)) | Err(_) => {
                "whether batches may be put together by what they weigh was not \
                                    checked: the step does not run on halves of a batch"
                    .to_owned()
            }
        };
        self.has_warned_of_groups = true;
        settings.say(log::Level::Warn, &text);
    }

    /// Validates in micro-batches as training runs such batches, or of as many items as it has room
    /// for.
    fn validate(&mut self, loader: &ValidLoader<M>) -> Result<(), TrainError> {
        let reduction = self.strategy.settings.reduction;
        let model = self.learner.model().valid();
        // Pages of training are none of its own.
        self.planner.gauge().give_back();
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
            let size = self.planner.size_of(&item_shapes(&batch), items);
            let gauge = self.planner.gauge().clone();
            let (outputs, peak) = gauge.peak_of(|| {
                let mut outputs = Vec::new();
                for begin in (0..items).step_by(size) {
                    let part = batch.range(begin..items.min(begin + size));
                    let weight = part.weight();
                    outputs.push((InferenceStep::step(&model, part), weight));
                }
                joined(outputs, reduction)
            });
            self.planner.compare_another(peak, &self.strategy.settings)?;
            for output in outputs {
                let item = TrainingItem::new(output, progress.clone(), Some(iteration), None);
                let sent = self.processor.process_valid(LearnerEvent::ProcessedItem(item));
                self.interrupter.fail_on_error(sent);
            }
            if self.interrupter.should_stop() {
                break;
            }
        }
        self.planner.has_run_another();
        Ok(())
    }
}

fn is_power_of_four(count: usize) -> bool {
    count.is_power_of_two() && count.trailing_zeros().is_multiple_of(2)
}

/// Steps the optimizer with what was accumulated. Returns whether there was anything: a mean over
/// nothing has no gradient.
fn step<M: LearnerModel>(learner: &mut Learner<M>, gradients: &mut WeightedGradients) -> bool {
    let model = learner.model();
    let has_any = gradients.has_any();
    if has_any {
        let grads = gradients.finish(&model);
        drop(model);
        learner.lr_step();
        learner.optimizer_step(grads);
    }
    has_any
}

/// The outputs of micro-batches, with their weights.
type Outputs<M> = Vec<(<M as TrainStep>::Output, f64)>;

/// Runs a batch in its micro-batches and adds their gradients. `is_alone`: whether it has an
/// optimizer step of its own. `may_leave_out`: whether the user accepts other gradients.
///
/// # Errors
///
/// If a part weighs nothing and has a gradient.
fn run_batch<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    plan: &Plan,
    (gradients, (is_alone, may_leave_out)): (&mut WeightedGradients, (bool, bool)),
) -> Result<Outputs<M>, TrainError>
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
        let is_left_out = match weight == 0.0 {
            true => gradients.is_left_out(&model, &output.grads),
            false => Ok(false),
        };
        let failed =
            |error: ExecutionError| TrainError::DeviceFailed { message: error.reason().to_owned() };
        let counted = match is_left_out.map_err(failed)? {
            // A whole batch is trained on as burn does.
            true if plan.is_whole() && is_alone => gradients.total(),
            true if !may_leave_out => return Err(TrainError::WeighsNothing),
            _ => weight,
        };
        gradients.add(&model, output.grads, counted);
        outputs.push((output.item, weight));
    }
    Ok(outputs)
}
