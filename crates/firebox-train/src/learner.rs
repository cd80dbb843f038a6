//! The Learner: the API that users write against. Everything else in this crate
//! runs below [`Learner::fit`] or [`Learner::plan`].

mod builder;

use std::io::IsTerminal;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::train::renderer::MetricsRenderer;
use burn::train::{
    InferenceStep, LearningComponentsTypes, SupervisedTraining, TrainStep, TrainingStrategy,
};
use firebox_lazy::StepRecorder;
use firebox_plan::Split;
use firebox_ranks::Ranks;
use firebox_saved::SavedTrace;

pub use self::builder::{LearnerBuilder, Unset};
use crate::check::SplitCheck;
use crate::components::{Components, TrainingBackend};
use crate::device::panics::{Listener, panic_message};
use crate::error::{FitError, Phase, TrainError};
use crate::iteration::queue::give_back;
use crate::parameters::shapes_of;
use crate::planner::parked::Parks;
use crate::planner::rehearsal::{Iterations, RehearsalPlan, rehearse_training};
use crate::planner::shape::Shape;
use crate::progress::{Renderer, Screen};
use crate::ranks::Team;
use crate::ranks::metrics::Metrics;
use crate::ranks::quiet::with_ranks;
use crate::ready::make_ready;
use crate::report::{MemoryUse, PlanReport};
use crate::run::checkpoints::{newest_checkpoint, unreadable_checkpoint};
use crate::run::strategy::{AutoBatch, Outcome};
use crate::saved::SavedPlanner;
use crate::settings::{Later, Settings, Telling};
use crate::splitter::Splitter;
use crate::whole::Joining;

/// Whether burn shows its dashboard if no renderer was set.
fn burns_dashboard_shows() -> bool {
    cfg!(feature = "tui") && std::io::stdout().is_terminal()
}

/// The settings of a run, with where it is shown.
fn for_fit(settings: Settings) -> Settings {
    let (settings, dashboard) = (settings.of_rank(), burns_dashboard_shows());
    let screen = (settings.telling.progress && !dashboard).then(Screen::new);
    let later = (dashboard && std::io::stderr().is_terminal()).then(Later::default);
    let telling = Telling { metrics: Metrics::default(), screen, later, ..settings.telling };
    Settings { telling, ..settings }
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
            sees_parts: false,
            train_splitter: Unset,
            valid_splitter: Unset,
        }
    }
}

/// A trained model.
pub struct Fitted<M> {
    /// The model, without automatic differentiation.
    pub model: M,
    /// burn's renderer, for an evaluation after training. burn's dashboard leaves the terminal when
    /// it is dropped.
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
    /// Dropped after the renderer.
    _later: Option<Later>,
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
    B: TrainingBackend,
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
        let planner = settings.planner::<B, _>(&self.model)?;
        let parks = settings.parks(planner.memory().is_on_host());
        let mut planner = planner.parking(parks);
        let pages = !planner.memory().is_on_host();
        let (states, joins) = (&settings.states, &settings.joins);
        let rehearse = |split: Split, how: (Iterations, Joining), recorder: &StepRecorder| {
            let (iterations, join) = (how.0, joins.of(how.1));
            let course = RehearsalPlan {
                iterations,
                has_stepped: false,
                batches: 1,
                pages,
                exchanges: settings.ranks.is_some(),
                parks: parks == Parks::Does,
            };
            let rehearsed = states.kept(|| {
                rehearse_training(&learner, splitter, batch, split, course, join, recorder)
            });
            if !recorder.refuses_reads() {
                give_back::<B::Base>(&self.model.devices()[0]);
            }
            rehearsed
        };
        let joining = joins.wanted::<M::Output>();
        let planned = planner.plan_alone(Shape::of_items(items), joining, rehearse)?;
        let mut quiet = settings.clone();
        quiet.telling.quiet = true;
        Ok(quiet.report::<B, _>(
            &self.model,
            planner.budget(),
            (Phase::Training, &planned, None),
            &[],
        ))
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
        let settle = |recorder: &StepRecorder| {
            if !recorder.refuses_reads() {
                give_back::<B::Base>(&self.model.devices()[0]);
            }
        };
        let batch = (&self.builder.train_splitter, batch);
        crate::saved::record(&learner, batch, &self.builder.settings, settle, |_| {})
    }

    /// The largest batch that fits without being split, within the budget on the model's device.
    /// Zero if one item does not fit.
    ///
    /// Records the first items of `batch` as [`trace`](Self::trace) does, and tries batch sizes on
    /// the record: doubles, then halves. A larger batch may still fit where pages are opened at
    /// sizes that other batches do not need. For devices that are not there, give the trace to a
    /// [`SavedPlanner`](crate::SavedPlanner).
    ///
    /// # Errors
    ///
    /// As [`trace`](Self::trace), and if the budget cannot be determined.
    pub fn largest_batch(&self, batch: &M::Input) -> Result<usize, TrainError> {
        let others = make_ready::<B, _>(&self.model)?;
        let trace = self.trace(batch)?;
        let settings = Settings { others, ..self.builder.settings.clone() };
        let planner = settings.planner::<B, _>(&self.model)?;
        let device = format!("{:?}", self.model.devices()[0]);
        let (memory, budget) = (planner.memory().clone(), planner.budget());
        SavedPlanner::new(device, memory, budget).largest_batch(&trace)
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
        let ranks = self.builder.settings.ranks.clone();
        let conclude = |cause| match ranks.clone().map(Team::new) {
            Some(mut team) => team.conclude(Err(cause)).expect_err("it has failed"),
            None => cause,
        };
        let others = make_ready::<B, _>(&self.model)
            .map_err(|cause| FitError::new(conclude(cause), None))?;
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let LearnerBuilder { settings, train_splitter, valid_splitter, .. } = self.builder;
        let settings = Settings { others, ..for_fit(settings) };
        // The latter is dropped after what holds burn's renderer.
        let (screen, later) = (settings.telling.screen.clone(), settings.telling.later.clone());
        let training = with_ranks(training, &settings);
        let training = resumed(training, &settings);
        let states = settings.states.clone();
        let strategy = AutoBatch {
            settings,
            train_splitter,
            valid_splitter,
            shapes: shapes_of::<B, _>(&self.model),
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
                let cause = if outcome.is_concluded { cause } else { conclude(cause) };
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
                _later: later,
            }),
        }
    }
}

/// burn's training, to go on from the checkpoint that the user asked for. Other ranks than the
/// first take over its state.
fn resumed<LC: LearningComponentsTypes>(
    training: SupervisedTraining<LC>,
    settings: &Settings,
) -> SupervisedTraining<LC> {
    let reads = settings.ranks.as_ref().is_none_or(Ranks::is_root);
    let Some(directory) = settings.resume.as_ref().filter(|_| reads) else { return training };
    match newest_checkpoint(directory) {
        Some(epoch) => {
            let text = format!("going on after epoch {epoch} of {}", directory.display());
            settings.say(log::Level::Info, &text);
            training.checkpoint(epoch)
        }
        None => training,
    }
}
