//! The Learner: burn's supervised training with batches that are split so that they fit into memory.

mod learner;
mod settings;
mod strategy;

mod labels;
mod planner;
mod rehearsal;

mod gradients;
mod micro_step;
mod splitter;

mod panics;
mod watch;

#[cfg(feature = "cuda")]
mod nvidia;

mod capture;
mod checkpoints;
mod error;
mod report;

pub use error::{DeviceFailure, During, FitError, LastState, Phase, TrainError};
pub use gradients::Reduction;
pub use learner::{Fitted, Learner, LearnerBuilder, Unset};
#[cfg(feature = "cuda")]
pub use nvidia::{DeviceUsage, NvidiaError, cuda_memory};
pub use planner::PlanningCost;
pub use report::PlanReport;
pub use splitter::{ByFunctions, ByMicroBatch, Splitter};
