//! Errors of training: why it stopped, and the state that the caller gets back.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use burn_backend::DType;
use firebox_batch::MicroBatchError;
use firebox_lazy::{RecordError, Survivor};
use firebox_plan::{BudgetError, HostMemoryError, LogNotWritten, Plan, PlanError};
use firebox_pool::{NoPlace, Why};
use firebox_saved::InstantiateError;
use firebox_trace::{Bytes, Items};
use serde::{Deserialize, Serialize};

use crate::check::verdict::Coupling;

mod fit;

pub use self::fit::{FitError, LastState};

/// The phase of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Forward and backward passes and optimizer steps.
    Training,
    /// Forward passes only.
    Validation,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Training => "training",
            Self::Validation => "validation",
        })
    }
}

/// What the Learner was doing when the device failed. It decides whether the model survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum During {
    /// Forward and backward passes. The model is the one after the last whole optimizer step.
    MicroSteps,
    /// The optimizer step. Parameters may be half computed.
    OptimizerStep,
    /// Validation. The model is the one after the last whole optimizer step.
    Validation,
}

impl fmt::Display for During {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MicroSteps => "the micro-steps",
            Self::OptimizerStep => "the optimizer step",
            Self::Validation => "validation",
        })
    }
}

/// A device that did not do its work, most likely because it ran out of memory.
#[derive(Clone, Debug)]
pub struct DeviceFailure {
    /// What training was doing.
    pub during: During,
    /// The size of the loader's batch. `None` if no batch had begun.
    pub items: Option<Items>,
    /// How the batch was split, with the predicted peak. `None` if there was no plan yet.
    pub plan: Option<Plan>,
    /// What the device's allocator has reserved for the training thread after the failure. Excludes
    /// other threads and other programs. `None` if the backend does not report it.
    pub measured: Option<Bytes>,
    /// The first message from the device.
    pub message: String,
}

impl fmt::Display for DeviceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { during, items, plan, measured, message } = self;
        write!(f, "the device failed in {during}")?;
        if let Some(items) = items {
            write!(f, " of a batch of {items}")?;
        }
        if let Some(plan) = plan {
            write!(f, " ({plan}; predicted {}", plan.peak())?;
            match measured {
                Some(measured) => write!(f, ", reserved {measured})")?,
                None => write!(f, ")")?,
            }
        }
        write!(f, ": {message}; ")?;
        if *during == During::OptimizerStep {
            write!(f, "the model is lost, go on from the last checkpoint; ")?;
        }
        write!(
            f,
            "if it ran out of memory, start again in a new process with a lower budget, as in `.memory(..)`, or with \
             nothing else on the device"
        )
    }
}

/// Why training could not begin or continue. Its debug form is its message.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The training loader yielded no batch.
    #[error("the training loader yields no batch: check the data set and the loader's batch size")]
    EmptyLoader,
    /// A batch has no items.
    #[error("a {phase} batch has no items: leave it out, or look for the reason in the batcher")]
    EmptyBatch {
        /// The phase.
        phase: Phase,
    },
    /// The weight of a batch is zero, negative, or not a number.
    #[error(
        "the batch weighs {weight} in the loss, and no mean can be taken over that: give every batch at least one \
         item that counts, and weights that are finite and not negative"
    )]
    Weight {
        /// The weight.
        weight: f64,
    },
    /// The weights of the micro-batches do not add up to the weight of their batch.
    #[error(
        "the micro-batches weigh {parts} in the loss and their batch {whole}: the weight of a batch must be the sum of \
         those of its parts, or the gradients of a split batch are not the whole batch's"
    )]
    UnequalWeights {
        /// The sum over the micro-batches.
        parts: f64,
        /// The weight of the batch.
        whole: f64,
    },
    /// The gradients of a split batch would differ from the whole batch's.
    #[error(
        "a batch cannot be split: {how}{at}; {looks} {coupling}; or give the whole batch memory with `.memory(..)`, or split all the same with \
         `.split_although(Coupling::{coupling:?})`",
        how = differs(*by, parameter), at = at.as_ref().map_or_else(String::new, |at| format!(", because of {at}")),
        looks = if by.is_some() { "it looks as if" } else { "as recorded," }
    )]
    Coupled {
        /// What couples the items.
        coupling: Coupling,
        /// The difference, relative to the gradient of the parameter. Infinite if a part alone has
        /// no gradient. `None` if the recorded operations show it, and nothing was measured.
        by: Option<f64>,
        /// The path of the parameter that differs most, or what went wrong in a part.
        parameter: String,
        /// The operation in which items meet, the module whose parameters were used last before
        /// it, and what happens there. `None` if that is not known.
        at: Option<String>,
    },
    /// The weights that the batch states are not those of the recorded step.
    #[error(
        "a batch cannot be split: items {begin} to {last} weigh {stated:.4} of it by its weight, and {counted:.4} by what the step \
         computes, as recorded: state no weight, because it follows from the step, or the one that the loss divides by; or split \
         by the stated weights all the same with `.split_although(Coupling::Weights)`",
        begin = items.start, last = items.end - 1
    )]
    OtherWeights {
        /// The items of a part of the batch.
        items: Range<usize>,
        /// The share of its batch that the part has by its weight.
        stated: f64,
        /// The share that it has in the gradient.
        counted: f64,
    },
    /// Parts of a batch depend on numbers of the whole, such as what its loss is divided by, and
    /// these cannot be found.
    #[error(
        "a batch cannot be split: its parts have to be given numbers of the whole, and {why}; state the weight that the loss \
         divides by, with `#[micro_batch(weight = ..)]`, or give the whole batch memory with `.memory(..)`"
    )]
    NoNumbers {
        /// Why not.
        why: String,
    },
    /// Gradients of split batches no longer add up to those of the whole batches. The state is that
    /// after the last step before this was seen.
    #[error(
        "gradients of split batches agreed with those of whole ones in optimizer step {agreed}, and do not in step {found}; \
         what was learned between them may be wrong: {cause}"
    )]
    CoupledSince {
        /// The latest optimizer step of this run, counted from 1, in which they agreed.
        agreed: usize,
        /// The optimizer step in which they did not. It was not made.
        found: usize,
        /// How they differ.
        cause: Box<TrainError>,
    },
    /// The step changes its gradients by numbers that it makes of them, so those of micro-batches
    /// do not add up to the batch's.
    #[error(
        "a batch cannot be split: its step changes {what} by a number made of gradients (`{operation}`), as clipping by a \
         global norm does, and each micro-batch would have another number; do it to the gradient of the whole batch, in the \
         optimizer: `firebox::clip_global_norm(optimizer, limit)` clips, and `firebox::on_gradients` is for the rest; or give \
         the whole batch memory with `.memory(..)`, or split all the same with `.split_although(Coupling::Gradients)`",
        what = parameter.as_ref().map_or("its gradients".to_owned(), |path| format!("the gradient of `{path}`"))
    )]
    GradientsChanged {
        /// The operation that makes the number, or `read`.
        operation: String,
        /// The path of a parameter whose gradient depends on it. `None` if the number is read.
        parameter: Option<String>,
    },
    /// The batch cannot be cut.
    #[error("cannot cut the batch: {0}")]
    MicroBatch(#[from] MicroBatchError),
    /// A splitter returned a micro-batch with another number of items than requested.
    #[error(
        "the splitter was asked for {asked} items and gave {got}: its `range` must give exactly the items of the \
         range"
    )]
    LostItems {
        /// The requested number of items.
        asked: usize,
        /// The returned number of items.
        got: usize,
    },
    /// The model has no parameters. There is nothing to train, and no device to plan for.
    #[error(
        "the model has no parameters: give it at least one, or train without automatic batches"
    )]
    NoParameters,
    /// The model lives on several devices.
    #[error(
        "the model lives on {0} devices, and automatic batches work on one: move it to one device"
    )]
    SeveralDevices(usize),
    /// The device does not report its free memory.
    #[error(
        "the free memory of `{device}` cannot be asked for: say how much training may use, as in \
         `.memory(Bytes::gib(8))`"
    )]
    UnknownMemory {
        /// The name of the backend and the device.
        device: String,
    },
    /// CubeCL's configuration forbids pages of an exact size.
    #[error(
        "pages of an exact size cannot be had: remove `persistent_memory = \"disabled\"` from cubecl.toml, or train on burn's own \
         backend, as in `Autodiff<Lazy<burn::backend::Cuda>>`"
    )]
    NoExactPages,
    /// The pages that a plan needs could not be had. Nothing has run on them.
    #[error("the pages for a plan cannot be had: {0}")]
    NoPlace(#[from] NoPlace),
    /// The budget is invalid.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// CUDA cannot be used, or the memory of an NVIDIA device cannot be read.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Nvidia(#[from] crate::device::nvidia_error::NvidiaError),
    /// The error of another crate's backend: something is not installed, or the memory of its
    /// devices is unknown.
    #[error("the device cannot be used: {0}")]
    Device(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The memory of the host cannot be read.
    #[error(transparent)]
    HostMemory(#[from] HostMemoryError),
    /// No split of the batch fits the budget.
    #[error("{phase} does not fit: {cause}")]
    Plan {
        /// The phase.
        phase: Phase,
        /// The reason.
        cause: Box<PlanError<TrainError>>,
    },
    /// A micro-batch needs more than planned and is not split further: it has one item, or
    /// [`Sizing::Whole`](firebox_plan::Sizing::Whole) was asked for.
    #[error(
        "this {phase} batch needs {needed} for {}, and {budget} are left: its shapes differ from the batch that was \
         planned with; raise the budget, or make the items smaller", together(*items)
    )]
    GrewTooLarge {
        /// The phase.
        phase: Phase,
        /// The items of the micro-batch.
        items: Items,
        /// What the micro-batch needs in addition to what is already held.
        needed: Bytes,
        /// What is left of the budget after what is already held.
        budget: Bytes,
    },
    /// An update of the parameters does not fit, because it leaves more than earlier ones: the
    /// state of parameters that had no gradient before. It has not run. In a
    /// [`StepPlanner`](crate::StepPlanner), the optimizers that it has begun to change must not be
    /// used any more; the model may.
    #[error(
        "the optimizer's step leaves {grown} more on the device than earlier ones, for parameters that had no gradient before, \
         and needs {needed} where {budget} may be used: raise the budget, park the optimizer's state with \
         `.park_optimizer(..)`, or take an optimizer with less state"
    )]
    UpdateTooLarge {
        /// What it leaves beyond what earlier updates have left.
        grown: Bytes,
        /// What would be alive at its peak.
        needed: Bytes,
        /// What training may use.
        budget: Bytes,
    },
    /// A step computes in half floats, in which the gradients of its loss would vanish.
    #[error(
        "the step computes in half floats and does not scale its loss: call `firebox::scale_loss(loss).backward()`, or use \
         brain floats, `Half<Lazy<B>>`"
    )]
    LossNotScaled,
    /// A loop of the user's own computes in half floats, whose losses only the Learner scales.
    #[error(
        "losses in half floats are scaled by the Learner alone: use brain floats, `Half<Lazy<B>>`, in loops of your own"
    )]
    ScaledLoop,
    /// The device does not compute in the type of [`Half`](firebox_lazy::Half).
    #[error("`{device}` does not compute in {dtype:?}: train without `Half` there")]
    NoNarrowType {
        /// The type.
        dtype: DType,
        /// The device.
        device: String,
    },
    /// Host memory has no room for the optimizer's state, which was to be parked there.
    #[error(
        "the optimizer's state takes {state}, and {free} of host memory are free: park it on a disk, as in \
         `.park_optimizer(Park::Disk(folder))`"
    )]
    NoRoomToPark {
        /// What the state takes.
        state: Bytes,
        /// The free host memory, or this rank's part of it.
        free: Bytes,
    },
    /// The optimizer's state cannot be parked on the disk. The last optimizer step is whole.
    #[error(
        "optimizer state cannot be written to {}: {cause}; make room there, or name another folder",
        folder.display()
    )]
    NotParked {
        /// The folder.
        folder: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// The step is another program for other batch sizes, so no trace of it can be saved.
    #[error("no trace can be saved: {message}")]
    NotSaved {
        /// How the recordings differ.
        message: String,
    },
    /// A saved trace cannot be written.
    #[error("the trace cannot be written to {}: {cause}", path.display())]
    TraceNotWritten {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// The log of steps cannot be written.
    #[error(transparent)]
    LogNotWritten(#[from] LogNotWritten),
    /// A saved trace says nothing about a batch.
    #[error(transparent)]
    Saved(#[from] InstantiateError),
    /// A step could not be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The model keeps tensors where planning cannot restore them.
    #[error(
        "the model keeps tensors of a planned step outside its parameters and running statistics ({}): store them \
         as `Param` or `RunningState`, do not keep them between steps, or say how to give back what keeps them, with \
         `.hidden_state(..)`",
        list(survivors)
    )]
    HiddenState {
        /// The tensors.
        survivors: Vec<Survivor>,
    },
    /// The user's code panicked in a step.
    #[error("the {phase} step panicked on {items} items: {message}")]
    StepPanicked {
        /// The phase.
        phase: Phase,
        /// The size of the micro-batch.
        items: Items,
        /// The panic's message.
        message: String,
    },
    /// The optimizer panicked.
    #[error(
        "the optimizer step panicked: {message}; the model is that of the last whole step, the optimizer's state \
         is lost"
    )]
    OptimizerPanicked {
        /// The panic's message.
        message: String,
    },
    /// Measured memory exceeds the budget, and [strict](crate::LearnerBuilder::strict) is set.
    #[error("{}", over_budget(*.measured, *.predicted, *.budget))]
    OverBudget {
        /// The most memory that was measured.
        measured: Bytes,
        /// The predicted memory.
        predicted: Bytes,
        /// The budget.
        budget: Bytes,
    },
    /// The device failed before training began.
    #[error(
        "the model's parameters cannot be made on the device: {message}; see whether it has memory left and whether other \
         programs can use it"
    )]
    NotReady {
        /// The first message from the device.
        message: String,
    },
    /// The device did not do its work. No optimizer step used the results of the failed work.
    #[error("{0}")]
    DeviceFailed(Box<DeviceFailure>),
    /// A checkpoint could not be written.
    #[error(
        "a checkpoint could not be written: {message}; check the folder and the space on its disk"
    )]
    Checkpoint {
        /// The message from burn's checkpointer.
        message: String,
    },
    /// Something other than the model panicked: the data set, its batcher, a metric, a renderer, a
    /// scheduler or a logger. Before training begins and after it ends, it may be anything that
    /// burn calls.
    #[error("training stopped because something beside the model panicked: {message}")]
    Panicked {
        /// The panic's message, and its location if another thread panicked.
        message: String,
    },
    /// A rank has failed. It is the same error on all ranks.
    #[error("rank {rank} failed: {message}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The message of its error.
        message: String,
        /// The error, on that rank. No source of this one, whose message has its message.
        cause: Option<Box<TrainError>>,
    },
    /// The ranks cannot go on together.
    #[error("training on several ranks has stopped: {0}")]
    Ranks(#[from] firebox_ranks::RankError),
    /// The state of rank 0 cannot be given to the other ranks.
    #[error("the model, optimizer or scheduler of rank 0 cannot be given to the others: {message}")]
    NotShared {
        /// Why.
        message: String,
    },
    /// The sum of the gradients of all ranks is not finite. No optimizer step used it.
    #[error(
        "the sum of the gradients is not finite{}: lower the learning rate, or look for what divides by zero or overflows",
        of_rank(.parameter.as_ref())
    )]
    NotFinite {
        /// The first rank whose own gradient is not finite, and the path of the parameter. `None`
        /// if only their sum is too large.
        parameter: Option<(usize, String)>,
    },
    /// The checkpoint to resume from is that of another model. Build the model as it was, or train
    /// in another folder.
    #[error(
        "the checkpoint to go on from is of another model: {0}; build the model as it was, or train in another folder"
    )]
    OtherModel(String),
    /// The checkpoint to resume from cannot be read.
    #[error("the checkpoint to go on from cannot be read: {message}")]
    Resume {
        /// The message from burn's checkpointer.
        message: String,
    },
}

impl fmt::Debug for TrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `main` prints the error it returns this way, and `unwrap` the error it panics with.
        fmt::Display::fmt(self, f)
    }
}

impl TrainError {
    /// Whether parameters may be half computed.
    pub(crate) fn loses_the_model(&self) -> bool {
        match self {
            Self::DeviceFailed(failure) => failure.during == During::OptimizerStep,
            Self::Rank { cause: Some(cause), .. } => cause.loses_the_model(),
            Self::NoPlace(no_place) => matches!(no_place.why, Why::Lost { .. } | Why::Unread),
            _ => false,
        }
    }
}

fn of_rank(parameter: Option<&(usize, String)>) -> String {
    parameter.map_or_else(String::new, |(rank, path)| format!(", that of `{path}` on rank {rank}"))
}

fn together(items: Items) -> String {
    match items.get() {
        1 => "one item".into(),
        items => format!("{items} items, which are not split"),
    }
}

fn list(survivors: &[Survivor]) -> String {
    let shown: Vec<String> = survivors.iter().take(3).map(ToString::to_string).collect();
    let more = survivors.len().saturating_sub(shown.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Formats a share as a percentage.
fn differs(by: Option<f64>, parameter: &str) -> String {
    let measured = "some items of it run one by one give another gradient than together";
    match by {
        None => format!("its operations do not give `{parameter}` the sum of its parts' gradients"),
        Some(by) if by.is_finite() => {
            format!("{measured}, by {:.3} % in `{parameter}`", by * 100.0)
        }
        Some(_) => format!("{measured}, without a value in `{parameter}`"),
    }
}

/// The message of an exceeded budget, with what a budget does not count.
pub(crate) fn over_budget(measured: Bytes, predicted: Bytes, budget: Bytes) -> String {
    format!(
        "training took {measured}, where {predicted} were predicted and {budget} may be used: a budget does not see what a step allocates \
         beside tensors, tensors that it computes on other threads, and what metrics keep of its outputs"
    )
}
