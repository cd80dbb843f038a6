//! The memory of one step of a model, without a Learner.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn::train::TrainStep;
use firebox_lazy::{LazyBackend, RecordError, StepRecorder, mark, rehearse};
use firebox_trace::{Footprint, Items, Mark};

use crate::device::DeviceMemory;
use crate::device::panics::Listener;
use crate::error::{Phase, TrainError};
use crate::gradients::{forget_graphs_without, with_own_leaves};
use crate::planner::labels::{label_by_lifetime, label_parameters};
use crate::planner::rehearsal::guard;
use crate::ready::make_ready;

/// The memory that one training step of `model` needs on `batch`, without running it: forward and
/// backward pass of the whole batch, on the device of the model.
///
/// Excludes the optimizer, whatever it keeps, and what a training loop holds between steps.
/// [`Learner::plan`](crate::Learner::plan) counts these, and
/// [`Learner::largest_batch`](crate::Learner::largest_batch) says how many items fit. Leaves the
/// model unchanged. If the step reads values, the operations before a read run.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn::tensor::backend::AutodiffBackend;
/// use burn::train::{TrainOutput, TrainStep};
/// use firebox_lazy::Lazy;
/// use firebox_trace::Bytes;
///
/// #[derive(Module, Debug)]
/// struct Layer<B: Backend> {
///     linear: Linear<B>,
/// }
///
/// impl<B: AutodiffBackend> TrainStep for Layer<B> {
///     type Input = Tensor<B, 2>;
///     type Output = ();
///
///     fn step(&self, batch: Tensor<B, 2>) -> TrainOutput<()> {
///         let loss = self.linear.forward(batch).sum();
///         TrainOutput::new(self, loss.backward(), ())
///     }
/// }
///
/// type B = Autodiff<Lazy<Flex>>;
/// let device = Default::default();
/// let model = Layer::<B> { linear: LinearConfig::new(1024, 1024).init(&device) };
/// let batch = Tensor::zeros([512, 1024], &device);
/// let footprint = firebox_train::footprint(&model, &batch)?;
/// // Parameters, their gradients, the batch and the output.
/// assert!(footprint.peak > Bytes::mib(12));
/// println!("{footprint}");
/// # Ok::<(), firebox_train::TrainError>(())
/// ```
///
/// # Errors
///
/// If something the device needs is not installed, the model does not live on one device, or the
/// step panics or cannot be recorded.
pub fn footprint<B, M>(model: &M, batch: &M::Input) -> Result<Footprint, TrainError>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    M: TrainStep<Input: Clone> + AutodiffModule<B>,
{
    make_ready::<B, _>(model)?;
    let _listener = Listener::of_all();
    let record = |recorder: &StepRecorder| {
        guard(Phase::Training, Items::new(1), || {
            rehearse::<B, _>(recorder, model, |model| {
                // Leaves of its own: see `rehearse_training`.
                let current = with_own_leaves(model.clone());
                label_parameters(&current);
                mark::<B::Base>(Mark::MicroStep);
                let output = current.step(batch.clone());
                forget_graphs_without::<B, _>(&current, &output.grads);
                mark::<B::Base>(Mark::MicroStepEnd(0));
                mark::<B::Base>(Mark::IterationEnd);
            })
        })
    };
    let mut rehearsal = record(&StepRecorder::new().substitute_random().refuse_reads());
    if let Err(TrainError::Record(RecordError::ReadTooLarge { .. })) = rehearsal {
        rehearsal = record(&StepRecorder::new().substitute_random());
    }
    let mut trace = rehearsal?.trace;
    label_by_lifetime(&mut trace);
    Ok(B::Base::memory_model(&model.devices()[0]).footprint(&trace))
}
