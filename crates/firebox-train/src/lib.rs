//! The Learner: burn's supervised training with batches that are split so that they fit into memory.

mod learner;
mod ready;
mod settings;
mod strategy;

mod beside;
mod growth;
mod labels;
mod pages;
mod pieces;
mod planner;
mod rehearsal;
mod shape;
mod signals;

mod check;
mod gradients;
mod micro_step;
mod share;
mod splitter;
mod statistics;
mod weights;
mod whole;

pub mod join;

mod panics;
mod watch;

#[cfg(feature = "cuda")]
mod nvidia;
mod own_pool;
#[cfg(feature = "cuda")]
mod prerequisites;

mod capture;
mod checkpoints;
mod device;
mod durable;
mod error;
mod report;

pub use beside::BesideBytes;
pub use check::{Coupling, SplitCheck};
pub use checkpoints::newest_checkpoint;
pub use device::{DeviceMemory, PoolUsage, RuntimeMemory};
pub use durable::DurableRecorder;
pub use error::{DeviceFailure, During, FitError, LastState, Phase, TrainError};
pub use gradients::Reduction;
pub use labels::label_parameters;
pub use learner::{FitResult, Fitted, Learner, LearnerBuilder, Unset};
#[cfg(feature = "cuda")]
pub use nvidia::{DeviceUsage, NvidiaError, cuda_memory};
pub use planner::PlanningCost;
#[cfg(feature = "cuda")]
pub use prerequisites::{Looked, Version, check_cuda};
pub use report::{MemoryUse, PlanReport};
pub use share::batch_share;
pub use splitter::{ByFunctions, ByMicroBatch, Splitter};
