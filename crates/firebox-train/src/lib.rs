//! The Learner: burn's supervised training with batches that are split so that they fit into memory.

mod learner;
mod settings;
mod strategy;

mod beside;
mod labels;
mod planner;
mod rehearsal;

mod gradients;
mod micro_step;
mod splitter;

mod capture;
mod device;
mod error;
#[cfg(feature = "cuda")]
mod nvidia;
mod report;

pub use beside::BesideBytes;
pub use device::{DeviceMemory, PoolUsage, RuntimeMemory};
pub use error::{FitError, LastState, Phase, TrainError};
pub use gradients::Reduction;
pub use learner::{Fitted, Learner, LearnerBuilder, Unset};
pub use planner::PlanningCost;
pub use report::{MemoryUse, PlanReport};
pub use splitter::{ByFunctions, ByMicroBatch, Splitter};
