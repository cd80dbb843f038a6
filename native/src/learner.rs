//! The Learner: its options, and `fit`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn::train::renderer::MetricsRenderer;
use burn::train::{InferenceStep, LearnerModel, SupervisedTraining, TrainStep, TrainingStrategy};
use firebox_batch::MicroBatch;
use firebox_plan::Budget;
#[cfg(feature = "cubecl")]
use firebox_saved::SavedTrace;
use firebox_trace::Bytes;

use crate::error::{FitError, TrainError};
use crate::gauge::Gauge;
use crate::gradients::LossReduction;
use crate::planner::{Options, PlanReport, Planner};
use crate::rehearsal::Rehearsal;
#[cfg(feature = "cubecl")]
use crate::saved;
use crate::split_check::SplitCheck;
use crate::strategy::AutoBatch;

/// The options of a [`Learner`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LearnerBuilder {
    budget: Budget,
    pub(crate) reduction: LossReduction,
    splits: bool,
    pub(crate) accepts_coupling: bool,
    pub(crate) is_strict: bool,
    pub(crate) quiet: bool,
    pub(crate) seed: Option<u64>,
    pub(crate) log_path: Option<PathBuf>,
    report_path: Option<PathBuf>,
    progress: bool,
}

impl LearnerBuilder {
    /// Splits batches that do not fit, by their [`MicroBatch`] implementation. Without it, such a
    /// batch is [`TrainError::DoesNotFit`].
    pub fn auto_batch(mut self) -> Self {
        self.splits = true;
        self
    }

    /// The memory that training may use, including parameters and optimizer state. Default:
    /// [`Budget::free`], what is free when training starts, minus a margin. Of GPUs, only those of
    /// CUDA say that.
    pub fn memory(mut self, budget: impl Into<Budget>) -> Self {
        self.budget = budget.into();
        self
    }

    /// How the losses of items combine into the loss of a batch. Default: a mean.
    pub fn reduction(mut self, reduction: LossReduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Splits batches even if that changes their gradient. Default: [`TrainError::Coupled`], where
    /// a comparison of gradients shows it.
    pub fn split_although_coupled(mut self) -> Self {
        self.accepts_coupling = true;
        self
    }

    /// Ends training with [`TrainError::OverBudget`] after a step that took more than the budget.
    /// Default: a warning, and batches are planned anew.
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }

    /// Seeds the device at the beginning of each epoch and before each training batch, because
    /// planning draws random numbers, too: a run whose batches are whole then draws the same ones
    /// whatever was rehearsed, also if it is resumed. Default: the device is not seeded.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Shows on the terminal what is being planned, where that takes more than half a second.
    /// Training itself is shown by burn. Default: plans are printed when they are made.
    pub fn progress(mut self) -> Self {
        self.progress = true;
        self
    }

    /// Appends a line of JSON to the file at `path` for each optimizer step: a
    /// [`StepUse`](crate::StepUse). Default: no file.
    ///
    /// A file that cannot be written is [`TrainError::LogNotWritten`].
    pub fn log_json(mut self, path: impl Into<PathBuf>) -> Self {
        self.log_path = Some(path.into());
        self
    }

    /// Writes a page for browsers to the file at `path`, about where the memory of the first
    /// batch's plan goes: by operation, by module and by what tensors are for. The iteration is
    /// rehearsed once more for it. Default: no file.
    ///
    /// GPUs with burn's fusion say what they compute; on others, and if the file cannot be written,
    /// it is [`TrainError::NoReport`].
    pub fn report(mut self, path: impl Into<PathBuf>) -> Self {
        self.report_path = Some(path.into());
        self
    }

    /// Prints neither plans nor warnings. They are logged in either case.
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// These options as a strategy of burn's, for its own `launch`, which trains with `optim`. An
    /// error ends training, and is the reason of its interruption.
    ///
    /// ```
    /// # use burn::optim::AdamConfig;
    /// # use burn::train::{InferenceStep, LearnerModel, SupervisedTraining, TrainStep};
    /// # use firebox::{Learner, MicroBatch};
    /// # fn train<M: LearnerModel>(model: M, training: SupervisedTraining<M>)
    /// # where <M as TrainStep>::Input: MicroBatch, <M as InferenceStep>::Input: MicroBatch {
    /// let optim = AdamConfig::new().init();
    /// let strategy = Learner::builder().auto_batch().strategy(&optim);
    /// let learner = burn::train::Learner::new(model, optim, 1e-3);
    /// let result = training.with_training_strategy(strategy).launch(learner);
    /// # }
    /// ```
    pub fn strategy<M>(self, optim: &ModuleOptimizer) -> TrainingStrategy<M>
    where
        M: LearnerModel,
        <M as TrainStep>::Input: MicroBatch,
        <M as InferenceStep>::Input: MicroBatch,
    {
        let (outcome, optim) = (Arc::default(), optim.clone());
        TrainingStrategy::Custom(Arc::new(AutoBatch { settings: self, optim, outcome }))
    }

    /// A learner for a model with an optimizer and a learning rate or its scheduler.
    pub fn build<M: LearnerModel>(
        self,
        model: M,
        optim: ModuleOptimizer,
        lr_scheduler: impl Into<ModuleLrScheduler>,
    ) -> Learner<M> {
        Learner { model, optim, lr_scheduler: lr_scheduler.into(), builder: self }
    }

    /// Logs a text, and prints it.
    pub(crate) fn say(&self, level: log::Level, text: &str) {
        log::log!(level, "{text}");
        if !self.quiet {
            let warning = if level == log::Level::Warn { "warning: " } else { "" };
            eprintln!("{warning}{text}");
        }
    }

    /// Shows a plan, and warns if it has no prediction or making it took more than the budget.
    pub(crate) fn say_plan(&self, report: &PlanReport, is_first: bool) {
        let level = report.unpredicted.as_ref().map_or(log::Level::Info, |_| log::Level::Warn);
        self.say(level, &report.text(is_first));
        let (planning, budget) = (report.planning, report.budget);
        if planning > budget {
            let text = format!("planning took {planning}, more than the budget of {budget}");
            self.say(log::Level::Warn, &text);
        }
    }

    /// Writes the report on a plan, if the user wants one.
    pub(crate) fn write_report(
        &self,
        planner: &Planner,
        rehearsal: &mut impl Rehearsal,
        plan: &PlanReport,
    ) -> Result<(), TrainError> {
        match &self.report_path {
            Some(path) => planner.write_report(rehearsal, plan, path),
            None => Ok(()),
        }
    }

    /// The planner for a model on a device, whose parameters take `parameters`. Gradients of
    /// several batches may be summed, and it may be the Learner that trains, with metrics.
    pub(crate) fn planner(
        &self,
        device: &Device,
        parameters: Bytes,
        (accumulates, is_learners): (bool, bool),
    ) -> Result<Planner, TrainError> {
        if !device.is_autodiff() {
            return Err(TrainError::NoAutodiff);
        }
        let unknown = || TrainError::UnknownDevice { device: format!("{device:?}") };
        let gauge = Gauge::of(device).ok_or_else(unknown)?;
        if let Some(path) = self.report_path.as_ref().filter(|_| gauge.is_of_host()) {
            let message = format!("{} does not say what it computes", gauge.name());
            return Err(TrainError::NoReport { path: path.clone(), message });
        }
        gauge.give_back();
        let at_first = if gauge.is_of_host() { parameters } else { gauge.live() };
        let budget = match self.budget {
            Budget::Bytes(bytes) => bytes,
            // What is held is not free.
            Budget::Free { .. } => self.budget.resolve(&gauge.memory()?)? + at_first,
            _ => self.budget.resolve(&gauge.memory()?)?,
        };
        let options = Options {
            budget,
            parameters,
            at_first,
            splits: self.splits,
            accumulates,
            is_learners,
            shows: self.progress && !self.quiet,
        };
        Ok(Planner::new(gauge, options))
    }
}

/// Trains a model on batches of any size, in micro-batches that fit into memory.
///
/// Replaces the argument of burn's `launch`. Model, optimizer, loaders, metrics, checkpoints and
/// early stopping are burn's own.
pub struct Learner<M> {
    model: M,
    optim: ModuleOptimizer,
    lr_scheduler: ModuleLrScheduler,
    builder: LearnerBuilder,
}

impl Learner<()> {
    /// The options of a Learner.
    pub fn builder() -> LearnerBuilder {
        LearnerBuilder::default()
    }
}

/// A trained model.
#[non_exhaustive]
pub struct Fitted<M> {
    /// The model, without automatic differentiation.
    pub model: M,
    /// burn's renderer, for an evaluation.
    pub renderer: Box<dyn MetricsRenderer>,
    /// The plans, in the order in which they were made.
    pub plans: Vec<PlanReport>,
    /// Whether gradients of split batches are known to be right.
    pub split_check: SplitCheck,
    /// The most memory that was predicted.
    pub predicted: Bytes,
    /// The most memory that a step was measured to take: by the counting allocator if the program
    /// has [one](crate::PeakAlloc), otherwise by what the process had resident.
    pub measured: Bytes,
    /// The most items of a micro-batch, after the device could not compute larger ones. `None` if
    /// it computed all.
    pub smaller: Option<usize>,
    /// Why training stopped before its last epoch, if burn's interrupter was stopped.
    pub stopped: Option<String>,
}

/// What a run hands back besides the model.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) plans: Vec<PlanReport>,
    pub(crate) split_check: SplitCheck,
    pub(crate) predicted: Bytes,
    pub(crate) measured: Bytes,
    pub(crate) smaller: Option<usize>,
    pub(crate) failure: Option<TrainError>,
}

impl<M> Learner<M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
    <M as InferenceStep>::Input: MicroBatch,
{
    /// Records the step for batches of all sizes and all splits, for `firebox plan` and the other
    /// commands: about a hundred rehearsals on up to 24 items of `batch`, and two on all of them.
    /// Nothing is trained. What the command says of a card is what burn 0.21 and its kernels would
    /// take there, for the same operations.
    ///
    /// # Errors
    ///
    /// [`TrainError::NotTraced`] if the device does not say what it computes (GPUs with burn's
    /// fusion do), or if the step is another program for other sizes.
    #[cfg(feature = "cubecl")]
    pub fn trace(&self, batch: &<M as TrainStep>::Input) -> Result<SavedTrace, TrainError> {
        let Self { model, optim, lr_scheduler, builder } = self;
        let mut learner =
            burn::train::Learner::new(model.clone(), optim.clone(), lr_scheduler.clone());
        let device = learner.model().devices().first().cloned().unwrap_or_default();
        learner.fork(&device);
        let shows = builder.progress && !builder.quiet;
        let (model, lr) = (learner.model(), learner.lr_current());
        saved::trace((&model, lr), optim, batch, (&device, shows))
    }

    /// Trains with burn's supervised training, on the model's device. A training strategy of the
    /// training and its `gradient_checkpointing` have no effect: set checkpointing on the device.
    ///
    /// With `grads_accumulation(k)`, the gradient is the mean over the `k` batches by their
    /// weights, where burn adds their means.
    ///
    /// Memory is measured by resetting the peak of [`PeakAlloc`](crate::PeakAlloc), if the program
    /// has it: one training at a time.
    ///
    /// # Errors
    ///
    /// See [`TrainError`]. The error has the model after the last whole optimizer step.
    ///
    /// # Panics
    ///
    /// If the model's step, its batches' weights or one of burn's threads panics.
    pub fn fit(self, training: SupervisedTraining<M>) -> Result<Fitted<M>, Box<FitError<M>>> {
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let Self { model, optim, lr_scheduler, builder } = self;
        let strategy =
            AutoBatch { settings: builder, optim: optim.clone(), outcome: outcome.clone() };
        let strategy = TrainingStrategy::Custom(Arc::new(strategy));
        let learner = burn::train::Learner::new(model, optim, lr_scheduler);
        let result = training.with_training_strategy(strategy).launch(learner);
        let outcome = std::mem::take(&mut *outcome.lock().unwrap_or_else(PoisonError::into_inner));
        let failure = outcome.failure.or(result.error.map(TrainError::Burn));
        if let Some(cause) = failure {
            return Err(FitError { cause, model: result.model }.into());
        }
        let Outcome { plans, split_check, predicted, measured, smaller, .. } = outcome;
        let stopped = result.interrupted.map(|stop| stop.reason.unwrap_or("interrupted".into()));
        Ok(Fitted {
            model: result.model,
            renderer: result.renderer,
            plans,
            split_check,
            predicted,
            measured,
            smaller,
            stopped,
        })
    }
}

/// The bytes of a model's parameters and running statistics.
pub(crate) fn parameter_bytes<M: Module>(model: &M) -> Bytes {
    struct Count(u64);

    impl Count {
        fn add(&mut self, elements: usize, size: usize) {
            self.0 += (elements * size) as u64;
        }
    }

    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.val();
            self.add(tensor.shape().num_elements(), tensor.dtype().size());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let tensor = param.val();
            self.add(tensor.shape().num_elements(), tensor.dtype().size());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            let tensor = param.val();
            self.add(tensor.shape().num_elements(), tensor.dtype().size());
        }
    }

    let mut count = Count(0);
    model.visit(&mut count);
    Bytes::new(count.0)
}
