//! Shared by the tests of failures: training on batches of given sizes, and the state that a
//! failure leaves.

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{AdamConfig, Optimizer};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, LearningComponentsMarker, SupervisedTraining, TrainStep};
use firebox::train::LastState;
use firebox::{Bytes, FitError, Fitted, Lazy, Learner};
use firebox_testing::task::{Given, Points, batch};

pub type B = Autodiff<Lazy<Flex>>;
pub type Adam<M> = burn::optim::adaptor::OptimizerAdaptor<burn::optim::Adam, M, B>;
pub type AdamRecord<M> = <Adam<M> as Optimizer<M, B>>::Record;
pub type Training<M, O = Adam<M>> = SupervisedTraining<LearningComponentsMarker<B, f64, M, O>>;
pub type State<M> = LastState<M, AdamRecord<M>, ()>;
pub type Outcome<M> =
    Result<Fitted<<M as AutodiffModule<B>>::InnerModule>, FitError<M, AdamRecord<M>, ()>>;

/// One epoch on batches of these sizes, with a validation on six items.
pub fn training<M, O>(folder: &Path, sizes: &[usize]) -> Training<M, O>
where
    M: TrainStep<Input = Points<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Points<Lazy<Flex>>>,
    O: Optimizer<M, B> + 'static,
{
    validated(folder, sizes, 6)
}

/// One epoch on batches of these sizes, with a validation on `items` items.
pub fn validated<M, O>(folder: &Path, sizes: &[usize], items: usize) -> Training<M, O>
where
    M: TrainStep<Input = Points<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Points<Lazy<Flex>>>,
    O: Optimizer<M, B> + 'static,
{
    let batches = sizes.iter().map(|items| batch(*items)).collect();
    SupervisedTraining::new(folder, Given::loader(batches), Given::loader(vec![batch(items)]))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1)
}

/// Trains with Adam and room for every batch.
pub fn fit<M>(model: M, training: Training<M>) -> Outcome<M>
where
    M: TrainStep<Input = Points<B>> + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep<Input = Points<Lazy<Flex>>>,
{
    Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training)
}

/// Makes models validate with their `net`.
macro_rules! validates_as_its_net {
    ($($model:ident),+) => {$(
        impl<B: burn::tensor::backend::Backend> burn::train::InferenceStep for $model<B> {
            type Input = firebox_testing::task::Points<B>;
            type Output = burn::train::ClassificationOutput<B>;

            fn step(&self, batch: Self::Input) -> Self::Output {
                burn::train::InferenceStep::step(&self.net, batch)
            }
        }
    )+};
}

pub(crate) use validates_as_its_net;
