//! firebox trains [`burn`] models without ever running out of memory.
//!
//! Put [`Lazy`] around the backend, derive [`MicroBatch`] for the batch, and train with this [`Learner`] in place of
//! burn's: before a step runs, its operations are recorded, the memory that they need is computed from the record,
//! and the batch is split into micro-batches that fit, with gradients that equal the whole batch's.
//!
//! ```no_run
//! use burn::backend::{Autodiff, Flex};
//! use burn::prelude::*;
//! use firebox::{Bytes, Lazy, Learner, MicroBatch};
//! # use burn::data::dataloader::DataLoader;
//! # use burn::optim::AdamConfig;
//! # use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
//! # use std::sync::Arc;
//!
//! type B = Autodiff<Lazy<Flex>>; // was: Autodiff<Flex>
//!
//! #[derive(Clone, Debug, MicroBatch)]
//! struct Batch<B: Backend> {
//!     images: Tensor<B, 3>,
//!     targets: Tensor<B, 1, Int>,
//! }
//! # #[derive(Module, Debug)]
//! # struct Model<B: Backend> { linear: burn::nn::Linear<B> }
//! # impl<B: burn::tensor::backend::AutodiffBackend> TrainStep for Model<B> {
//! #     type Input = Batch<B>;
//! #     type Output = RegressionOutput<B>;
//! #     fn step(&self, _: Batch<B>) -> TrainOutput<RegressionOutput<B>> { unimplemented!() }
//! # }
//! # impl<B: Backend> InferenceStep for Model<B> {
//! #     type Input = Batch<B>;
//! #     type Output = RegressionOutput<B>;
//! #     fn step(&self, _: Batch<B>) -> RegressionOutput<B> { unimplemented!() }
//! # }
//! # fn run(
//! #     model: Model<B>,
//! #     train_loader: Arc<dyn DataLoader<B, Batch<B>>>,
//! #     valid_loader: Arc<dyn DataLoader<Lazy<Flex>, Batch<Lazy<Flex>>>>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//!
//! let training = SupervisedTraining::new("/tmp/artifacts", train_loader, valid_loader) // burn's own
//!     .num_epochs(10);
//!
//! let fitted = Learner::builder()
//!     .auto_batch()
//!     .memory(Bytes::gib(2)) // default: what is free
//!     .build(model, AdamConfig::new().init(), 1e-3)
//!     .fit(training)?;
//! # Ok(())
//! # }
//! ```
//!
//! The loader's batch size stays what it was: it is the batch of one optimizer step.

pub use firebox_batch::{Elements, MicroBatch, MicroBatchError, SliceDim, Tally};
pub use firebox_lazy::{
    Discarded, Lazy, LazyBackend, LazyTensor, RecordError, Recorder, Recording, Rehearsal,
    Survivor, initialize, label, mark, rehearse, restore,
};
pub use firebox_plan::{
    Accumulating, Budget, BudgetError, DoesNotFit, MemoryInfo, Need, Plan, PlanError, PlanOptions,
    Probing, Sizing, host_memory, plan,
};
pub use firebox_trace::{
    Bytes, Call, Category, CategoryBytes, Estimate, Footprint, Heap, Items, Label, MemoryModel,
    OpIndex, Step, StructuralHash, Trace,
};
pub use firebox_train::{
    ByFunctions, ByMicroBatch, FitError, Fitted, LastState, Learner, LearnerBuilder, Phase,
    PlanReport, PlanningCost, Reduction, Splitter, TrainError,
};

#[cfg(doctest)]
mod diagnostics;

#[doc(hidden)]
pub use firebox_batch::__derive;

/// What most programs need.
pub mod prelude {
    pub use crate::{Budget, Bytes, Lazy, Learner, MicroBatch};
}
