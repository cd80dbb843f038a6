//! The Learner and its builder: what a user writes.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::MetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep, TrainingStrategy};
use firebox_lazy::{HiddenState, LazyBackend};
use firebox_plan::{Budget, Cliffs, Sizing};

use crate::check::{Coupling, SplitCheck};
use crate::checkpoints::unreadable_checkpoint;
use crate::device::DeviceMemory;
use crate::error::{FitError, Phase, TrainError, panic_message};
use crate::gradients::Reduction;
use crate::micro_step::give_back;
use crate::panics::Listener;
use crate::ready::make_ready;
use crate::rehearsal::{Course, Iterations, rehearse_training};
use crate::report::{MemoryUse, PlanReport};
use crate::settings::Settings;
use crate::shape::Shape;
use crate::splitter::{ByMicroBatch, Splitter};
use crate::strategy::{AutoBatch, Components, Outcome};

/// Options of a [`Learner`]. See [`Learner::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LearnerBuilder<ST, SV> {
    settings: Settings,
    train_splitter: ST,
    valid_splitter: SV,
}

/// The builder before it knows how batches are cut.
#[derive(Clone, Copy, Debug)]
pub struct Unset;

impl LearnerBuilder<Unset, Unset> {
    /// Cuts batches by their own [`MicroBatch`](firebox_batch::MicroBatch), in training and in validation.
    pub fn auto_batch(self) -> LearnerBuilder<ByMicroBatch, ByMicroBatch> {
        self.auto_batch_with(ByMicroBatch, ByMicroBatch)
    }

    /// Cuts batches by splitters, for batches of another crate's type: one for the training loader's batches, one
    /// for the validation loader's. [`ByFunctions`](crate::ByFunctions) makes a splitter of two functions.
    pub fn auto_batch_with<ST, SV>(
        self,
        train_splitter: ST,
        valid_splitter: SV,
    ) -> LearnerBuilder<ST, SV> {
        LearnerBuilder { settings: self.settings, train_splitter, valid_splitter }
    }
}

impl<ST, SV> LearnerBuilder<ST, SV> {
    /// The memory that training may use, parameters and optimizer state included. Default: [`Budget::free`], which
    /// is what the device has free when training starts, less a margin.
    ///
    /// Batches that loader threads have prepared are part of it. Excludes what the program holds beside training, such as a data
    /// set or another model on the device: a number of bytes is what training adds, and free memory is what is free beside
    /// them.
    pub fn memory(mut self, budget: impl Into<Budget>) -> Self {
        self.settings.budget = budget.into();
        self
    }

    /// Runs batches in micro-batches of `items` items (the last may be smaller) instead of the largest that fit.
    /// Still an error if they do not fit.
    pub fn micro_batch(mut self, items: usize) -> Self {
        self.settings.sizing = Sizing::Fixed(items.into());
        self
    }

    /// How micro-batch sizes are chosen. Default: [`Sizing::Even`].
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.settings.sizing = sizing;
        self
    }

    /// What to do where a slightly larger micro-batch needs far more memory. Default: [`Cliffs::Avoid`] on devices whose allocator
    /// reserves whole pages, [`Cliffs::Ignore`] on the CPU.
    pub fn cliffs(mut self, cliffs: Cliffs) -> Self {
        self.settings.cliffs = Some(cliffs);
        self
    }

    /// How the loss of a batch follows from those of its items. Default: [`Reduction::Mean`].
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.settings.reduction = reduction;
        self
    }

    /// Splits batches although their gradients are then not the whole batch's, for this reason. Default: that is
    /// [`TrainError::Coupled`], before training. Can be called for several reasons.
    pub fn split_although(mut self, coupling: Coupling) -> Self {
        self.settings.accepted.push(coupling);
        self
    }

    /// Makes a run that goes on from a checkpoint draw what it would have drawn without a stop: the device is seeded at the beginning
    /// of each epoch, by this number and that of the epoch, and loaders are taken to where they would be. Default: as in burn, whose
    /// checkpoints hold neither, since a backend's random state cannot be read.
    ///
    /// A loader is asked for an iterator and one batch of each epoch that is skipped, after which burn's shuffle as they would have.
    /// A loader of your own whose batches come but once loses these.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = Some(seed);
        self
    }

    /// Says what the model's step keeps outside of its parameters and running statistics, and how to give it back behind a
    /// rehearsal. Default: what is kept elsewhere is [`TrainError::HiddenState`]. Can be called for several.
    ///
    /// It is not saved with the model's checkpoints, and after a [`FitError`] it may be ahead of the [`LastState`](crate::LastState).
    pub fn hidden_state(mut self, state: impl HiddenState) -> Self {
        self.settings.states = self.settings.states.with(state);
        self
    }

    /// Ends training behind the running optimizer step, and in the running validation, where the process is asked to end: by ctrl-c
    /// (`SIGINT`) or by `SIGTERM`, as schedulers and containers send it. A checkpoint of that epoch is written where burn's
    /// checkpointer is set, and [`fit`](Learner::fit) returns the model, with [`Fitted::stopped`]. The second ctrl-c ends the process.
    ///
    /// Default: ctrl-c ends the process, and burn's [`Interrupter`](burn::train::Interrupter) training. Outside of `fit` it ends the
    /// process either way, from then on also where the program had a handler of its own: such a program stops the interrupter itself.
    pub fn stop_on_ctrl_c(mut self) -> Self {
        self.settings.stops_on_ctrl_c = true;
        self
    }

    /// Makes the running mean and variance of burn's [`BatchNorm`](burn::nn::BatchNorm) those of the whole batch where it is split: pooled
    /// over its micro-batches, with `momentum` applied once. Default: they follow each micro-batch, and the last one most.
    ///
    /// `momentum` is that of all of the model's batch normalizations, 0.1 unless their config says another, and each of them runs once in a
    /// step: with another momentum, or one that runs twice, means are right and variances are not. What a step normalizes by, and with it
    /// the gradient, stays a micro-batch's. The items of a batch count alike. It takes six times the bytes of these statistics, which no
    /// plan counts.
    ///
    /// # Panics
    ///
    /// If `momentum` is not in (0, 1].
    pub fn pool_statistics(mut self, momentum: f64) -> Self {
        assert!(momentum > 0.0 && momentum <= 1.0, "a momentum is in (0, 1], not {momentum}");
        self.settings.pools_statistics = Some(momentum);
        self
    }

    /// Shows the metrics one output of this type for each batch, joined of those of its micro-batches, instead of one for each micro-batch:
    /// for metrics that burn computes output by output and whose mean is then another number, such as AUROC, precision and recall. `join`
    /// is given the outputs with their shares in the batch's loss (which add up to one, or under [`Reduction::Sum`] are one each), and
    /// detaches what it keeps of them; [`join`](mod@crate::join) has it for burn's own outputs.
    ///
    /// Outputs of training and of validation are of two types, on the backend with and without automatic differentiation, and each is
    /// joined if it is told so. The outputs of the whole batch then lie on the device, for a while twice, which the plan counts; not
    /// where a batch is halved while it runs, as a longer sequence may be on the CPU.
    ///
    /// ```
    /// # use burn::backend::{Autodiff, Flex};
    /// # use firebox_lazy::Lazy;
    /// # use firebox_train::{Learner, join};
    /// # type B = Autodiff<Lazy<Flex>>;
    /// let builder = Learner::builder()
    ///     .metrics_see_whole(join::classification::<B>)
    ///     .metrics_see_whole(join::classification::<Lazy<Flex>>);
    /// ```
    pub fn metrics_see_whole<T: 'static>(
        mut self,
        join: impl Fn(Vec<(T, f64)>) -> T + Send + Sync + 'static,
    ) -> Self {
        self.settings.joins = self.settings.joins.with(join);
        self
    }

    /// Ends training with [`TrainError::OverBudget`] where more is measured than the budget, instead of warning of it: on devices what
    /// their allocator holds, on the CPU what the process has grown by (on Linux; a fifth and 8 MiB more are taken for what the
    /// system's allocator adds). It is measured behind the first batches of each plan and at the end of each epoch.
    pub fn strict(mut self) -> Self {
        self.settings.is_strict = true;
        self
    }

    /// Does not print the plan before training. Default: it is printed to the standard error output.
    pub fn quiet(mut self) -> Self {
        self.settings.quiet = true;
        self
    }

    /// The Learner of a model, an optimizer and a learning-rate scheduler (a number is a constant rate).
    pub fn build<B, LR, M, O>(
        self,
        model: M,
        optim: O,
        lr_scheduler: LR,
    ) -> Learner<B, LR, M, O, ST, SV>
    where
        B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
        B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
        LR: LrScheduler + 'static,
        M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
        M::InnerModule: InferenceStep,
        O: Optimizer<M, B> + 'static,
        ST: Splitter<M::Input>,
        SV: Splitter<<M::InnerModule as InferenceStep>::Input>,
    {
        Learner { model, optim, lr_scheduler, builder: self, backend: PhantomData }
    }
}

/// Trains a model in batches of any size, in micro-batches that fit into memory.
///
/// Takes the place of burn's `Learner`; everything else stays burn's: the model and its
/// [`TrainStep`], optimizer, learning-rate scheduler, data loaders, metrics, dashboard, checkpoints and early
/// stopping, all set on burn's own [`SupervisedTraining`].
pub struct Learner<B, LR, M, O, ST, SV> {
    model: M,
    optim: O,
    lr_scheduler: LR,
    builder: LearnerBuilder<ST, SV>,
    backend: PhantomData<fn() -> B>,
}

impl Learner<(), (), (), (), (), ()> {
    /// Options of a Learner, at their defaults. Call
    /// [`auto_batch`](LearnerBuilder::auto_batch) next.
    pub fn builder() -> LearnerBuilder<Unset, Unset> {
        LearnerBuilder {
            settings: Settings::default(),
            train_splitter: Unset,
            valid_splitter: Unset,
        }
    }
}

/// A trained model.
pub struct Fitted<M> {
    /// The model, without automatic differentiation.
    pub model: M,
    /// burn's renderer, for an evaluation that follows.
    pub renderer: Box<dyn MetricsRenderer>,
    /// How the first batch was split. `None` if no batch was trained on, as when training resumes after its last epoch.
    pub report: Option<PlanReport>,
    /// The plans of all sizes and shapes of batches, training and validation, in the order in which they were made.
    pub plans: Vec<PlanReport>,
    /// What memory was predicted, and what was measured where the device's allocator can be asked. `None` as above.
    pub memory: Option<MemoryUse>,
    /// Why training stopped before its last epoch, if burn's interrupter was told: by the dashboard, by the program, or by ctrl-c.
    pub stopped: Option<String>,
    /// Whether the gradients of split batches are known to be the whole batches'.
    pub split_check: SplitCheck,
}

/// What [`Learner::fit`] gives: the trained model, or why training stopped and what is left.
pub type FitResult<B, LR, M, O> = Result<
    Fitted<<M as AutodiffModule<B>>::InnerModule>,
    FitError<M, <O as Optimizer<M, B>>::Record, <LR as LrScheduler>::Record<B>>,
>;

impl<M: std::fmt::Debug> std::fmt::Debug for Fitted<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fitted")
            .field("model", &self.model)
            .field("report", &self.report)
            .field("memory", &self.memory)
            .field("split_check", &self.split_check)
            .finish_non_exhaustive()
    }
}

impl<B, LR, M, O, ST, SV> Learner<B, LR, M, O, ST, SV>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    LR: LrScheduler + 'static,
    M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep,
    O: Optimizer<M, B> + 'static,
    ST: Splitter<M::Input>,
    SV: Splitter<<M::InnerModule as InferenceStep>::Input>,
{
    /// The plan for a batch, without training. Leaves the model, its running statistics and the random state as
    /// they are.
    ///
    /// Excludes what only a training run has beside its steps: batches of loader threads, a checkpoint that is being written, groups of
    /// batches for `grads_accumulation`, and pages that batches of other shapes have left. [`fit`](Self::fit) counts these, and may split
    /// further.
    ///
    /// # Errors
    ///
    /// If the batch cannot be cut, or does not fit however it is cut.
    pub fn plan(&self, batch: &M::Input) -> Result<PlanReport, TrainError> {
        let others = make_ready::<B, M>(&self.model)?;
        let _listener = Listener::of_all();
        let splitter = &self.builder.train_splitter;
        let items = splitter.items(batch)?;
        let (model, optim) = (self.model.clone(), self.optim.clone());
        let learner = burn::train::Learner::<Components<B, LR, M, O>>::new(
            model,
            optim,
            self.lr_scheduler.clone(),
        );
        let settings = &Settings { others, ..self.builder.settings.clone() };
        let mut planner = settings.planner::<B, M>(&self.model)?;
        let pages = !planner.memory.is_on_host();
        let course = Course { iterations: Iterations::Two, has_stepped: false, batches: 1, pages };
        let states = &settings.states;
        let planned = planner
            .plan(Phase::Training, Shape::of_items(items), course.iterations, |split, recorder| {
                let rehearsed = states.kept(|| {
                    rehearse_training(
                        &learner,
                        splitter,
                        batch,
                        split,
                        course,
                        &settings.joins,
                        recorder,
                    )
                });
                if !recorder.refuses_reads() {
                    give_back::<B>(&self.model.devices()[0]);
                }
                rehearsed
            })?
            .clone();
        let quiet = Settings { quiet: true, ..settings.clone() };
        Ok(quiet.report::<B, M>(&self.model, &planner, (Phase::Training, &planned), &[]))
    }

    /// Trains. `training` is burn's own, with everything that was set on it; its training strategy is replaced.
    ///
    /// # Errors
    ///
    /// Before training, if what the device needs is not installed, the checkpoint to go on from cannot be read, no split of a batch fits, the model lives on several devices or keeps tensors where
    /// planning cannot restore them. During training, if a step, the data set, its batcher, a metric or a scheduler panics, a batch
    /// cannot be cut, or a checkpoint cannot be written; the error then carries the state after the last whole optimizer step. If the device fails, as
    /// when its memory runs out all the same, see [`TrainError::DeviceFailed`]. A user's interrupt is no error.
    ///
    /// # Panic hook
    ///
    /// The first call puts a panic hook before the program's own, and calls that for every panic, but for those of a step that was given
    /// zeros for a value which it must not read. It listens to threads of the device while a Learner trains.
    pub fn fit(
        self,
        training: SupervisedTraining<Components<B, LR, M, O>>,
    ) -> FitResult<B, LR, M, O> {
        let others = make_ready::<B, M>(&self.model).map_err(|cause| FitError::new(cause, None))?;
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let LearnerBuilder { settings, train_splitter, valid_splitter } = self.builder;
        let settings = Settings { others, ..settings };
        let states = settings.states.clone();
        let strategy = AutoBatch {
            settings,
            train_splitter,
            valid_splitter,
            scheduler: self.lr_scheduler.clone(),
            outcome: outcome.clone(),
            components: PhantomData,
        };
        let learner = burn::train::Learner::new(self.model, self.optim, self.lr_scheduler);
        let training =
            training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        let listener = Listener::of_all();
        // After a failure of the device burn's metrics thread may be gone, and burn panics when it finds out.
        let launch = || states.kept(|| training.launch(learner));
        let result = catch_unwind(AssertUnwindSafe(launch));
        let mut outcome = outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match (outcome.failure.take(), result) {
            (Some((cause, state)), _) => Err(FitError::new(cause, state)),
            (None, Err(panic)) => {
                let message = || listener.heard_of_burn().unwrap_or_else(|| panic_message(&*panic));
                let cause = unreadable_checkpoint(&*panic)
                    .unwrap_or_else(|| TrainError::Panicked { message: message() });
                Err(FitError::new(cause, outcome.at_end.take()))
            }
            (None, Ok(result)) => Ok(Fitted {
                model: result.model,
                renderer: result.renderer,
                report: outcome.plans.first().cloned(),
                plans: std::mem::take(&mut outcome.plans),
                memory: outcome.memory.take(),
                stopped: outcome.stopped.take(),
                split_check: std::mem::take(&mut outcome.split_check),
            }),
        }
    }
}
