//! Why training does not begin, or ends.

use std::any::Any;
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use burn::train::TrainingError;
use firebox_batch::MicroBatchError;
use firebox_plan::{BudgetError, HostMemoryError, LogNotWritten, PlanError, Split};
use firebox_trace::Bytes;

/// Why training does not begin, or ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The fields of a batch disagree about its items.
    #[error("a batch cannot be cut: {0}")]
    Batch(#[from] MicroBatchError),
    /// A loader made a batch without items.
    #[error("a batch has no items: leave it out in the batcher")]
    EmptyBatch,
    /// The model does not live on one device with automatic differentiation.
    #[error("the model is not on a training device: build it on `device.autodiff()`")]
    NoAutodiff,
    /// The memory of the device cannot be measured.
    #[error(
        "the memory of {device} cannot be measured: this edition trains on `Device::flex()`, with \
         `firebox::PeakAlloc` as the global allocator where the system does not say what is resident (all but Linux), \
         and on GPUs (firebox's features `cuda`, `wgpu`, `vulkan` and `metal`)"
    )]
    UnknownDevice {
        /// The device.
        device: String,
    },
    /// A GPU does not say how much memory is free.
    #[error("{device} does not say how much memory is free: set the budget with `.memory(..)`")]
    UnknownFree {
        /// The device.
        device: String,
    },
    /// The report cannot be written.
    #[error("no report is written to {path}: {message}", path = path.display())]
    NoReport {
        /// The file.
        path: PathBuf,
        /// Why.
        message: String,
    },
    /// The step cannot be recorded for batches of all sizes.
    #[error("the step is not recorded: {message}")]
    NotTraced {
        /// Why.
        message: String,
    },
    /// A step panics where it is rehearsed.
    #[error("the step panicked where it was rehearsed on a part of the batch: {message}")]
    StepPanicked {
        /// The message of the panic.
        message: String,
    },
    /// The system does not say how much memory there is.
    #[error("set the budget with `.memory(..)`: {0}")]
    UnknownMemory(#[from] HostMemoryError),
    /// The budget makes no sense on this memory.
    #[error("{0}")]
    Budget(#[from] BudgetError),
    /// No split of the batch fits.
    #[error("training does not fit: {0}")]
    DoesNotFit(Box<DoesNotFit>),
    /// The gradient of the batch is not that of its parts.
    #[error(
        "a batch must not be split: the gradient of `{parameter}` differs by {percent:.2} % from that of its parts. \
         State what items weigh (`#[micro_batch(weight = ..)]`, `.reduction(..)`), raise the budget so that a batch fits, \
         or accept it (`.split_although_coupled()`)"
    )]
    Coupled {
        /// The path of the parameter that differs most.
        parameter: String,
        /// The difference, relative to the largest gradient of the parameter.
        percent: f64,
    },
    /// A batch weighs nothing that a mean could be taken over.
    #[error("a batch weighs {weight}: a weight is a number of zero or more, and must be finite")]
    Weight {
        /// What it weighs.
        weight: f64,
    },
    /// What weighs nothing has a gradient, which would be lost.
    #[error(
        "a part of a batch weighs nothing, but has a gradient: what its loss is divided by is not what it weighs, as in \
         `loss.sum() / max(1, objects)`. Divide by the same number in all parts of a batch and train on the sum \
         (`.reduction(LossReduction::Sum)`), or accept that it is left out (`.split_although_coupled()`), as for a penalty on \
         the parameters beside a mean"
    )]
    WeighsNothing,
    /// The parts of a batch do not weigh what the batch weighs.
    #[error(
        "the micro-batches weigh {parts}, and the batch weighs {whole}: check its weight function"
    )]
    UnequalWeights {
        /// What the micro-batches weigh.
        parts: f64,
        /// What the batch weighs.
        whole: f64,
    },
    /// A step needed more than the budget.
    #[error(
        "a step took {measured} where {predicted} were predicted, more than the budget of {budget}"
    )]
    OverBudget {
        /// What it took.
        measured: Bytes,
        /// What was predicted.
        predicted: Bytes,
        /// What training may take.
        budget: Bytes,
    },
    /// The device did not compute a step: not in micro-batches of one item either, or it is lost.
    #[error(
        "the device failed: {message}. Go on from the last checkpoint: if it failed in an optimizer step, the model is not \
         whole"
    )]
    DeviceFailed {
        /// What it says.
        message: String,
    },
    /// The log of steps cannot be written.
    #[error(transparent)]
    LogNotWritten(#[from] LogNotWritten),
    /// burn ended training.
    #[error("{0}")]
    Burn(Arc<TrainingError>),
}

/// A batch that does not fit, and whether burn's gradient checkpointing would help.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DoesNotFit {
    /// By how much, and what holds the most.
    pub cause: PlanError<Infallible>,
    /// What was found with gradient checkpointing, if the device does not have it yet. Not in
    /// loops of the user's own.
    pub checkpointing: Option<Checkpointing>,
}

impl DoesNotFit {
    /// What is needed: of one item, or of the batch if it is not split.
    pub(crate) fn need(&self) -> Bytes {
        match &self.cause {
            PlanError::DoesNotFit(unfit) => unfit.need.peak,
            PlanError::FixedDoesNotFit(unfit) => unfit.misfit.need.peak,
            _ => Bytes::ZERO,
        }
    }
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)?;
        match &self.checkpointing {
            Some(checkpointing) => write!(f, ". {checkpointing}"),
            None => Ok(()),
        }
    }
}

/// A batch with burn's gradient checkpointing, as it was rehearsed: activations that are cheap to
/// compute are computed again in the backward pass.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Checkpointing {
    /// What is needed then: that of the plan, or that of one item.
    pub need: Bytes,
    /// How the batch would be split. `None` if it does not fit either.
    pub split: Option<Split>,
    /// By how much the cost of a step is larger, in percent: the number of its operations on a
    /// GPU, its time on the host, both on a few items. `None` if no size was tried both ways.
    pub percent: Option<f64>,
}

impl fmt::Display for Checkpointing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { need, split, percent } = self;
        write!(f, "On a device with `.autodiff().gradient_checkpointing()` ")?;
        match split {
            Some(split) => write!(f, "it fits as {split}, with {need}")?,
            None => write!(f, "{need} are needed")?,
        }
        match percent {
            Some(percent) => write!(f, ", for {percent:.0} % more work"),
            None => Ok(()),
        }
    }
}

/// Why training ended, and the model after the last whole optimizer step, without automatic
/// differentiation: `model.train()` continues with it.
#[derive(Debug)]
pub struct FitError<M> {
    /// Why.
    pub cause: TrainError,
    /// The model after the last whole optimizer step.
    pub model: M,
}

impl<M> fmt::Display for FitError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<M: fmt::Debug> std::error::Error for FitError<M> {}

/// What a panic says where a step is rehearsed.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> TrainError {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    TrainError::StepPanicked { message: message.to_owned() }
}
