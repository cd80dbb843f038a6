//! Prepares a batch to run: asks the planner how, reports a new plan, and makes room on the device.

use std::ops::Range;

use burn::train::InferenceStep;
use firebox_lazy::StepRecorder;
use firebox_plan::{Accumulating, Split};
use firebox_ranks::Ranks;
use firebox_trace::Bytes;

use super::{Run, sender};
use crate::check::{Coupling, Means, ToSplit};
use crate::components::{LazyComponents, TrainBatch, TrainItem, ValidBatch, ValidItem};
use crate::device::DeviceMemory;
use crate::error::{During, Phase, TrainError};
use crate::gradients::summed_bytes;
use crate::parameters::trained_parameters;
use crate::planner::rehearsal::{
    Iterations, RehearsalPlan, rehearse_training, rehearse_validation,
};
use crate::planner::shape::Shape;
use crate::planner::{Admission, BatchToRun, Planner, Prepared};
use crate::progress::Screen;
use crate::ranks::Team;
use crate::run::splits::SplitsFile;
use crate::saved;
use crate::splitter::Splitter;
use crate::weights;
use crate::whole::Joining;

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// The run's planner.
    pub(super) fn planner(&self) -> Result<Planner, TrainError> {
        let planner = self.strategy.settings.planner::<LC::Backend, _>(&self.learner.model())?;
        // A thread of burn's has read the checkpoint, and its pools stay open.
        if self.position.epoch > 1
            && let Some(usage) = LC::Base::pool_usage(self.on.device())
        {
            planner.keep_for_threads(usage.reserved - usage.own);
        }
        let parks = self.strategy.settings.parks(planner.memory().is_on_host());
        let planner = planner.parking(parks);
        Ok(match self.position.epoch > 1 {
            true => planner.bringing(trained_parameters::<LC::Backend, _>(&self.learner.model())),
            false => planner,
        })
    }

    /// Goes on with the splits of an earlier run, if there is one to go on with.
    pub(super) fn read_splits(&mut self, planner: &mut Planner) {
        let settings = &self.strategy.settings;
        let Some(directory) = &settings.resume else { return };
        if !self.asked.saves && self.team.as_ref().is_none_or(Team::is_root) {
            settings.warn("`.resume(..)` finds no checkpoints: none is set on burn's training, as in `.with_file_checkpointer(..)`");
            return;
        }
        let rank = self.team.as_ref().map_or(0, |team| team.ranks.rank());
        let mut file = SplitsFile::new(directory, rank);
        if self.position.epoch > 1 {
            match file.read(self.position.epoch) {
                Ok(splits) => splits.into_iter().for_each(|splits| planner.go_on_with(splits)),
                Err(why) => {
                    settings.warn(&format!("batches may be split otherwise than before: {why}"))
                }
            }
        }
        self.records.splits = Some(file);
    }

    /// Parks what the optimizer brings along, if its state is to be parked.
    pub(super) fn begin_parking(&mut self, planner: &Planner) -> Result<(), TrainError> {
        if let Some(parking) = self.strategy.settings.open_parking(planner.parks())? {
            let parked = parking.take_over(&mut self.learner, &self.asked.store)?;
            self.learning.parking = Some((parking, parked));
        }
        Ok(())
    }

    /// Prepares a training batch of `items` items with total weight `weight`.
    pub(super) fn prepare_training(
        &mut self,
        planner: &mut Planner,
        batch: &TrainBatch<LC>,
        items: usize,
        weight: f64,
    ) -> Result<Prepared, TrainError> {
        let splitter = &self.strategy.train_splitter;
        let phase = Phase::Training;
        let shape = Shape::of::<LC::Backend, _, _>(phase, batch, items, splitter, planner);
        if let Some(pool) = &self.on.pool {
            pool.limit(planner.budget());
            planner.use_pool(pool);
        }
        self.change_shape(self.position.latest, shape);
        let mut prepared = self.plan_batch(planner, batch, shape)?;
        self.known.begin();
        // A sum over the batches of a group is not their mean.
        if self.asked.accumulation > 1 && (!self.is_declared() || prepared.plan.is_whole()) {
            self.look_at_whole(planner, batch, (items, weight), prepared.held);
        }
        // Several ranks split a batch, too.
        if !prepared.plan.is_whole() || self.team.is_some() && items > 1 {
            match self.ask_to_split(planner, batch, (items, weight), &prepared) {
                Ok(needed) => planner.predict(needed),
                Err(cause) => {
                    prepared = self.plan_whole(planner, batch, (shape, cause), prepared)?;
                }
            }
        }
        if self.puts_together() {
            let to_split = self.to_split(planner, batch, (items, weight), Vec::new());
            let means = Means::of(planner, prepared.held);
            let settings = &self.strategy.settings;
            means.weigh(&mut self.known, &self.learner, &to_split, settings);
        }
        self.make_room(planner, &prepared)?;
        self.save_trace(batch)?;
        self.on.watch.begin_batch(During::MicroSteps, items, &prepared.plan);
        Ok(prepared)
    }

    /// Plans a training batch, unless batches of its shape have a plan.
    fn plan_batch(
        &mut self,
        planner: &mut Planner,
        batch: &TrainBatch<LC>,
        shape: Shape,
    ) -> Result<Prepared, TrainError> {
        let (phase, items, splitter) =
            (Phase::Training, shape.items, &self.strategy.train_splitter);
        let has_stepped = self.has_stepped();
        // Steps that were left out have made no state.
        let again =
            self.asked.accumulation > 1 || self.position.latest == Some(shape) || !has_stepped;
        let (learner, joins) = (&self.learner, &self.strategy.settings.joins);
        let joining = joins.wanted::<TrainItem<LC>>();
        let to_run = BatchToRun { phase, shape, again, joining };
        let pages = !planner.memory().is_on_host();
        let batches = self.asked.accumulation;
        let (exchanges, parks) = (self.team.is_some(), self.learning.parking.is_some());
        let queue = &self.on.queue;
        let screen = self.strategy.settings.telling.screen.as_ref();
        let rehearse = |split: Split, how: (Iterations, Joining), recorder: &StepRecorder| {
            let (iterations, join) = (how.0, joins.of(how.1));
            screen.into_iter().for_each(|screen| screen.rehearsed(phase, items));
            let course =
                RehearsalPlan { iterations, has_stepped, batches, pages, exchanges, parks };
            let rehearsed =
                rehearse_training(learner, splitter, batch, split, course, join, recorder);
            queue.after_rehearsal(recorder);
            rehearsed
        };
        let prepared = planner.prepare(&to_run, || self.overhead(items), rehearse)?;
        screen.into_iter().for_each(Screen::planned);
        // Later the state is there.
        if let Some((parking, there)) =
            self.learning.parking.as_ref().filter(|_| self.position.latest.is_none())
        {
            let sharing = self.strategy.settings.ranks.as_ref().map_or(1, Ranks::local_world);
            // A checkpoint that is being written holds the state as it was.
            let copies = if self.asked.saves { 2.0 } else { 1.0 };
            parking.has_room_for(planner.parked().scale(copies) - *there, sharing)?;
        }
        self.report(planner, phase, &prepared);
        self.position.latest = Some(shape);
        Ok(prepared)
    }

    /// Whether it is settled how losses are reduced.
    fn is_declared(&self) -> bool {
        let settings = &self.strategy.settings;
        settings.reduction.or(self.known.reduction()).is_some() || self.team.is_some()
    }

    /// Whether an optimizer step takes more than one batch.
    fn puts_together(&self) -> bool {
        self.asked.accumulation > 1 || self.team.is_some()
    }

    /// Settles how losses are reduced and whether batches have a weight, as the step shows it.
    fn look_at_whole(
        &mut self,
        planner: &Planner,
        batch: &TrainBatch<LC>,
        (items, weight): (usize, f64),
        held: Bytes,
    ) {
        if items < 2 {
            // Nothing can be seen of one item.
            return self.known.settle(self.reduction());
        }
        let halves = vec![0..items / 2, items / 2..items];
        let to_split = self.to_split(planner, batch, (items, weight), halves);
        Means::of(planner, held).look_at_whole(&mut self.known, &self.learner, &to_split);
    }

    /// Asks whether a batch that is about to be split may be. Returns the memory that it took.
    fn ask_to_split(
        &mut self,
        planner: &Planner,
        batch: &TrainBatch<LC>,
        (items, weight): (usize, f64),
        prepared: &Prepared,
    ) -> Result<Bytes, TrainError> {
        if self.on.pool.is_some() && self.known.asks(items, weight) {
            // The twin knows of no outputs where a check begins.
            sender(&mut self.processor, &self.on, &self.loading).done_with_all();
        }
        let half = items.div_ceil(2);
        let parts = match prepared.plan.is_whole() {
            true => vec![0..half, half..items],
            false => prepared.plan.split().last_of_sizes(),
        };
        let to_split = self.to_split(planner, batch, (items, weight), parts);
        let settings = &self.strategy.settings;
        Means::of(planner, prepared.held).ask(&mut self.known, &self.learner, (&to_split, settings))
    }

    /// Plans a batch whole that must not be split because of `cause`: its loss is a function of all
    /// its items. It then computes tensors again, if that is allowed and enough. A loss that only
    /// needs to be declared otherwise stays an error.
    fn plan_whole(
        &mut self,
        planner: &mut Planner,
        batch: &TrainBatch<LC>,
        (shape, cause): (Shape, TrainError),
        refused: Prepared,
    ) -> Result<Prepared, TrainError> {
        let is_coupled = matches!(
            cause,
            TrainError::Coupled { coupling: Coupling::Items, .. }
                | TrainError::GradientsChanged { .. }
        );
        if !is_coupled || self.team.is_some() || !planner.keep_whole() {
            return Err(cause);
        }
        let settings = &self.strategy.settings;
        settings.say(log::Level::Info, "batches are kept whole: their items are coupled");
        if refused.made.is_some() {
            self.strategy.outcome().plans.pop();
        }
        self.plan_batch(planner, batch, shape).map_err(|error| {
            self.strategy.settings.warn(&format!("a batch that must not be split: {error}"));
            cause
        })
    }

    /// Saves a trace of the step before the first batch runs, if the user asked for it.
    fn save_trace(&mut self, batch: &TrainBatch<LC>) -> Result<(), TrainError> {
        let settings = &self.strategy.settings;
        let Some(path) =
            settings.telling.trace_path.as_ref().filter(|_| !self.records.trace_is_saved)
        else {
            return Ok(());
        };
        self.records.trace_is_saved = true;
        saved::can_write(path)?;
        let queue = &self.on.queue;
        let screen = settings.telling.screen.as_ref();
        let saved = saved::record(
            &self.learner,
            (&self.strategy.train_splitter, batch),
            settings,
            |recorder| queue.after_rehearsal(recorder),
            |at| screen.into_iter().for_each(|screen| screen.records(at)),
        );
        screen.into_iter().for_each(Screen::planned);
        queue.prepare(Admission::RunsOnceGivenBack);
        match saved {
            Ok(trace) => saved::write(&trace, path),
            // The run's own batches may be fine.
            Err(error) => {
                settings.warn(&format!("no trace was saved to {}: {error}", path.display()));
                Ok(())
            }
        }
    }

    /// Prepares a validation batch of `items` items. `latest` is the shape of the batch before it.
    pub(super) fn prepare_validation(
        &mut self,
        planner: &mut Planner,
        model: &LC::InferenceModel,
        batch: &ValidBatch<LC>,
        items: usize,
        latest: &mut Option<Shape>,
    ) -> Result<Prepared, TrainError> {
        let splitter = &self.strategy.valid_splitter;
        let phase = Phase::Validation;
        let shape = Shape::of::<LC::Inner, _, _>(phase, batch, items, splitter, planner);
        self.change_shape(latest.replace(shape), shape);
        let joins = &self.strategy.settings.joins;
        let joining = joins.wanted::<ValidItem<LC>>();
        let to_run = BatchToRun { phase, shape, again: true, joining };
        let queue = &self.on.queue;
        let screen = self.strategy.settings.telling.screen.as_ref();
        let pages = !planner.memory().is_on_host();
        let rehearse =
            |split: Split, (_, joining): (Iterations, Joining), recorder: &StepRecorder| {
                screen.into_iter().for_each(|screen| screen.rehearsed(phase, items));
                let step = &mut |model: &LC::InferenceModel, micro| model.step(micro);
                let rehearsed = rehearse_validation::<LC::Inner, _, _, _, _>(
                    model,
                    step,
                    (splitter, batch),
                    split,
                    (joins.of(joining), pages),
                    recorder,
                );
                queue.after_rehearsal(recorder);
                rehearsed
            };
        let prepared = planner.prepare(&to_run, || self.overhead(items), rehearse)?;
        screen.into_iter().for_each(Screen::planned);
        self.report(planner, phase, &prepared);
        self.make_room(planner, &prepared)?;
        self.on.watch.begin_batch(During::Validation, items, &prepared.plan);
        Ok(prepared)
    }

    /// Prepares for a batch of another shape than the latest. On firebox's pool, it must begin
    /// without the other batch's outputs: the dry twin knows where the outputs of a batch of the
    /// same shape lie, but not those of another.
    fn change_shape(&mut self, latest: Option<Shape>, shape: Shape) {
        if self.on.pool.is_some() && latest.is_some_and(|latest| latest != shape) {
            sender(&mut self.processor, &self.on, &self.loading).done_with_all();
        }
    }

    /// Gives back what must be given back before a batch runs, and prepares its pages if the pool
    /// is firebox's.
    fn make_room(&mut self, planner: &mut Planner, prepared: &Prepared) -> Result<(), TrainError> {
        let gave_back = self.on.make_room(planner, prepared)?;
        self.records.unmeasured = self.records.unmeasured.max(usize::from(gave_back));
        Ok(())
    }

    /// Reports a new plan, and lets loader threads prepare as much as it allows.
    fn report(&mut self, planner: &Planner, phase: Phase, prepared: &Prepared) {
        let Some(planned) = &prepared.made else { return };
        self.records.unmeasured = self.on.after_planning(planner);
        let plans = &mut self.strategy.outcome().plans;
        let model = self.learner.model();
        let settings = &self.strategy.settings;
        let is_kept = phase == Phase::Training && planner.stays_whole();
        let met = self.known.items_meet().filter(|_| is_kept);
        let of = (phase, planned, met);
        let report = settings.report::<LC::Backend, _>(&model, planner.budget(), of, plans);
        if let Some(team) = self.team.as_mut().filter(|_| plans.is_empty()) {
            team.plans.push(format!("{}, {}: {}", report.device, report.budget, report.line()));
            if !report.running_state.is_empty() && team.is_root() {
                settings.warn(
                    "the model's running statistics are each rank's own, and batch normalization normalizes over the \
                     batch of a rank; those of rank 0 are saved",
                );
            }
        }
        plans.push(report);
        self.loading.let_ahead(planned.rehearsed.loader_limit);
    }

    /// What is alive in addition to a micro-step once it is split further than planned: the sum of
    /// gradients, if the plan has none.
    pub(super) fn sum_if_split(&self, prepared: &Prepared) -> Bytes {
        match prepared.plan.accumulating() {
            Accumulating::No if self.asked.accumulation == 1 => {
                summed_bytes::<LC::Backend, _>(&self.learner.model())
            }
            _ => Bytes::ZERO,
        }
    }
}

impl<'a, LC, ST, SV> Run<'a, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// A batch that is cut into parts like these.
    fn to_split<'b>(
        &self,
        planner: &Planner,
        batch: &'b TrainBatch<LC>,
        (items, weight): (usize, f64),
        parts: Vec<Range<usize>>,
    ) -> ToSplit<'b, TrainBatch<LC>, ST>
    where
        'a: 'b,
    {
        let splitter: &'a ST = &self.strategy.train_splitter;
        let micro_batch = parts.iter().map(Range::len).max().unwrap_or(items);
        ToSplit {
            batch,
            items,
            weight,
            micro_batch,
            form: planner.form(),
            parts,
            splitter,
            reduction: self.reduction(),
            is_declared: self.is_declared(),
            ranks: self.team.as_ref().map_or(1, |team| team.ranks.world()),
            weighs: self.puts_together() || weights::differ(weight, items as f64, items),
            scale: self.learning.loss_scale.map(|scale| scale.scale()),
        }
    }
}
