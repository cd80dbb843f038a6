//! Training loops of the user's own: [`StepPlanner`] plans each batch for the user's step and runs
//! it in micro-batches that fit.
//!
//! The step is a function that is called several times: in rehearsals on some micro-batches of a
//! split, recorded and thrown away, and then for the batch itself.

mod loading;
mod micro_batches;
mod proofs;
mod validation;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::data::dataloader::DataLoader;
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::Backend;
use firebox_lazy::{LazyBackend, Rehearsal, StepRecorder, mark, rehearse, restore};
use firebox_plan::{Split, StepLog, StepUse};
use firebox_trace::{Bytes, Mark};

use crate::check::{Coupling, Means, OfOutputs, SplitCheck};
use crate::clock::{Clock, set_clock};
use crate::components::TrainingBackend;
use crate::device::panics::Listener;
use crate::error::{During, Phase, TrainError};
use crate::gradients::with_own_leaves;
use crate::iteration::loading::Loading;
use crate::iteration::on_device::OnDevice;
use crate::iteration::pieces::representative;
use crate::iteration::rehearsing::Rehearsing;
use crate::learner::LearnerBuilder;
use crate::loss_scale::LossScale;
use crate::parameters::has_untrained;
use crate::park::Parking;
use crate::planner::labels::{label_by_lifetime, label_parameters, retire_what_is_replaced};
use crate::planner::rehearsal::{Iterations, RehearsalPlan, guard};
use crate::planner::shape::Shape;
use crate::planner::{BatchToRun, Planner, Prepared};
use crate::ready::make_ready;
use crate::report::{MemoryUse, PlanReport};
use crate::run::strategy::account::{measure, step_use};
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::weights::BatchWeight;
use crate::whole::Joining;

pub use self::micro_batches::MicroBatches;
use self::micro_batches::{Running, Since};
use self::proofs::{Passes, Proofs, prove};
pub use crate::iteration::loading::Batches;

/// A step of a training loop: changes the model and the optimizers, and returns what the loop wants
/// to know.
type Step<'s, B, M, O, I, S, R> =
    dyn FnMut(&mut M, &mut O, &mut MicroBatches<'_, B, M, I, S>) -> Result<R, TrainError> + 's;

/// Runs the steps of a training loop within a memory budget.
///
/// For loops that burn's supervised training does not cover: several models and optimizers, a GAN,
/// reinforcement learning. The loop stays the user's. Each batch goes through [`step`](Self::step),
/// which plans it for the user's step and runs it in micro-batches that fit. Made by
/// [`LearnerBuilder::step_planner`](crate::LearnerBuilder::step_planner).
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::loss::{MseLoss, Reduction};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamConfig, GradientsParams, Optimizer};
/// use burn::prelude::*;
/// use burn::tensor::Distribution;
/// use firebox_batch::MicroBatch;
/// use firebox_lazy::Lazy;
/// use firebox_train::{Learner, WeightedGradients};
/// use firebox_trace::Bytes;
///
/// type B = Autodiff<Lazy<Flex>>;
///
/// #[derive(Clone, Debug, MicroBatch)]
/// struct Points<B: Backend> {
///     inputs: Tensor<B, 2>,
///     targets: Tensor<B, 2>,
/// }
///
/// let device = Default::default();
/// let mut model: Linear<B> = LinearConfig::new(2, 1).init(&device);
/// let mut optim = AdamConfig::new().init();
/// let mut steps = Learner::builder().auto_batch().memory(Bytes::mib(8)).step_planner(&model)?;
///
/// for _ in 0..3 {
///     let inputs = Tensor::<B, 2>::random([64, 2], Distribution::Default, &device);
///     let batch = Points { targets: inputs.clone().sum_dim(1), inputs };
///     steps.step(&mut model, &mut optim, &batch, |model, optim, parts| {
///         let mut gradients = WeightedGradients::mean(parts.weight());
///         parts.each(
///             model,
///             // Recorded, checked against the budget, then run.
///             |model, points| {
///                 let output = model.forward(points.inputs);
///                 let loss = MseLoss::new().forward(output, points.targets, Reduction::Mean);
///                 GradientsParams::from_grads(loss.backward(), model)
///             },
///             |model, grads, weight| gradients.add(model, grads, weight),
///         )?;
///         let grads = gradients.finish(model);
///         parts.update(model, |model| *model = optim.step(1e-3, model.clone(), grads))
///     })?;
/// }
/// assert!(steps.plans()[0].plan.is_whole());
/// # Ok::<(), firebox_train::TrainError>(())
/// ```
///
/// Counts what a step needs, and batches of loader threads that are read through
/// [`batches`](Self::batches). Excludes what else the loop holds, such as a replay buffer on the
/// device.
///
/// Before a batch is split, the recorded step shows whether the gradients that
/// [`WeightedGradients`](crate::WeightedGradients) adds up are those of the whole batch. If its
/// items are coupled, it is kept whole, or is an error. If parts need numbers of the whole, such as
/// the sum of class weights, they are given those. What cannot be shown is a warning, and
/// [`split_check`](Self::split_check) says it: gradients are not compared here, as the
/// [`Learner`](crate::Learner) does.
///
/// Use it on the thread that made it. Only one should live on a device at a time.
pub struct StepPlanner<B, M, S>
where
    B: TrainingBackend,
{
    settings: Settings,
    splitter: S,
    planner: Planner,
    on: OnDevice<B::Base>,
    loading: Loading,
    position: Position,
    proofs: Proofs,
    /// What parts of validation batches are given.
    of_outputs: OfOutputs,
    keeps_statistics: bool,
    /// Where the optimizers' state is between updates, if not on the device, and what was there
    /// before the first step.
    parking: Option<(Parking, Bytes)>,
    records: Records,
    _listener: Listener,
    _model: std::marker::PhantomData<fn() -> M>,
}

/// How far the loop has come.
struct Position {
    /// The number of steps that have ended.
    ended: usize,
    /// The shape of the latest batch.
    latest: Option<Shape>,
    /// Whether there was an update.
    has_stepped: bool,
}

/// What is written down of the loop.
struct Records {
    plans: Vec<PlanReport>,
    memory: MemoryUse,
    log: StepLog,
    /// How many more batches to compare with a prediction.
    unmeasured: usize,
}

impl<ST, SV> LearnerBuilder<ST, SV> {
    /// Builds a [`StepPlanner`] for a training loop of your own, on the device of `model`.
    ///
    /// Uses the options for memory, splits, hidden state, loader threads, output and the log of
    /// steps. Those for burn's loop, such as [`progress`](Self::progress), [`seed`](Self::seed) and
    /// [`save_trace`](Self::save_trace), have no effect.
    ///
    /// # Errors
    ///
    /// If something the device needs is not installed, the model does not live on one device, or
    /// the budget cannot be determined.
    pub fn step_planner<B, M>(self, model: &M) -> Result<StepPlanner<B, M, ST>, TrainError>
    where
        B: TrainingBackend,
        M: AutodiffModule<B>,
    {
        StepPlanner::new(model, self.settings, self.train_splitter)
    }
}

impl<B, M, S> StepPlanner<B, M, S>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
{
    pub(crate) fn new(model: &M, settings: Settings, splitter: S) -> Result<Self, TrainError> {
        if LossScale::of::<B>().is_some() {
            return Err(TrainError::ScaledLoop);
        }
        let others = make_ready::<B, _>(model)?;
        let settings = Settings { others, ..settings };
        let device = model.devices()[0].clone();
        let planner = settings.planner::<B, _>(model)?;
        let parks = settings.parks(planner.memory().is_on_host());
        let mut planner = planner.parking(parks);
        let parking = settings.open_parking(planner.parks())?;
        let on = OnDevice::begin(device, others);
        if let Some(pool) = &on.pool {
            pool.limit(planner.budget());
            planner.use_pool(pool);
        }
        let loading = Loading::begin(planner.memory().is_on_host() && settings.loaders_compute);
        let records = Records {
            plans: Vec::new(),
            memory: MemoryUse::default(),
            log: StepLog::open(settings.telling.log_path.as_deref())?,
            unmeasured: 0,
        };
        Ok(Self {
            splitter,
            planner,
            on,
            loading,
            position: Position { ended: 0, latest: None, has_stepped: false },
            proofs: Proofs::default(),
            of_outputs: OfOutputs::default(),
            keeps_statistics: has_untrained::<B, _>(model),
            parking: parking.map(|parking| (parking, Bytes::ZERO)),
            records,
            settings,
            _listener: Listener::of_all(),
            _model: std::marker::PhantomData,
        })
    }

    /// Runs one step on a batch: plans it if batches of its shape have no plan yet, and calls
    /// `step` with the model, the optimizers and the batch's [micro-batches](MicroBatches).
    ///
    /// `step` is also called in each rehearsal, with clones of the model and of `optim`. It must do
    /// the same there. [`is_rehearsal`](firebox_lazy::is_rehearsal) tells it what not to repeat,
    /// such as printing. What it reads in a rehearsal is computed, but for one that only looks at
    /// it, to prove a split: what is read there is zero. `optim` is what the step changes
    /// besides the model: an optimizer, several as a tuple, schedulers.
    ///
    /// # Errors
    ///
    /// If the batch does not fit however it is cut, its gradient is not the sum over its parts (see
    /// [`split_although`](crate::LearnerBuilder::split_although)), a part of the step panics, or
    /// the device fails, and those of `step`. Parameters are then those of the last whole
    /// [update](MicroBatches::update), unless the device [failed in it](During::OptimizerStep), and
    /// so are running statistics. A batch of weight zero is [`TrainError::Weight`].
    pub fn step<O, I, R>(
        &mut self,
        model: &mut M,
        optim: &mut O,
        batch: &I,
        mut step: impl FnMut(&mut M, &mut O, &mut MicroBatches<'_, B, M, I, S>) -> Result<R, TrainError>,
    ) -> Result<R, TrainError>
    where
        O: Clone,
        S: Splitter<I>,
    {
        let states = self.settings.states.clone();
        let result = states.kept(|| self.run(model, optim, batch, &mut step));
        result.map_err(|error| self.on.watch.explain(error))
    }

    /// The batches of a loader, for training or for validation. Its threads prepare no more ahead
    /// than plans count. Read all loaders through it if you read one: threads of a loader that is
    /// read in another way may wait for ever.
    ///
    /// Until the first batch was planned, they prepare no more than the loop waits for.
    pub fn batches<'a, L: Backend, I>(&self, loader: &'a dyn DataLoader<L, I>) -> Batches<'a, I> {
        if self.records.plans.is_empty() {
            self.loading.hold_back();
        }
        self.loading.read(loader)
    }

    /// Continues a training of which `steps` steps were made before: the
    /// [clock](crate::clock) goes on from there.
    pub fn continue_after(&mut self, steps: usize) {
        self.position.ended = steps;
    }

    /// The plans so far, in the order they were made.
    pub fn plans(&self) -> &[PlanReport] {
        &self.records.plans
    }

    /// Whether the gradients of split batches are those of the whole batches, as known so far.
    pub fn split_check(&self) -> &SplitCheck {
        self.proofs.found()
    }

    /// The memory predicted and measured so far. Measured after the first batches of each plan.
    pub fn memory(&self) -> MemoryUse {
        self.records.memory
    }

    /// The most memory predicted for any step so far, including that which is about to run.
    pub fn predicted(&self) -> Bytes {
        self.planner.predicted()
    }

    /// What steps may use.
    pub fn budget(&self) -> Bytes {
        self.planner.budget()
    }

    fn run<O, I, R>(
        &mut self,
        model: &mut M,
        optim: &mut O,
        batch: &I,
        step: &mut Step<'_, B, M, O, I, S, R>,
    ) -> Result<R, TrainError>
    where
        O: Clone,
        S: Splitter<I>,
    {
        let items = self.splitter.items(batch)?;
        if items == 0 {
            return Err(TrainError::EmptyBatch { phase: Phase::Training });
        }
        let weight = self.splitter.weight(batch);
        if BatchWeight::new(weight, items, self.settings.reduction())?.is_nothing() {
            return Err(TrainError::Weight { weight });
        }
        let step_number = self.position.ended + 1;
        set_clock(Clock { step: step_number, batch: step_number, ..Clock::BEGIN });
        let (prepared, passes) = self.prepare(model, optim, (batch, items, weight), step)?;
        self.on.watch.begin_batch(During::MicroSteps, items, &prepared.plan);
        let running = Running {
            planner: &mut self.planner,
            settings: &self.settings,
            on: &mut self.on,
            keeps_statistics: self.keeps_statistics,
            parking: self.parking.as_ref().map(|(parking, _)| parking),
            prepared,
            passes,
            begun: 0,
            proofs: &mut self.proofs,
        };
        let mut parts = MicroBatches::running(&self.splitter, (batch, items, weight), running);
        let result = catch_unwind(AssertUnwindSafe(|| step(model, optim, &mut parts)));
        let Since { start, has_updated, micro_batches } = parts.since();
        self.position.has_stepped |= has_updated;
        let result = result.unwrap_or_else(|panic| Err(self.on.watch.panicked(&*panic)));
        if let (Err(_), Some(start)) = (&result, start)
            && let Err(error) = restore::<B, _>(model, start)
        {
            log::error!("the running statistics are those of a part of a batch: {error}");
        }
        let result = result?;
        self.on.watch.heard_nothing()?;
        self.planner.has_run(Phase::Training);
        self.position.ended += 1;
        self.records.log.add(items, micro_batches, None);
        let Self { on, planner, settings, records, .. } = self;
        let iteration = self.position.ended;
        let mut used = || step_use::<B::Base>(on.device(), planner, settings);
        records.log.end(|| StepUse { iteration, ..used() })?;
        self.measure()?;
        Ok(result)
    }

    /// Makes a batch ready to run, split as its plan says if that is exact.
    fn prepare<O, I, R>(
        &mut self,
        model: &M,
        optim: &O,
        (batch, items, weight): (&I, usize, f64),
        step: &mut Step<'_, B, M, O, I, S, R>,
    ) -> Result<(Prepared, Option<Passes>), TrainError>
    where
        O: Clone,
        S: Splitter<I>,
    {
        let (phase, batch) = (Phase::Training, (batch, items, weight));
        let shape = Shape::of::<B, _, _>(phase, batch.0, items, &self.splitter, &mut self.planner);
        let form = self.planner.form();
        let mut prepared = self.plan(model, optim, (batch, shape), step)?;
        let mut passes = None;
        if !prepared.plan.is_whole() {
            let parts = prepared.plan.split().last_of_sizes();
            passes = match self.proofs.known(form, &parts) {
                Some(passes) => Some(passes),
                None => {
                    let means = Means::of(&self.planner, prepared.held);
                    let of = ((model, optim), (&self.splitter, batch), (form, &parts[..]));
                    let with = (&means, &self.settings);
                    match prove(&mut self.proofs, of.0, of.1, of.2, step, with) {
                        Ok(passes) => Some(passes),
                        Err(cause) => {
                            prepared =
                                self.keep_whole(model, optim, (batch, shape), step, cause)?;
                            None
                        }
                    }
                }
            };
        }
        // Later the state is there.
        let is_first = self.position.latest.is_none();
        if let Some((parking, there)) = self.parking.as_ref().filter(|_| is_first) {
            parking.has_room_for(self.planner.parked() - *there, 1)?;
        }
        self.position.latest = Some(shape);
        self.begin::<B, _>(model, phase, &prepared)?;
        Ok((prepared, passes))
    }

    /// Plans a batch, unless batches of its shape have a plan.
    fn plan<O, I, R>(
        &mut self,
        model: &M,
        optim: &O,
        (batch, shape): ((&I, usize, f64), Shape),
        step: &mut Step<'_, B, M, O, I, S, R>,
    ) -> Result<Prepared, TrainError>
    where
        O: Clone,
        S: Splitter<I>,
    {
        let splitter = &self.splitter;
        let again = self.position.latest == Some(shape);
        let to_run = BatchToRun { phase: Phase::Training, shape, again, joining: Joining::Asked };
        let (pages, has_stepped) = (!self.planner.memory().is_on_host(), self.position.has_stepped);
        let queue = &self.on.queue;
        let overhead = self.loading.overhead(shape.items);
        let rehearse =
            |split: Split, (iterations, _): (Iterations, Joining), recorder: &StepRecorder| {
                let course = RehearsalPlan {
                    iterations,
                    has_stepped,
                    batches: 1,
                    pages,
                    exchanges: false,
                    parks: self.parking.is_some(),
                };
                let rehearsed =
                    rehearse_step(model, optim, (splitter, batch), split, course, step, recorder);
                queue.after_rehearsal(recorder);
                rehearsed
            };
        self.planner.prepare(&to_run, || overhead, rehearse)
    }

    /// Plans a batch whole whose items are coupled, as `cause` says.
    fn keep_whole<O, I, R>(
        &mut self,
        model: &M,
        optim: &O,
        of: ((&I, usize, f64), Shape),
        step: &mut Step<'_, B, M, O, I, S, R>,
        cause: TrainError,
    ) -> Result<Prepared, TrainError>
    where
        O: Clone,
        S: Splitter<I>,
    {
        let is_coupled = matches!(cause, TrainError::Coupled { coupling: Coupling::Items, .. });
        if !is_coupled || !self.planner.keep_whole() {
            return Err(cause);
        }
        let text = "batches are kept whole: their items are coupled";
        self.settings.say(log::Level::Info, text);
        self.plan(model, optim, of, step).map_err(|error| {
            self.settings.warn(&format!("a batch that must not be split: {error}"));
            cause
        })
    }

    /// Reports a new plan, lets loader threads prepare as much as it allows, and makes room for the
    /// batch.
    fn begin<C, V>(
        &mut self,
        model: &V,
        phase: Phase,
        prepared: &Prepared,
    ) -> Result<(), TrainError>
    where
        C: LazyBackend<Base = B::Base, Device = B::Device>,
        V: Module<C>,
    {
        if let Some(planned) = &prepared.made {
            self.records.unmeasured = self.on.after_planning(&self.planner);
            let budget = self.planner.budget();
            let report = self.settings.report::<C, _>(
                model,
                budget,
                (phase, planned, None),
                &self.records.plans,
            );
            self.records.plans.push(report);
            self.loading.let_ahead(planned.rehearsed.loader_limit);
        }
        let gave_back = self.on.make_room(&mut self.planner, prepared)?;
        self.records.unmeasured = self.records.unmeasured.max(usize::from(gave_back));
        Ok(())
    }

    /// Compares the first batches of each plan with its prediction.
    fn measure(&mut self) -> Result<(), TrainError> {
        let Self { on, planner, settings, records, proofs, .. } = self;
        if records.unmeasured > 0 {
            records.unmeasured -= 1;
            records.memory.checking = proofs.took();
            measure::<B::Base>(on.device(), planner, settings, &mut records.memory)?;
        }
        Ok(())
    }
}

/// Rehearses `step` on the micro-batches `split` of a batch.
fn rehearse_step<B, M, O, I, S, R>(
    model: &M,
    optim: &O,
    (splitter, batch): (&S, (&I, usize, f64)),
    split: Split,
    course: RehearsalPlan,
    step: &mut Step<'_, B, M, O, I, S, R>,
    recorder: &StepRecorder,
) -> Result<Rehearsal, TrainError>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
    O: Clone,
    S: Splitter<I>,
{
    let pieces = representative(split, 1, course.pages);
    let mut failed = None;
    let rehearsed = guard(Phase::Training, split.largest(), || {
        rehearse::<B, _>(recorder, model, |model| {
            // Leaves of its own: see `rehearse_training`.
            let mut current = with_own_leaves(model.clone());
            let mut optim = optim.clone();
            label_parameters(model);
            if course.has_stepped {
                mark::<B::Base>(Mark::SteppedBefore);
            }
            for iteration in 1..=course.iterations as usize {
                let pieces = Rehearsing::new(course.pieces(&pieces, iteration));
                let mut parts = MicroBatches::rehearsed(splitter, batch, pieces);
                let result = step(&mut current, &mut optim, &mut parts);
                parts.end();
                if let Err(error) = result {
                    failed = Some(error);
                    return;
                }
            }
        })
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let mut rehearsal = rehearsed?;
    label_by_lifetime(&mut rehearsal.trace);
    retire_what_is_replaced(&mut rehearsal.trace);
    Ok(rehearsal)
}
