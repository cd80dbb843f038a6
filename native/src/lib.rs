//! Trains [burn](https://burn.dev) 0.22 models within a memory budget.
//!
//! Before a batch runs, firebox finds out what a training step needs by steps on a clone of the
//! learner: on the CPU a few small ones, measured and thrown away, on a GPU without running them. A
//! batch that does not fit is split into micro-batches that do. Their gradients are added by their
//! weights: the optimizer sees the gradient of the whole batch. Model, optimizer, loaders, metrics
//! and checkpoints are burn's own.
//!
//! ```
//! use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! use burn::data::dataset::InMemDataset;
//! use burn::module::Module;
//! use burn::nn::loss::{MseLoss, Reduction};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn::train::{
//!     InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
//! };
//! use firebox::{Bytes, Learner, MicroBatch};
//!
//! #[derive(Clone, Debug, MicroBatch)] // one word on the batch
//! struct Points {
//!     inputs: Tensor<2>,
//!     targets: Tensor<2>,
//! }
//!
//! # #[derive(Clone)]
//! # struct PointBatcher;
//! # impl Batcher<f32, Points> for PointBatcher {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Points {
//! #         let inputs = Tensor::<1>::from_floats(items.as_slice(), device).reshape([-1, 1]);
//! #         Points { targets: inputs.clone() * 2.0, inputs }
//! #     }
//! # }
//! # #[derive(Module, Debug)]
//! # struct Line { linear: Linear }
//! # impl Line {
//! #     fn forward(&self, points: Points) -> RegressionOutput {
//! #         let output = self.linear.forward(points.inputs);
//! #         let targets = points.targets.clone();
//! #         let loss = MseLoss::new().forward(output.clone(), targets, Reduction::Mean);
//! #         RegressionOutput::new(loss, output, points.targets)
//! #     }
//! # }
//! # impl TrainStep for Line {
//! #     type Input = Points;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, points: Points) -> TrainOutput<RegressionOutput> {
//! #         let output = self.forward(points);
//! #         TrainOutput::new(self, output.loss.backward(), output)
//! #     }
//! # }
//! # impl InferenceStep for Line {
//! #     type Input = Points;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, points: Points) -> RegressionOutput { self.forward(points) }
//! # }
//! let device = Device::flex().autodiff(); // as you have it
//! # let model = Line { linear: LinearConfig::new(1, 1).init(&device) };
//! # let numbers = || InMemDataset::new((0..64).map(|i| i as f32 / 64.0).collect::<Vec<_>>());
//! # let train = DataLoaderBuilder::new(PointBatcher).batch_size(32).build(numbers());
//! # let valid = DataLoaderBuilder::new(PointBatcher).batch_size(32).build(numbers());
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path();
//! let training = SupervisedTraining::new(directory, train, valid).num_epochs(2); // burn's own
//!
//! let fitted = Learner::builder()
//!     .auto_batch()
//!     .memory(Bytes::mib(64)) // default: what is free
//!     .build(model, AdamConfig::new().init(), 1e-3)
//!     .fit(training)?;
//! assert!(fitted.plans[0].plan.is_whole());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "cubecl")]
mod dry;
mod error;
mod gauge;
mod gradients;
mod learner;
mod outputs;
mod planner;
mod progress;
#[cfg(feature = "cubecl")]
mod recording;
mod rehearsal;
#[cfg(feature = "cubecl")]
mod saved;
mod split_check;
mod steps;
mod strategy;

pub use error::{Checkpointing, DoesNotFit, FitError, TrainError};
/// What the derive's generated code uses. Not a public interface.
#[doc(hidden)]
pub use firebox_batch::__derive;
pub use firebox_batch::{MicroBatch, MicroBatchError};
pub use firebox_plan::{Budget, BudgetError, HostMemoryError, Plan, PlanError, Split, StepUse};
#[cfg(feature = "cubecl")]
pub use firebox_saved::SavedTrace;
pub use firebox_trace::{Bytes, Items};
pub use gradients::{LossReduction, WeightedGradients};
pub use learner::{Fitted, Learner, LearnerBuilder};
/// Counts what the program's heap holds. As the global allocator it makes predictions from counted
/// bytes. Without it they come from what Linux says is resident, which is less sharp.
///
/// ```
/// #[global_allocator]
/// static HEAP: firebox::PeakAlloc = firebox::PeakAlloc;
/// ```
pub use peak_alloc::PeakAlloc;
pub use planner::PlanReport;
pub use split_check::SplitCheck;
pub use steps::{MicroBatches, StepPlanner};
