//! firebox trains [`burn`] models within a memory budget.
//!
//! Put [`Lazy`] around the backend, derive [`MicroBatch`] for the batch, and train with this
//! [`Learner`] instead of burn's. The operations of each step are recorded before they run. The
//! memory they need is computed from the record. The batch is then split into micro-batches that
//! fit, and their gradients add up to the gradient of the whole batch.
//!
//! The budget holds by prediction. On burn's CPU backend Flex, a model of its allocations makes the
//! prediction. On burn's GPU backends, a device without memory makes it by running the same fusion,
//! kernels and allocator (`firebox::dry`, feature `cards`).
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn::prelude::*;
//! use firebox::{Bytes, Lazy, Learner, MicroBatch};
//! # use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! # use burn::data::dataset::InMemDataset;
//! # use burn::nn::{Linear, LinearConfig, loss::{MseLoss, Reduction}};
//! # use burn::optim::AdamConfig;
//! # use burn::tensor::backend::AutodiffBackend;
//! # use burn::train::{
//! #     InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
//! # };
//!
//! type B = Autodiff<Lazy<Flex>>; // was: Autodiff<Flex>
//!
//! #[derive(Clone, Debug, MicroBatch)] // one word on the batch
//! struct Points<B: Backend> {
//!     inputs: Tensor<B, 2>,
//!     targets: Tensor<B, 2>,
//! }
//! # #[derive(Clone)]
//! # struct PointBatcher;
//! # impl<B: Backend> Batcher<B, f32, Points<B>> for PointBatcher {
//! #     fn batch(&self, items: Vec<f32>, device: &B::Device) -> Points<B> {
//! #         let inputs = Tensor::<B, 1>::from_floats(items.as_slice(), device).unsqueeze_dim(1);
//! #         Points { targets: inputs.clone() * 2.0, inputs }
//! #     }
//! # }
//! # #[derive(Module, Debug)]
//! # struct Line<B: Backend> { linear: Linear<B> }
//! # impl<B: Backend> Line<B> {
//! #     fn forward(&self, points: Points<B>) -> RegressionOutput<B> {
//! #         let output = self.linear.forward(points.inputs);
//! #         let loss = MseLoss::new()
//! #             .forward(output.clone(), points.targets.clone(), Reduction::Mean);
//! #         RegressionOutput::new(loss, output, points.targets)
//! #     }
//! # }
//! # impl<B: AutodiffBackend> TrainStep for Line<B> {
//! #     type Input = Points<B>;
//! #     type Output = RegressionOutput<B>;
//! #     fn step(&self, points: Points<B>) -> TrainOutput<RegressionOutput<B>> {
//! #         let output = self.forward(points);
//! #         TrainOutput::new(self, output.loss.backward(), output)
//! #     }
//! # }
//! # impl<B: Backend> InferenceStep for Line<B> {
//! #     type Input = Points<B>;
//! #     type Output = RegressionOutput<B>;
//! #     fn step(&self, points: Points<B>) -> RegressionOutput<B> { self.forward(points) }
//! # }
//! # let device = Default::default();
//! # let model = Line::<B> { linear: LinearConfig::new(1, 1).init(&device) };
//! # let numbers = || InMemDataset::new((0..64).map(|i| i as f32 / 64.0).collect::<Vec<_>>());
//! # let train_loader = DataLoaderBuilder::new(PointBatcher).batch_size(32).build(numbers());
//! # let valid_loader = DataLoaderBuilder::new(PointBatcher).batch_size(32).build(numbers());
//! # let folder = tempfile::tempdir()?;
//! # let artifacts = folder.path();
//!
//! let training = SupervisedTraining::new(artifacts, train_loader, valid_loader) // burn's own
//!     .num_epochs(2);
//!
//! let fitted = Learner::builder()
//!     .auto_batch()
//!     .memory(Bytes::mib(8)) // default: what is free
//!     .build(model, AdamConfig::new().init(), 1e-3)
//!     .fit(training)?;
//!
//! let plan = fitted.report.expect("batches were planned").plan;
//! assert_eq!(plan.to_string(), "32 = 1 x 32"); // all of a batch fits
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The loader's batch size stays the same: it is the batch of one optimizer step.

#[cfg(feature = "cards")]
pub mod dry;

pub use firebox_batch::{MicroBatch, MicroBatchError, weight};
pub use firebox_lazy::{
    CustomOp, Half, HiddenState, Lazy, LazyBackend, initialize, is_recording, is_rehearsal,
};
pub use firebox_plan::{Budget, Sizing};
pub use firebox_ranks::{Ranks, shard};
pub use firebox_trace::Bytes;
pub use firebox_train::{
    Batches, Coupling, DeviceMemory, DurableRecorder, FitError, Fitted, Learner, LearnerBuilder,
    LossReduction, MemoryUse, MicroBatches, Park, PlanReport, RecomputePolicy, SplitCheck,
    StepPlanner, TrainError, TrainingBackend, WeightedGradients, batch_share, clip_global_norm,
    clock, join, newest_checkpoint, on_gradients, scale_loss,
};

/// How a batch is planned: needs, splits, plans and why there is none; saved traces, which are
/// planned without the model.
pub mod plan {
    pub use firebox_plan::{
        Accumulating, BudgetError, DoesNotFit, FixedDoesNotFit, HostMemoryError, MemoryInfo, Need,
        Plan, PlanError, PlanOptions, Probing, Remedy, Resident, Role, Run, Split, host_memory,
        plan, plan_at_once,
    };
    pub use firebox_saved::{
        About, InstantiateError, Irregular, LoadError, RecordingProgress, Sample, SaveError,
        SavedTrace,
    };
    #[cfg(feature = "cards")]
    pub use firebox_train::rates_of;
    pub use firebox_train::{
        Advice, OverheadBytes, PlanningCost, Rates, Recomputing, Replanned, SavedPlanner,
    };
}

/// What a recorded step is: recorders, traces, footprints and the models that compute them.
pub mod trace {
    pub use firebox_heap::Heap;
    pub use firebox_lazy::{
        Arrival, CustomInputs, CustomResults, Discarded, HiddenStates, LazyTensor, Narrow,
        RecordError, Recording, Rehearsal, StepRecorder, Survivor, forget_graphs,
        in_full_precision, label, mark, rehearse, restore,
    };
    pub use firebox_recompute::{Program, ProgramError, Recipe};
    pub use firebox_trace::{
        Call, Category, CategoryBytes, Description, DescriptionIndex, Estimate, Footprint, Items,
        Label, Mark, MemoryModel, ModuleBytes, Modules, Moment, OpIndex, Origin, Paging,
        ParseBytesError, Step, StructuralHash, TensorIndex, TensorInfo, TensorType, Trace, Use,
    };
    pub use firebox_train::label_parameters;
}

/// What a training loop is made of: errors, hooks, splitters, and what steps used.
pub mod train {
    pub use firebox_batch::{Elements, SliceDim, Tally};
    pub use firebox_train::{
        ByFunctions, ByMicroBatch, ClipGlobalNorm, Clock, DeviceFailure, During, FitResult,
        GradientHook, LastState, OnGradients, Phase, Splitter, StepUse,
    };
}

/// Several processes that train together.
pub mod ranks {
    pub use firebox_ranks::{Alone, Engine, RankError, Ranks, Shard, Summing, begin_epoch, shard};
}

/// Memory of devices, and firebox's own pool on them.
pub mod pool {
    #[cfg(feature = "cards")]
    pub use firebox_pool::Pooled;
    pub use firebox_trace::PoolPages;
    #[cfg(feature = "cuda")]
    pub use firebox_train::{NvidiaError, check_cuda, cuda_memory};
    pub use firebox_train::{OwnPool, PoolUsage};
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
use firebox_pool::Pooled;

/// burn's CUDA backend with fusion, on firebox's own memory pool.
///
/// A batch 1.2 to 1.7 times as large fits the same card, on pages that have the sizes of the plan.
/// Devices, kernels and tuner choices are the same as burn's.
#[cfg(feature = "cuda")]
pub type Cuda<F = f32, I = i32> =
    burn_fusion::Fusion<burn_cubecl::CubeBackend<Pooled<cubecl::cuda::CudaRuntime>, F, I, u8>>;

/// burn's wgpu backend with fusion, on firebox's own memory pool. See [`Cuda`].
#[cfg(feature = "wgpu")]
pub type Wgpu<F = f32, I = i32, B = u32> =
    burn_fusion::Fusion<burn_cubecl::CubeBackend<Pooled<cubecl::wgpu::WgpuRuntime>, F, I, B>>;

/// burn's Vulkan backend with fusion, on firebox's own memory pool. See [`Cuda`].
#[cfg(feature = "vulkan")]
pub type Vulkan<F = f32, I = i32, B = u8> = Wgpu<F, I, B>;

#[cfg(doctest)]
mod diagnostics;
#[cfg(doctest)]
mod guide;

#[doc(hidden)]
pub use firebox_batch::__derive;

/// The items that most programs need.
pub mod prelude {
    pub use crate::{Budget, Bytes, Lazy, Learner, MicroBatch};
}
