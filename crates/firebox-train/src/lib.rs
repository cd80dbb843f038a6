//! The Learner: burn's supervised training, with batches split so that they fit into memory.
//!
//! Last stage in the life of a batch. This crate rehearses steps with `firebox-lazy`, has
//! `firebox-plan` choose a split, and runs it inside burn's training loop.

mod learner;
mod loss_scale;
mod ready;
mod settings;

mod on_gradients;
mod parameters;
mod park;
mod ranks;
mod run;

mod planner;
mod signals;

mod check;
mod clock;
mod components;
mod gradients;
mod iteration;
mod progress;
mod reduction;
mod share;
mod splitter;
mod statistics;
mod steps;
mod weights;
mod whole;

pub mod join;

mod advice;
mod device;
mod durable;
mod error;
mod report;
mod saved;

pub use check::{Coupling, SplitCheck};
pub use clock::{Clock, clock};
pub use components::TrainingBackend;
#[cfg(feature = "cards")]
pub use device::cubecl::RuntimeMemory;
#[cfg(feature = "cuda")]
pub use device::nvidia::cuda_memory;
#[cfg(feature = "cuda")]
pub use device::nvidia_error::{Looked, NvidiaError, Version};
pub use device::own_pool::OwnPool;
#[cfg(feature = "cuda")]
pub use device::prerequisites::check_cuda;
#[cfg(feature = "cards")]
pub use device::rates::rates_of;
pub use device::{DeviceMemory, PoolUsage};
pub use durable::DurableRecorder;
pub use error::{DeviceFailure, During, FitError, LastState, Phase, TrainError};
pub use firebox_plan::Advice;
pub use firebox_plan::StepUse;
pub use firebox_recompute::Rates;
pub use gradients::WeightedGradients;
pub use learner::{FitResult, Fitted, Learner, LearnerBuilder, Unset};
pub use loss_scale::scale_loss;
pub use on_gradients::{ClipGlobalNorm, GradientHook, OnGradients, clip_global_norm, on_gradients};
pub use park::Park;
pub use planner::labels::label_parameters;
pub use planner::overhead::OverheadBytes;
pub use planner::recompute::{RecomputePolicy, Recomputing};
pub use planner::{PlanningCost, Replanned};
pub use reduction::LossReduction;
pub use report::{MemoryUse, PlanReport};
pub use run::checkpoints::newest_checkpoint;
pub use saved::SavedPlanner;
pub use share::batch_share;
pub use splitter::{ByFunctions, ByMicroBatch, Splitter};
pub use steps::{Batches, MicroBatches, StepPlanner};
