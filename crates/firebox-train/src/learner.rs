//! The Learner and its builder: the API that users write against. Everything else in this crate
//! runs below [`Learner::fit`] or [`Learner::plan`].

use std::io::IsTerminal;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::MetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep, TrainingStrategy};
use firebox_lazy::{HiddenState, LazyBackend, Recorder};
use firebox_plan::{Budget, Cliffs, Sizing, Split};
use firebox_saved::SavedTrace;

use crate::check::{Coupling, SplitCheck};
use crate::components::Components;
use crate::device::DeviceMemory;
use crate::device::panics::{Listener, panic_message};
use crate::error::{FitError, Phase, TrainError};
use crate::planner::rehearsal::{Iterations, RehearsalPlan, rehearse_training};
use crate::planner::shape::Shape;
use crate::progress::{Renderer, Screen};
use crate::ready::make_ready;
use crate::reduction::Reduction;
use crate::report::{MemoryUse, PlanReport};
use crate::run::checkpoints::unreadable_checkpoint;
use crate::run::micro_step::give_back;
use crate::run::strategy::{AutoBatch, Outcome};
use crate::settings::Settings;
use crate::splitter::{ByMicroBatch, Splitter};

/// Options of a [`Learner`]. See [`Learner::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LearnerBuilder<ST, SV> {
    pub(crate) settings: Settings,
    pub(crate) train_splitter: ST,
    valid_splitter: SV,
}

/// The builder before it is told how batches are cut.
#[derive(Clone, Copy, Debug)]
pub struct Unset;

impl LearnerBuilder<Unset, Unset> {
    /// Cuts batches through their own [`MicroBatch`](firebox_batch::MicroBatch) implementation, in
    /// training and in validation.
    pub fn auto_batch(self) -> LearnerBuilder<ByMicroBatch, ByMicroBatch> {
        self.auto_batch_with(ByMicroBatch, ByMicroBatch)
    }

    /// Cuts batches with splitters, for batch types of another crate.
    ///
    /// One splitter is for the training loader's batches, the other for the validation loader's.
    /// [`ByFunctions`](crate::ByFunctions) makes a splitter from two functions.
    pub fn auto_batch_with<ST, SV>(
        self,
        train_splitter: ST,
        valid_splitter: SV,
    ) -> LearnerBuilder<ST, SV> {
        LearnerBuilder { settings: self.settings, train_splitter, valid_splitter }
    }
}

impl<ST, SV> LearnerBuilder<ST, SV> {
    /// The memory that training may use, including parameters and optimizer state.
    ///
    /// Default: [`Budget::free`], the memory that is free on the device when training starts, minus
    /// a margin.
    ///
    /// Includes batches that loader threads have prepared. Excludes what the program holds outside
    /// of training, such as a data set or another model on the device: a budget in bytes is what
    /// training adds, and free memory does not count them.
    pub fn memory(mut self, budget: impl Into<Budget>) -> Self {
        self.settings.budget = budget.into();
        self
    }

    /// Runs micro-batches of `items` items (the last may be smaller) instead of the largest that
    /// fit. If they do not fit, training still ends with an error.
    pub fn micro_batch(mut self, items: usize) -> Self {
        self.settings.sizing = Sizing::Fixed(items.into());
        self
    }

    /// How micro-batch sizes are chosen. Default: [`Sizing::Even`].
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.settings.sizing = sizing;
        self
    }

    /// What to do where a slightly larger micro-batch needs far more memory.
    ///
    /// Default: [`Cliffs::Avoid`] on devices whose allocator reserves whole pages,
    /// [`Cliffs::Ignore`] elsewhere.
    pub fn cliffs(mut self, cliffs: Cliffs) -> Self {
        self.settings.cliffs = Some(cliffs);
        self
    }

    /// How the loss of a batch is computed from the losses of its items. Default:
    /// [`Reduction::Mean`].
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.settings.reduction = reduction;
        self
    }

    /// Splits batches even if `coupling` makes their gradient differ from the whole batch's.
    ///
    /// Default: such a batch is [`TrainError::Coupled`] before it is split. Call once per accepted
    /// coupling.
    pub fn split_although(mut self, coupling: Coupling) -> Self {
        self.settings.accepted.push(coupling);
        self
    }

    /// Makes a resumed run draw the same random numbers as an uninterrupted one.
    ///
    /// The device is seeded at the beginning of each epoch, from this number and the epoch's.
    /// Loaders are advanced to the epoch that training resumes with. Default: neither, as in burn.
    /// burn's checkpoints hold neither the random state, which cannot be read from a backend, nor
    /// the position of loaders.
    ///
    /// To advance a loader, firebox asks it for one iterator and one batch per skipped epoch.
    /// burn's loaders then shuffle as in an uninterrupted run. A custom loader whose batches come
    /// only once loses these batches.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = Some(seed);
        self
    }

    /// Declares state that the model's step keeps outside of its parameters and running statistics,
    /// and how to restore it after a rehearsal.
    ///
    /// Default: such state is [`TrainError::HiddenState`]. Call once per state.
    ///
    /// The state is not saved in the model's checkpoints. After a [`FitError`] it may be ahead of
    /// the [`LastState`](crate::LastState).
    pub fn hidden_state(mut self, state: impl HiddenState) -> Self {
        self.settings.states = self.settings.states.with(state);
        self
    }

    /// Ends training gracefully on ctrl-c (`SIGINT`) and on `SIGTERM`, which schedulers and
    /// containers send.
    ///
    /// Training ends after the running optimizer step; a running validation also ends. If burn's
    /// checkpointer is set, a checkpoint of that epoch is written. [`fit`](Learner::fit) returns
    /// the model, with [`Fitted::stopped`] set. A second ctrl-c ends the process.
    ///
    /// Default: ctrl-c ends the process, and burn's [`Interrupter`](burn::train::Interrupter) ends
    /// training. Outside of `fit`, ctrl-c ends the process in either case. From the first such
    /// `fit` on, it does so even if the program has a handler of its own. A program with its own
    /// handler should stop the interrupter itself instead.
    pub fn stop_on_ctrl_c(mut self) -> Self {
        self.settings.stops_on_ctrl_c = true;
        self
    }

    /// Computes the running mean and variance of burn's [`BatchNorm`](burn::nn::BatchNorm) over the
    /// whole batch when it is split.
    ///
    /// They are pooled over its micro-batches, and `momentum` is applied once. Default: they follow
    /// each micro-batch, the last one most.
    ///
    /// `momentum` must be the momentum of all batch normalizations in the model (0.1 unless their
    /// config says otherwise), and each of them must run once per step. With another momentum, or a
    /// layer that runs twice, means are right and variances are not. The step still normalizes by
    /// each micro-batch's own statistics, which the gradient follows. All items of a batch count
    /// equally. Pooling takes six times the bytes of these statistics, which no plan counts.
    ///
    /// # Panics
    ///
    /// If `momentum` is not in (0, 1].
    pub fn pool_statistics(mut self, momentum: f64) -> Self {
        assert!(momentum > 0.0 && momentum <= 1.0, "a momentum is in (0, 1], not {momentum}");
        self.settings.pools_statistics = Some(momentum);
        self
    }

    /// Shows the metrics one joined output of this type per batch, instead of one per micro-batch.
    ///
    /// Use it for metrics that burn computes per output and whose mean then differs, such as AUROC,
    /// precision and recall. `join` receives the outputs with their shares of the batch's loss. The
    /// shares add up to one; under [`Reduction::Sum`] each is one. `join` must detach what it keeps
    /// of the outputs. [`join`](mod@crate::join) has functions for burn's own outputs.
    ///
    /// Training and validation outputs are different types, on the backend with and without
    /// automatic differentiation. Each is joined only if a `join` for its type is given. The
    /// outputs of the whole batch then stay on the device, for a while twice. The plan counts this,
    /// except where a batch is halved while it runs, as can happen with a longer sequence on the
    /// CPU.
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

    /// Ends training with [`TrainError::OverBudget`] if measured memory exceeds the budget.
    ///
    /// Default: a warning. On devices, measured is what the allocator holds. On the CPU it is what
    /// the process has grown by (on Linux only), and a fifth of the budget plus 8 MiB is tolerated
    /// for the overhead of the system's allocator. Memory is measured after the first batches of
    /// each plan and at the end of each epoch.
    pub fn strict(mut self) -> Self {
        self.settings.is_strict = true;
        self
    }

    /// Does not print the plan before training. Default: it is printed to standard error.
    pub fn quiet(mut self) -> Self {
        self.settings.quiet = true;
        self
    }

    /// Shows training on standard error: a bar that moves with every micro-batch, and a line for
    /// each epoch with the means of the metrics, the items trained on in a second, and the memory
    /// predicted and measured so far. Planning in several rehearsals that takes over half a second
    /// shows as well. Without a terminal there are only the lines. Colors follow `NO_COLOR`.
    ///
    /// Replaces the renderer that was set on burn's training. With the feature `tui` and on a
    /// terminal it does nothing: burn's dashboard shows training there. Default: burn's renderer.
    ///
    /// A mean weighs the values of micro-batches by their items, as burn's summary does.
    pub fn progress(mut self) -> Self {
        self.settings.progress = true;
        self
    }

    /// Saves a trace of the first training batch, see [`Learner::trace`], before it runs. The
    /// recordings take memory that no plan counts.
    ///
    /// A step that cannot be saved is a warning; a file that cannot be written is
    /// [`TrainError::TraceNotWritten`].
    pub fn save_trace(mut self, path: impl Into<PathBuf>) -> Self {
        self.settings.trace_path = Some(path.into());
        self
    }

    /// Builds the Learner from a model, an optimizer and a learning-rate scheduler. A number as the
    /// scheduler is a constant rate.
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

/// Whether burn shows its dashboard if no renderer was set.
fn burns_dashboard_shows() -> bool {
    cfg!(feature = "tui") && std::io::stdout().is_terminal()
}

/// Trains a model on batches of any size, in micro-batches that fit into memory.
///
/// Replaces burn's `Learner`. Everything else stays burn's: the model and its [`TrainStep`],
/// optimizer, learning-rate scheduler, data loaders, metrics, dashboard, checkpoints and early
/// stopping. All are set on burn's own [`SupervisedTraining`].
pub struct Learner<B, LR, M, O, ST, SV> {
    model: M,
    optim: O,
    lr_scheduler: LR,
    builder: LearnerBuilder<ST, SV>,
    backend: PhantomData<fn() -> B>,
}

impl Learner<(), (), (), (), (), ()> {
    /// The options of a Learner, with their defaults. Call
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
    /// burn's renderer, for an evaluation after training.
    pub renderer: Box<dyn MetricsRenderer>,
    /// The plan of the first batch. `None` if no batch was trained on, for example when training
    /// resumes after its last epoch.
    pub report: Option<PlanReport>,
    /// All plans, for every size and shape of batch in training and validation, in the order they
    /// were made.
    pub plans: Vec<PlanReport>,
    /// Predicted memory, and measured memory where the device's allocator reports it. `None` in the
    /// same case as `report`.
    pub memory: Option<MemoryUse>,
    /// Why training stopped before its last epoch, if burn's interrupter was stopped: by the
    /// dashboard, by the program, or by ctrl-c.
    pub stopped: Option<String>,
    /// Whether the gradients of split batches are known to equal the whole batches'.
    pub split_check: SplitCheck,
}

/// The result of [`Learner::fit`]: the trained model, or why training stopped and what is left.
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
    /// The plan for a batch, without training. Leaves the model, its running statistics and the
    /// random state unchanged.
    ///
    /// Excludes memory that only a training run has: batches of loader threads, a checkpoint being
    /// written, groups of batches for `grads_accumulation`, and pages left by batches of other
    /// shapes. [`fit`](Self::fit) counts these, and may split further.
    ///
    /// # Errors
    ///
    /// If the batch cannot be cut, or does not fit however it is cut.
    pub fn plan(&self, batch: &M::Input) -> Result<PlanReport, TrainError> {
        let others = make_ready::<B, _>(&self.model)?;
        let _listener = Listener::of_all();
        let splitter = &self.builder.train_splitter;
        let items = splitter.items(batch)?;
        let learner = self.learner();
        let settings = &Settings { others, ..self.builder.settings.clone() };
        let mut planner = settings.planner::<B, _>(&self.model)?;
        let pages = !planner.memory().is_on_host();
        let (states, joins) = (&settings.states, &settings.joins);
        let rehearse = |split: Split, iterations: Iterations, recorder: &Recorder| {
            let course = RehearsalPlan { iterations, has_stepped: false, batches: 1, pages };
            let rehearsed = states.kept(|| {
                rehearse_training(&learner, splitter, batch, split, course, joins, recorder)
            });
            if !recorder.refuses_reads() {
                give_back::<B>(&self.model.devices()[0]);
            }
            rehearsed
        };
        let planned = planner.plan_alone(Shape::of_items(items), rehearse)?;
        let quiet = Settings { quiet: true, ..settings.clone() };
        Ok(quiet.report::<B, _>(&self.model, planner.budget(), (Phase::Training, &planned), &[]))
    }

    /// Records the step, without training, so that its memory can be predicted for any card, batch
    /// size and split. See [`SavedPlanner`](crate::SavedPlanner). Leaves the model unchanged, as
    /// [`plan`](Self::plan) does.
    ///
    /// About a hundred batches are recorded, of the first up to 24 items of `batch`. A smaller one
    /// tells about fewer splits. Nothing is computed, unless the model reads values.
    ///
    /// # Errors
    ///
    /// If the batch cannot be cut, the step cannot be recorded, or it is another program for other
    /// batch sizes ([`TrainError::NotSaved`]).
    pub fn trace(&self, batch: &M::Input) -> Result<SavedTrace, TrainError> {
        make_ready::<B, _>(&self.model)?;
        let _listener = Listener::of_all();
        let learner = self.learner();
        let settle = |recorder: &Recorder| {
            if !recorder.refuses_reads() {
                give_back::<B>(&self.model.devices()[0]);
            }
        };
        let batch = (&self.builder.train_splitter, batch);
        crate::saved::record(&learner, batch, &self.builder.settings, settle, |_| {})
    }

    fn learner(&self) -> burn::train::Learner<Components<B, LR, M, O>> {
        let (model, optim) = (self.model.clone(), self.optim.clone());
        burn::train::Learner::new(model, optim, self.lr_scheduler.clone())
    }

    /// Trains the model. `training` is burn's own, with everything that was set on it, except that
    /// its training strategy is replaced.
    ///
    /// # Errors
    ///
    /// Before training:
    /// - something the device needs is not installed
    /// - the checkpoint to resume from cannot be read
    /// - no split of a batch fits
    /// - the model lives on several devices
    /// - the model keeps tensors where planning cannot restore them
    ///
    /// During training:
    /// - a step, the data set, its batcher, a metric or a scheduler panics
    /// - a batch cannot be cut
    /// - a checkpoint cannot be written
    ///
    /// An error during training carries the state after the last whole optimizer step. If the
    /// device fails, for example because its memory runs out despite the plan, see
    /// [`TrainError::DeviceFailed`]. An interrupt by the user is not an error.
    ///
    /// # Panic hook
    ///
    /// The first call installs a panic hook in front of the program's own. It calls the program's
    /// hook for every panic, except for panics of a step that was given zeros for a value it must
    /// not read. While a Learner trains, the hook also listens for panics of the device's threads.
    pub fn fit(
        self,
        training: SupervisedTraining<Components<B, LR, M, O>>,
    ) -> FitResult<B, LR, M, O> {
        let others = make_ready::<B, _>(&self.model).map_err(|cause| FitError::new(cause, None))?;
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let LearnerBuilder { settings, train_splitter, valid_splitter } = self.builder;
        let shows = settings.progress && !burns_dashboard_shows();
        let screen = shows.then(Screen::new);
        let settings = Settings { others, screen: screen.clone(), ..settings };
        let states = settings.states.clone();
        let strategy = AutoBatch {
            settings,
            train_splitter,
            valid_splitter,
            scheduler: self.lr_scheduler.clone(),
            outcome: outcome.clone(),
        };
        let learner = burn::train::Learner::new(self.model, self.optim, self.lr_scheduler);
        let training =
            training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        let training = match &screen {
            Some(screen) => training.renderer(Renderer(screen.clone())),
            None => training,
        };
        let listener = Listener::of_all();
        // After a device failure, burn's metrics thread may be gone, and burn panics when it
        // notices.
        let launch = || states.kept(|| training.launch(learner));
        let result = catch_unwind(AssertUnwindSafe(launch));
        screen.iter().for_each(Screen::close);
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
