//! The learning strategy: burn's training loop, with every batch run in the micro-batches of its
//! plan.
//!
//! Events, learning-rate steps, checkpoints, early stopping and interrupts come in the order of
//! burn's own single-device strategy. A batch that is run whole is therefore trained on exactly as
//! burn does.

pub(crate) mod account;
mod accumulated;
mod again;
mod begin;
mod coupled;
mod last_state;
mod metrics;
mod no_summary;
mod outcome;
mod together;
mod update;
mod validation;
mod work;

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, Progress};
use burn::module::Module;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    Interrupter, Learner, LearnerModelRecord, LearningComponentsTypes, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, ValidLoader,
};
use firebox_plan::StepLog;
use firebox_ranks::begin_epoch;
use firebox_trace::Bytes;

use crate::check::{Means, OfOutputs, ToSplit, Weight};
use crate::clock::{ClockGuard, set_clock};
use crate::components::{LazyComponents, TrainBatch, TrainItem, ValidBatch};
use crate::device::DeviceMemory;
use crate::error::{Phase, TrainError};
use crate::iteration::loading::Loading;
use crate::iteration::on_device::OnDevice;
use crate::iteration::running::{Around, MicroSteps};
use crate::loss_scale::{LossScale, Scaling, are_finite};
use crate::park::Parking;
use crate::planner::rehearsal::train_step;
use crate::planner::shape::Shape;
use crate::planner::{Planner, Prepared};
use crate::progress::Screen;
use crate::ranks::Team;
use crate::reduction::LossReduction;
use crate::run::checkpoints::{checkpoint_written, end_checkpoints};
use crate::run::splits::SplitsFile;
use crate::settings::Settings;
use crate::signals::Signals;
use crate::splitter::Splitter;
use crate::statistics::Pooled;
use crate::weights::BatchWeight;

use self::accumulated::Accumulated;
use self::again::seed_epoch;
use self::begin::{Start, TakenUp};
use self::coupled::{Giver, Known, Seen};
use self::metrics::{Output, Outputs, Place, Sender};
use self::no_summary::without_summary;
pub(crate) use self::outcome::{Outcome, OutcomeOf};
use self::together::{Step, Together};
use self::update::Covered;

/// The strategy that [`Learner::fit`](crate::Learner::fit) hands to burn.
pub(crate) struct AutoBatch<LC: LazyComponents, ST, SV> {
    pub(crate) settings: Settings,
    pub(crate) train_splitter: ST,
    pub(crate) valid_splitter: SV,
    /// The paths and shapes of the model's tensors before a checkpoint was read.
    pub(crate) shapes: Vec<(String, Vec<usize>)>,
    /// The scheduler before training.
    pub(crate) scheduler: LC::LrScheduler,
    pub(crate) outcome: Arc<Mutex<OutcomeOf<LC>>>,
}

impl<LC, ST, SV> SupervisedLearningStrategy<LC> for AutoBatch<LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train_loader: TrainLoader<LC>,
        valid_loader: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (LC::TrainingModel, SupervisedTrainingEventProcessor<LC>) {
        let device = learner.model().devices()[0].clone();
        let train_loader = train_loader.to_device(&device);
        let valid_loader = valid_loader.to_device(&device);
        learner.fork(&device);
        let accumulation = components.grad_accumulation.unwrap_or(1).max(1);
        let (loaders, store) = ((&*train_loader, &*valid_loader), &components.event_store);
        let epochs = (starting_epoch, components.num_epochs);
        let taken_up = self.take_up(&mut learner, loaders, store, accumulation, epochs);
        let TakenUp { epoch: starting_epoch, scheduler, team, ready } = taken_up;
        let is_root = team.as_ref().is_none_or(Team::is_root);
        let store = components.event_store;
        let mut checkpointer = components.checkpointer.filter(|_| is_root);
        let mut early_stopping = components.early_stopping.filter(|_| is_root);
        let start = Start {
            scheduler,
            epoch: starting_epoch,
            interrupter: components.interrupter.clone(),
            accumulation,
            saves: checkpointer.is_some(),
            store: store.clone(),
            team,
        };
        let mut run = self.begin(learner, components.event_processor, start);
        let epochs = || {
            ready.unwrap_or_else(|panic| resume_unwind(panic))?;
            run.epochs(
                loaders,
                starting_epoch..=components.num_epochs,
                |learner, epoch| {
                    checkpointer.iter_mut().for_each(|to| to.checkpoint(learner, epoch, &store));
                },
                |epoch| {
                    early_stopping.as_mut().is_some_and(|early| early.should_stop(epoch, &store))
                },
            )
        };
        let result = match catch_unwind(AssertUnwindSafe(epochs)) {
            Ok(result) => result.map_err(|error| run.on.watch.explain(error)),
            Err(panic) => Err(run.on.watch.panicked(&*panic)),
        };
        let lost = result.is_err() && run.on.watch.may_have_lost_checkpointers();
        let ended = catch_unwind(AssertUnwindSafe(|| end_checkpoints(checkpointer, lost)));
        let result = result
            .and_then(|()| ended.map_err(|panic| run.on.watch.panicked(&*panic)))
            .and_then(|()| checkpoint_written(&components.interrupter));
        let result = match &mut run.team {
            Some(team) => team.conclude(result),
            None => result,
        };
        let has_failed = result.is_err();
        run.leave(result);
        let (model, processor) = (run.learner.model(), run.processor);
        (model, if has_failed { without_summary(processor) } else { processor })
    }
}

impl<LC: LazyComponents, ST, SV> AutoBatch<LC, ST, SV> {
    fn outcome(&self) -> std::sync::MutexGuard<'_, OutcomeOf<LC>> {
        self.outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A training run in progress.
struct Run<'a, LC: LazyComponents, ST, SV> {
    strategy: &'a AutoBatch<LC, ST, SV>,
    asked: Asked,
    learner: Learner<LC>,
    learning: Learning<LC>,
    processor: SupervisedTrainingEventProcessor<LC>,
    on: OnDevice<LC::Base>,
    loading: Loading,
    /// The ranks, if there are several.
    team: Option<Team>,
    position: Position,
    records: Records,
    known: Known,
    /// What parts of validation batches are given.
    of_outputs: OfOutputs,
}

/// What the user asked burn's builder for.
struct Asked {
    interrupter: Interrupter,
    signals: Option<Signals>,
    /// How many loader batches one optimizer step takes.
    accumulation: usize,
    /// Whether burn writes checkpoints.
    saves: bool,
    store: Arc<EventStoreClient>,
}

/// What optimizer steps need to know of those before.
struct Learning<LC: LazyComponents> {
    /// The scheduler as it was when training began, and the number of its steps since, without
    /// those that were left out. burn's Learner does not give access to its own.
    scheduler: LC::LrScheduler,
    scheduler_steps: usize,
    /// Whether the model has tensors that may be running statistics.
    keeps_statistics: bool,
    /// The model before the first micro-step since the last optimizer step, if it may have running
    /// statistics.
    batch_start: Option<LearnerModelRecord<LC>>,
    optimizer_lost: bool,
    /// Which gradients the ledger knows the state of.
    covered: Covered,
    /// Whether an optimizer step had a gradient.
    has_learned: bool,
    /// Where the optimizer's state is between steps, if not on the device, and what of it was there
    /// when the run began.
    parking: Option<(Parking, Bytes)>,
    /// The scale of losses, in half floats.
    loss_scale: Option<LossScale>,
}

/// How far training has come.
#[derive(Clone, Copy)]
struct Position {
    epoch: usize,
    /// How many of the epoch's loader batches the model has learned from.
    batch: usize,
    /// How many optimizer steps of the epoch have begun.
    steps: usize,
    /// The shape of the latest training batch.
    latest: Option<Shape>,
}

/// What is written down of the run.
#[derive(Default)]
struct Records {
    log: StepLog,
    /// How batches are split, where a resumed run looks it up.
    splits: Option<SplitsFile>,
    /// Whether the step's trace was saved, or could not be.
    trace_is_saved: bool,
    /// How many more batches to compare with a prediction.
    unmeasured: usize,
}

/// What a batch leaves once its micro-batches have run.
struct Ran<T> {
    /// The sum of their weights.
    parts: f64,
    /// The last output, which is not sent to the metrics yet.
    last: Option<Output<T>>,
}

/// The loaders for training and validation.
type Loaders<'a, LC> = (
    &'a dyn DataLoader<<LC as LearningComponentsTypes>::Backend, TrainBatch<LC>>,
    &'a dyn DataLoader<<LC as LazyComponents>::Inner, ValidBatch<LC>>,
);

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// Trains and validates in each epoch. Then calls `checkpoint`, and ends if `stops_early` says
    /// so.
    fn epochs(
        &mut self,
        (train, valid): Loaders<'_, LC>,
        epochs: RangeInclusive<usize>,
        mut checkpoint: impl FnMut(&Learner<LC>, usize),
        mut stops_early: impl FnMut(usize) -> bool,
    ) -> Result<(), TrainError> {
        if epochs.is_empty() {
            return Ok(());
        }
        let mut planner = self.planner()?;
        self.begin_parking(&planner)?;
        self.read_splits(&mut planner);
        self.records.log = StepLog::open(self.strategy.settings.telling.log_path.as_deref())?;
        let _clock = ClockGuard;
        let last = *epochs.end();
        for epoch in epochs {
            let progress = Progress::new(epoch, last);
            self.train_epoch(&mut planner, train, &progress)?;
            if !self.should_stop() {
                self.valid_epoch(&mut planner, valid, &progress)?;
            } else if !self.is_told_to_end() {
                return Ok(());
            }
            if let Some(screen) = &self.strategy.settings.telling.screen {
                screen.end_epoch(self.strategy.outcome().memory);
            }
            self.share_metrics()?;
            if let Some(file) = self.records.splits.as_mut() {
                file.add(epoch, planner.splits())?;
            }
            checkpoint(&self.learner, epoch);
            if self.should_stop() || self.ends_early(stops_early(epoch))? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn train_epoch(
        &mut self,
        planner: &mut Planner,
        loader: &dyn DataLoader<LC::Backend, TrainBatch<LC>>,
        epoch: &Progress,
    ) -> Result<(), TrainError> {
        (self.position.epoch, self.position.batch) = (epoch.items_processed, 0);
        self.position.steps = 0;
        begin_epoch(epoch.items_processed);
        self.strategy.settings.telling.metrics.begin(epoch.items_processed);
        self.strategy.settings.telling.screen.iter().for_each(Screen::begin_epoch);
        if let Some(seed) = self.strategy.settings.seed {
            let rank = self.team.as_ref().map_or(0, |team| team.ranks.rank());
            seed_epoch::<LC::Backend>(self.on.device(), seed, epoch.items_processed, rank);
        }
        let mut batches = self.loading.read(loader);
        let (mut iteration, mut before) = (0, 0);
        let mut accumulated = Accumulated::new(self.reduction());
        while let Some(batch) = batches.next() {
            iteration += 1;
            let loader = batches.iterator.progress();
            let yielded = loader.items_processed;
            let at = Place { loader, before, epoch: epoch.clone(), iteration, lr: None };
            before = yielded;
            self.train_batch(planner, batch, at, &mut accumulated)?;
            if self.should_stop() {
                break;
            }
        }
        if iteration == 0 {
            return Err(TrainError::EmptyLoader);
        }
        // The unfinished group at the end of an epoch counts like any other.
        if accumulated.batches > 0 {
            self.optimizer_step(planner, &mut accumulated, iteration)?;
        }
        self.wait_for_others(planner, iteration)?;
        // No batch of the run had anything that counts in the loss.
        if !self.learning.has_learned {
            return Err(TrainError::Weight { weight: 0.0 });
        }
        self.measure(planner)?;
        sender(&mut self.processor, &self.on, &self.loading).end_trained(epoch.items_processed);
        Ok(())
    }

    /// Trains on one loader batch: plans it if need be, runs it, and steps the optimizer if it is
    /// the last of its group.
    fn train_batch(
        &mut self,
        planner: &mut Planner,
        batch: TrainBatch<LC>,
        mut at: Place,
        accumulated: &mut Accumulated<LC::TrainingModel>,
    ) -> Result<(), TrainError> {
        let iteration = at.iteration;
        let items = self.strategy.train_splitter.items(&batch)?;
        if items == 0 {
            return Err(TrainError::EmptyBatch { phase: Phase::Training });
        }
        let stated = self.strategy.train_splitter.weight(&batch);
        let is_first = accumulated.batches == 0;
        self.position.steps += usize::from(is_first);
        set_clock(at.clock(self.position.steps));
        if is_first {
            self.step_lr();
        }
        // Whatever is found out about the loss.
        BatchWeight::new(stated, items, self.reduction())?;
        let prepared = self.prepare_training(planner, &batch, items, stated)?;
        let weight = match self.known.weight() {
            Some(Weight { divisor, counted, .. }) => BatchWeight {
                counted: Some(counted),
                ..BatchWeight::new(divisor, items, self.reduction())?
            },
            None => BatchWeight::new(stated, items, self.reduction())?,
        };
        if is_first {
            *accumulated = Accumulated::new(self.reduction());
        }
        if is_first && self.learning.keeps_statistics {
            self.learning.batch_start = Some(self.learner.model().into_record());
        }
        at.lr = Some(self.learner.lr_current());
        let Ran { parts, last } =
            self.run_batch(planner, (&batch, weight), prepared, &at, accumulated)?;
        drop(batch);
        if weight.differs_from(parts) {
            return Err(TrainError::UnequalWeights { parts, whole: weight.total() });
        }
        if accumulated.batches >= self.asked.accumulation {
            self.optimizer_step(planner, accumulated, iteration)?;
            if self.records.unmeasured > 0 && !self.has_left_out() {
                self.records.unmeasured -= 1;
                self.measure(planner)?;
            }
        }
        // Like burn, sends the output of the last micro-step after the optimizer step.
        if let Some(last) = last {
            sender(&mut self.processor, &self.on, &self.loading).trained(&at, last);
        }
        Ok(())
    }

    /// How losses are reduced, as far as that is known.
    fn reduction(&self) -> LossReduction {
        self.strategy.settings.reduction.or(self.known.reduction()).unwrap_or_default()
    }

    /// Runs a batch in its micro-batches and adds up their gradients.
    fn run_batch(
        &mut self,
        planner: &mut Planner,
        (batch, weight): (&TrainBatch<LC>, BatchWeight),
        prepared: Prepared,
        at: &Place,
        accumulated: &mut Accumulated<LC::TrainingModel>,
    ) -> Result<Ran<TrainItem<LC>>, TrainError> {
        let sum = self.sum_if_split(&prepared);
        let Prepared { shape, ref plan, joining, held, pages, .. } = prepared;
        let (splitter, settings) = (&self.strategy.train_splitter, &self.strategy.settings);
        let (items, micro_batch, reduction) = (shape.items, shape.items / 2, self.reduction());
        let ranks = self.team.as_ref().map_or(1, |team| team.ranks.world());
        let scaling = Scaling::with(self.learning.loss_scale).by_share(reduction, ranks);
        let mut is_asked = !plan.is_whole();
        let (model, learner) = (self.learner.model(), &self.learner);
        // What the batch states.
        let stated = self.known.weight().map_or(weight.stated, |_| items as f64);
        let known = RefCell::new(&mut self.known);
        let to_split = ToSplit {
            batch,
            items,
            weight: stated,
            micro_batch,
            form: planner.form(),
            parts: vec![0..micro_batch, micro_batch..items],
            splitter,
            reduction,
            is_declared: true,
            ranks,
            weighs: self.asked.accumulation > 1 || ranks > 1,
            scale: self.learning.loss_scale.map(|scale| scale.scale()),
        };
        let means = Means::of(planner, held + sum);
        let mut may_split = |planner: &Planner| match std::mem::replace(&mut is_asked, true) {
            true => Ok(Bytes::ZERO),
            false => Means::of(planner, held + sum).ask_midway(
                &mut known.borrow_mut(),
                learner,
                (&to_split, settings),
                pages,
            ),
        };
        let mut giver = Giver::new(&known, (&means, learner), &to_split, settings, pages);
        let around = Around {
            may_split: Some(&mut may_split),
            give: Some(&mut giver),
            sum,
            ranks,
            pooled: settings.pools_statistics.map(|momentum| Pooled::new(momentum, items)),
        };
        let mut micro_steps = MicroSteps::<LC::Backend, _, _, _>::new(
            planner,
            (Phase::Training, &model, self.learning.keeps_statistics),
            (splitter, batch),
            &prepared,
            &self.on.queue,
            around,
        );
        let (queue, watch) = (&self.on.queue, &self.on.watch);
        let sender = sender(&mut self.processor, &self.on, &self.loading);
        let join = (settings.joins.of(joining), &**plan);
        let mut outputs = Outputs::of_batch(sender, at, join, settings.telling.screen.as_ref());
        let (mut parts, mut added, mut done, mut micro_batches) = (0.0, 0, 0, 0);
        let is_scaled = self.learning.loss_scale.is_some();
        let mut seen = Seen {
            step: self.learning.scheduler_steps + 1,
            is_last: at.is_last(),
            ..Seen::default()
        };
        let mut gradients = accumulated.begin_batch(weight);
        for range in plan.ranges() {
            outputs.send();
            outputs.done = (range.end, items);
            micro_steps.run(
                range,
                &mut |micro| scaling.step(|| train_step(learner, &model, micro)),
                &mut |output, part, items| {
                    let scale = watch.heard_nothing().and_then(|()| scaling.undo())?;
                    let (part, grads) = (weight.of_part(part, items), output.grads);
                    let part = known.borrow().weighs(part, done..done + items, weight, settings)?;
                    micro_batches += 1;
                    parts += part;
                    let begin = done;
                    done += items;
                    if begin == 0 {
                        seen.first_end = done;
                    }
                    // A mean over nothing is not a number, and no part of the whole.
                    let counts = match weight.is_nothing() {
                        // Losses that are scaled are judged with the step.
                        true if is_scaled => true,
                        true => queue.alone(|| are_finite::<LC::Backend, _>(&model, &grads)),
                        false => reduction.counts(part),
                    };
                    if !counts && !weight.is_nothing() {
                        seen.nothing = Some((begin, done));
                    }
                    if counts {
                        added += 1;
                        outputs.add(output.item, part);
                        if let Some(gradients) = &mut gradients {
                            queue.alone(|| gradients.add_times(&model, grads, part, scale));
                        }
                    }
                    Ok(())
                },
            )?;
        }
        micro_steps.finish(settings);
        giver.end();
        self.records.log.add(items, micro_batches, None);
        if added == 0 {
            log::warn!("batch {} is left out: nothing in it counts in the loss", at.iteration);
        }
        seen.is_new = planner.takes_new_structure();
        if seen.first_end < items || self.team.is_some() {
            Means::of(planner, held + sum).look_again(
                &mut known.borrow_mut(),
                learner,
                (&to_split, settings),
                &seen,
            )?;
        }
        Ok(Ran { parts, last: outputs.end(reduction, queue) })
    }

    fn optimizer_step(
        &mut self,
        planner: &mut Planner,
        accumulated: &mut Accumulated<LC::TrainingModel>,
        iteration: usize,
    ) -> Result<(), TrainError> {
        let step = self.agree_on_step(accumulated)?;
        self.apply(planner, accumulated, iteration, step)
    }

    /// Steps the optimizer with what is accumulated, or with the gradients of all ranks.
    fn apply(
        &mut self,
        planner: &mut Planner,
        accumulated: &mut Accumulated<LC::TrainingModel>,
        iteration: usize,
        step: Option<Step>,
    ) -> Result<(), TrainError> {
        let has_any = step.as_ref().map_or(accumulated.has_any(), Step::has_any);
        self.learning.has_learned |= has_any;
        let mut done = std::mem::replace(accumulated, Accumulated::new(self.reduction()));
        let (model, learner) = (self.learner.model(), RefCell::new(&mut self.learner));
        let (latest, covered) = (self.position.latest, &mut self.learning.covered);
        let parking = self.learning.parking.as_ref().map(|(parking, _)| parking);
        let together = self.team.as_mut().zip(step).map(|(team, step)| Together::new(team, step));
        self.learning.loss_scale.iter_mut().for_each(LossScale::begin_step);
        let (together, loss_scale) = (RefCell::new(together), &mut self.learning.loss_scale);
        let OnDevice { queue, watch, pool } = &mut self.on;
        let stepped = queue.update(
            watch,
            pool.as_deref(),
            // The model is let go of before the optimizer replaces its parameters.
            || {
                let (model, mut together) = (model, together.borrow_mut());
                let grads = match &mut *together {
                    Some(together) => together.sum(&model, &mut done)?,
                    None => done.gradients().finish(&model),
                };
                if !has_any {
                    return Ok(None);
                }
                let grads = match (loss_scale, &mut *together) {
                    (None, _) => Some(grads),
                    (Some(scale), Some(together)) => together.judge(scale).then_some(grads),
                    (Some(scale), None) => scale.judge_alone::<LC::Backend, _>(&model, grads)?,
                };
                if let (Some(grads), None) = (&grads, parking) {
                    covered.admit(planner, latest, (&**learner.borrow(), &model), grads)?;
                }
                Ok(grads)
            },
            || together.borrow_mut().as_mut().map_or(Ok(()), Together::commit),
            |grads| match (grads, parking) {
                (Some(grads), Some(parking)) => parking.step(*learner.borrow_mut(), grads),
                (grads, _) => {
                    let mut learner = learner.borrow_mut();
                    grads.into_iter().for_each(|grads| learner.optimizer_step(grads));
                    Ok(())
                }
            },
        );
        self.learning.optimizer_lost |=
            matches!(stepped, Err(TrainError::OptimizerPanicked { .. }));
        let parked = stepped?;
        if !self.has_left_out() {
            planner.has_run(Phase::Training);
            self.learning.scheduler_steps += 1;
        }
        self.position.batch = iteration;
        self.learning.batch_start = None;
        // The step is whole, whether or not its state could be parked.
        parked?;
        self.log_step(planner)
    }
}

fn sender<'a, P, D: DeviceMemory>(
    processor: &'a mut P,
    on: &'a OnDevice<D>,
    loading: &'a Loading,
) -> Sender<'a, P> {
    Sender { processor, training: on.queue.training.as_ref(), gate: &loading.gate }
}
