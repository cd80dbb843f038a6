//! The options of a Learner.

use std::marker::PhantomData;
use std::path::PathBuf;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::train::{InferenceStep, TrainStep};
use firebox_lazy::HiddenState;
use firebox_plan::{Budget, Sizing};
use firebox_ranks::Ranks;
use firebox_recompute::Rates;

use super::Learner;
use crate::check::Coupling;
use crate::components::TrainingBackend;
#[expect(unused_imports, reason = "documentation links to it")]
use crate::error::{FitError, TrainError};

use crate::join::of_burn;
use crate::park::Park;
use crate::planner::recompute::RecomputePolicy;
use crate::reduction::LossReduction;
use crate::settings::Settings;
use crate::splitter::{ByMicroBatch, Splitter};

/// Options of a [`Learner`]. See [`Learner::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct LearnerBuilder<ST, SV> {
    pub(crate) settings: Settings,
    /// Whether outputs are joined only where the user asked for it.
    pub(crate) sees_parts: bool,
    pub(crate) train_splitter: ST,
    pub(crate) valid_splitter: SV,
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
        let Self { settings, sees_parts, .. } = self;
        LearnerBuilder { settings, sees_parts, train_splitter, valid_splitter }
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
        self.settings.fitting.sizing = Sizing::Fixed(items.into());
        self
    }

    /// How micro-batch sizes are chosen. Default: [`Sizing::Even`].
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.settings.fitting.sizing = sizing;
        self
    }

    /// When tensors are recomputed for the backward pass instead of kept.
    ///
    /// Default: [`RecomputePolicy::if_needed`], where a batch cannot be trained in another way.
    pub fn recompute(mut self, policy: RecomputePolicy) -> Self {
        self.settings.fitting.recompute = policy;
        self
    }

    /// How fast the device computes, by which it is chosen what is recomputed, and whether that
    /// or a split is faster. Only ratios between operations matter.
    ///
    /// Default: the published numbers of an NVIDIA card that firebox knows, those of an RTX 4090
    /// for other GPUs, and those of two cores of a server on the host. They give the same plans in
    /// every run.
    pub fn rates(mut self, rates: Rates) -> Self {
        self.settings.fitting.rates = Some(rates);
        self
    }

    /// Keeps the optimizer's state outside of the device between optimizer steps: it is brought
    /// back parameter by parameter. Default: it stays on the device.
    ///
    /// Adam's state, 8 bytes for each 32-bit parameter, then takes no device memory while
    /// micro-batches run. It moves twice in each optimizer step, so this costs least where a batch
    /// has several micro-batches. Exact, with any optimizer.
    ///
    /// With [`Park::Host`], training ends with [`TrainError::NoRoomToPark`](crate::TrainError)
    /// before it begins if host memory has no room for the state.
    pub fn park_optimizer(mut self, park: Park) -> Self {
        self.settings.fitting.park = Some(park);
        self
    }

    /// How the loss of a batch is computed from the losses of its items. Default: as the recorded
    /// step shows, and [`LossReduction::Mean`] where it does not, or where several ranks train.
    pub fn reduction(mut self, reduction: LossReduction) -> Self {
        self.settings.reduction = Some(reduction);
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

    /// Goes on after the newest whole checkpoint in `directory`, if there is one. `directory` is
    /// that of burn's training, on which a [checkpointer] must be set; a
    /// [`DurableRecorder`](crate::DurableRecorder) never leaves half a file.
    ///
    /// Batches are split as they were before the checkpoint was written, where that fits: how they
    /// are split can depend on what ran before. With [`seed`](Self::seed), a recorder of full
    /// precision and a device that computes the same each time, a resumed run then ends where an
    /// uninterrupted one would have, bit for bit.
    ///
    /// Default: burn's [`checkpoint`](burn::train::SupervisedTraining::checkpoint) says which epoch
    /// to go on from, and batches are planned anew. A checkpoint of a model with other shapes is
    /// [`TrainError::OtherModel`](crate::TrainError::OtherModel) in either case.
    ///
    /// [checkpointer]: burn::train::SupervisedTraining::with_file_checkpointer
    pub fn resume(mut self, directory: impl Into<PathBuf>) -> Self {
        self.settings.resume = Some(directory.into());
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

    /// On the CPU, lets the threads of data loaders compute their batches, as they do with burn.
    /// Default: the training thread computes what they ask for.
    ///
    /// Faster where batches take much to prepare and there are cores to spare. Takes more memory:
    /// two batches for each thread are counted, with what making them takes, and the host's
    /// allocator may keep more for each thread than that. Random numbers are still drawn by the
    /// training thread. Does nothing on a GPU.
    pub fn loaders_compute(mut self) -> Self {
        self.settings.loaders_compute = true;
        self
    }

    /// Ends training gracefully on ctrl-c (`SIGINT`) and on `SIGTERM`, which schedulers and
    /// containers send.
    ///
    /// Training ends after the running optimizer step; a running validation also ends. If burn's
    /// checkpointer is set, a checkpoint of that epoch is written. [`fit`](Learner::fit) returns
    /// the model, with [`stopped`](crate::Fitted::stopped) set. A second ctrl-c ends the process.
    ///
    /// Default: ctrl-c ends the process, and burn's [`Interrupter`](burn::train::Interrupter) ends
    /// training. Outside of `fit`, ctrl-c ends the process in either case. From the first such
    /// `fit` on, it does so even if the program has a handler of its own. A program with its own
    /// handler should stop the interrupter itself instead.
    pub fn stop_on_ctrl_c(mut self) -> Self {
        self.settings.telling.stops_on_ctrl_c = true;
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
    /// Default: burn's own outputs are joined if the batch's output fits next to the micro-batches
    /// that are planned without it, and on a GPU if these are at most 16. Otherwise
    /// [metrics see micro-batches] and the plan says so.
    /// Outputs of other types are not joined. What this is called for is always joined, in more
    /// micro-batches if need be.
    ///
    /// A metric that sees micro-batches may have another mean: AUROC, precision and recall,
    /// accuracy with padding, and the loss where micro-batches differ in size.
    ///
    /// `join` receives the outputs with their shares of the batch's loss. The shares add up to one;
    /// under [`LossReduction::Sum`] each is one. `join` must detach what it keeps of the outputs.
    /// [`join`](mod@crate::join) has the functions for burn's own outputs.
    ///
    /// Training and validation outputs are different types, on the backend with and without
    /// automatic differentiation. The outputs of the whole batch stay on the device, for a while
    /// twice. The plan counts this, except where a batch is halved while it runs, as can happen
    /// with a longer sequence on the CPU.
    ///
    /// ```
    /// # use burn::prelude::*;
    /// # use firebox_train::Learner;
    /// // The distances of the items of a batch.
    /// struct Distances<B: Backend>(Tensor<B, 1>);
    ///
    /// fn join<B: Backend>(parts: Vec<(Distances<B>, f64)>) -> Distances<B> {
    ///     let parts = parts.into_iter().map(|(Distances(part), _)| part.detach());
    ///     Distances(Tensor::cat(parts.collect(), 0))
    /// }
    ///
    /// # fn builder<B: burn::tensor::backend::AutodiffBackend>() {
    /// let builder = Learner::builder()
    ///     .metrics_see_whole(join::<B>)
    ///     .metrics_see_whole(join::<B::InnerBackend>);
    /// # }
    /// ```
    ///
    /// [metrics see micro-batches]: crate::PlanReport::metrics_see_parts
    pub fn metrics_see_whole<T: 'static>(
        mut self,
        join: impl Fn(Vec<(T, f64)>) -> T + Send + Sync + 'static,
    ) -> Self {
        self.settings.joins = self.settings.joins.with(join);
        self
    }

    /// Shows metrics the outputs of burn's own types micro-batch by micro-batch, as they come.
    /// Default: batch by batch, see [`metrics_see_whole`](Self::metrics_see_whole).
    pub fn metrics_see_parts(mut self) -> Self {
        self.sees_parts = true;
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

    /// Does not print the plan before training. Default: it is printed to standard error, or, with
    /// the feature `tui` and on a terminal, once [burn's renderer](crate::Fitted::renderer) is
    /// dropped.
    pub fn quiet(mut self) -> Self {
        self.settings.telling.quiet = true;
        self
    }

    /// Trains together with other processes, each on a device of its own. Default: this process
    /// alone.
    ///
    /// The loader's batch is that of this rank. The gradient of an optimizer step is that of all
    /// ranks' batches together, by their weights in the loss. Each rank plans for its own device
    /// and may split its batch differently. Rank 0 gives its parameters to all at the start, or the
    /// state that it resumes from. It alone shows progress, writes checkpoints and logs, and
    /// decides to end early. A rank without further batches in an epoch waits for the others.
    ///
    /// An error on one rank ends training on all with the same [`TrainError::Rank`]. A gradient
    /// that is not finite ends it with [`TrainError::NotFinite`]. With losses in half floats, all
    /// [leave the step out](crate::scale_loss).
    ///
    /// Running statistics, of batch normalization for example, are each rank's own. The ranks of a
    /// machine share its memory where they train on the CPU: each then plans with its part of what
    /// is free.
    ///
    /// Only [`fit`](Learner::fit) trains together. A [`StepPlanner`](crate::StepPlanner) plans for
    /// this rank and exchanges nothing.
    pub fn ranks(mut self, ranks: Ranks) -> Self {
        self.settings.ranks = Some(ranks).filter(|ranks| ranks.world() > 1);
        self
    }

    /// With several [ranks](Self::ranks): writes burn's metric logs to `directory`, and lets early
    /// stopping and the choice of checkpoints see the metrics of all ranks. Give it the directory
    /// of burn's training.
    ///
    /// Default: they see rank 0's share of the data. Metrics without a number, and what is shown
    /// while an epoch runs, are rank 0's in either case. Values are weighed by the counts that burn
    /// logs with them. A logger that was set on burn's training is asked first.
    pub fn metrics_of_all_ranks(mut self, directory: impl Into<PathBuf>) -> Self {
        self.settings.telling.metrics_directory = Some(directory.into());
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
    /// A mean weighs the values of outputs by their items, as burn's summary does.
    pub fn progress(mut self) -> Self {
        self.settings.telling.progress = true;
        self
    }

    /// Saves a trace of the first training batch, see [`Learner::trace`], before it runs. The
    /// recordings take memory that no plan counts.
    ///
    /// A step that cannot be saved is a warning; a file that cannot be written is
    /// [`TrainError::TraceNotWritten`].
    pub fn save_trace(mut self, path: impl Into<PathBuf>) -> Self {
        self.settings.telling.trace_path = Some(path.into());
        self
    }

    /// Appends a line of JSON to the file at `path` for each optimizer step: a [`StepUse`], with
    /// the memory predicted, reserved and in use, in bytes, and the items in a second. Default: no
    /// file.
    ///
    /// A file that cannot be written is [`TrainError::LogNotWritten`].
    ///
    /// [`StepUse`]: crate::StepUse
    pub fn log_json(mut self, path: impl Into<PathBuf>) -> Self {
        self.settings.telling.log_path = Some(path.into());
        self
    }

    /// Builds the Learner from a model, an optimizer and a learning-rate scheduler. A number as the
    /// scheduler is a constant rate.
    pub fn build<B, LR, M, O>(
        mut self,
        model: M,
        optim: O,
        lr_scheduler: LR,
    ) -> Learner<B, LR, M, O, ST, SV>
    where
        B: TrainingBackend,
        LR: LrScheduler + 'static,
        M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
        M::InnerModule: InferenceStep,
        O: Optimizer<M, B> + 'static,
        ST: Splitter<M::Input>,
        SV: Splitter<<M::InnerModule as InferenceStep>::Input>,
    {
        if !self.sees_parts {
            let joins = of_burn::<B>(std::mem::take(&mut self.settings.joins));
            self.settings.joins = of_burn::<B::InnerBackend>(joins);
        }
        Learner { model, optim, lr_scheduler, builder: self, backend: PhantomData }
    }
}
