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

mod capture;
mod error;
mod report;

pub use error::{FitError, LastState, Phase, TrainError};
pub use gradients::Reduction;
pub use learner::{Fitted, Learner, LearnerBuilder, Unset};
pub use planner::PlanningCost;
pub use report::PlanReport;
pub use splitter::{ByFunctions, ByMicroBatch, Splitter};
