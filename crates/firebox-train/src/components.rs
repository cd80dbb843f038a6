//! The bounds on what a Learner trains, in one place. The run, the rehearsals and the split check
//! are generic over [`LazyComponents`].

use burn::module::Module;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, LearningComponentsMarker, LearningComponentsTypes, TrainStep};
use firebox_lazy::LazyBackend;

use crate::device::DeviceMemory;

/// burn's components of a Learner on a backend that records.
///
/// Implemented for all components that [`build`](crate::LearnerBuilder::build)
/// accepts.
pub(crate) trait LazyComponents:
    LearningComponentsTypes<
        Backend: LazyBackend<Base = <Self as LazyComponents>::Base>
                     + AutodiffBackend<InnerBackend = <Self as LazyComponents>::Inner>,
        InferenceModel: Module<<Self as LazyComponents>::Inner>,
    >
{
    /// The backend that computes.
    type Base: DeviceMemory;
    /// The backend of the model for validation.
    type Inner: LazyBackend<Base = Self::Base>;
}

impl<LC, Base, Inner> LazyComponents for LC
where
    LC: LearningComponentsTypes<InferenceModel: Module<Inner>>,
    LC::Backend: LazyBackend<Base = Base> + AutodiffBackend<InnerBackend = Inner>,
    Base: DeviceMemory,
    Inner: LazyBackend<Base = Base>,
{
    type Base = Base;
    type Inner = Inner;
}

/// The components of a model, an optimizer and a learning-rate scheduler.
pub(crate) type Components<B, LR, M, O> = LearningComponentsMarker<B, LR, M, O>;

/// A batch to train on.
pub(crate) type TrainBatch<LC> =
    <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Input;

/// What a training step outputs.
pub(crate) type TrainItem<LC> =
    <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;

/// A batch to validate on.
pub(crate) type ValidBatch<LC> =
    <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Input;

/// What a validation step outputs.
pub(crate) type ValidItem<LC> =
    <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;

/// A backend that models train on: `Autodiff<Lazy<B>>`, where the memory of `B`'s devices can be
/// predicted. The bound of functions that train a model on any of them.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::AutodiffModule;
/// use firebox_lazy::Lazy;
/// use firebox_train::{Learner, StepPlanner, TrainError, TrainingBackend};
///
/// fn planner<B: TrainingBackend, M: AutodiffModule<B>>(
///     model: &M,
/// ) -> Result<StepPlanner<B, M, impl Sized>, TrainError> {
///     Learner::builder().auto_batch().step_planner(model)
/// }
///
/// let model = burn::nn::LinearConfig::new(4, 2).init::<Autodiff<Lazy<Flex>>>(&Default::default());
/// assert!(planner(&model).is_ok());
/// ```
pub trait TrainingBackend:
    AutodiffBackend<InnerBackend: LazyBackend<Base = <Self as LazyBackend>::Base>>
    + LazyBackend<Base: DeviceMemory>
{
}

impl<B> TrainingBackend for B where
    B: AutodiffBackend<InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>>
        + LazyBackend<Base: DeviceMemory>
{
}
