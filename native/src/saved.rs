//! Saved traces: [`Learner::trace`](crate::Learner::trace) records a step for batches of all sizes,
//! for `firebox plan` and `firebox show` of the command line.

use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Device, Int, Tensor};
use burn::train::{LearnerModel, TrainStep};
use firebox_batch::MicroBatch;
use firebox_plan::Split;
use firebox_saved::{About, RecordingProgress, Sample, SaveError, SavedTrace};

use crate::dry::{self, Iterations};
use crate::error::TrainError;
use crate::gauge::Gauge;
use crate::learner::parameter_bytes;
use crate::planner::recorded_parts;
use crate::progress::Planning;
use crate::recording::type_of;
use crate::rehearsal::OfLearner;

/// Records the step of a learner, whose optimizer has no state, for batches of all sizes.
///
/// # Errors
///
/// If the device does not say what it computes, the step fails, or it is another program for other
/// sizes.
pub(crate) fn trace<M>(
    (model, lr): (&M, ModuleLearningRate),
    optim: &ModuleOptimizer,
    batch: &<M as TrainStep>::Input,
    (device, shows): (&Device, bool),
) -> Result<SavedTrace, TrainError>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let items = batch.items()?;
    if items == 0 {
        return Err(TrainError::EmptyBatch);
    }
    let unknown = || TrainError::UnknownDevice { device: format!("{device:?}") };
    let gauge = Gauge::of(device).ok_or_else(unknown)?;
    let silent = || {
        let message =
            format!("{} does not say what it computes: GPUs with burn's fusion do", gauge.name());
        TrainError::NotTraced { message }
    };
    if gauge.is_of_host() {
        return Err(silent());
    }
    let mut rehearsal = OfLearner::new((model, lr.clone()), batch, optim);
    let runs = dry::how(&mut rehearsal, &[0..1], device)?;
    let int = Tensor::<1, Int>::zeros([1], &device.clone().inner());
    let about = About {
        model: About::name_of::<M>(),
        backend: format!("{}, by burn 0.22", gauge.name()),
        int: type_of(&int.shape(), int.dtype()).dtype,
        items,
        parameters: parameter_bytes(model),
        firebox: env!("CARGO_PKG_VERSION").to_owned(),
        splits: None,
    };
    let mut planning = Planning::begin(items, shows);
    let record = |split: Split, at: RecordingProgress| {
        planning.records(at.number, at.of);
        // A batch of its own, not a part of a larger one.
        let batch = batch.range(0..split.batch().get());
        let mut rehearsal = OfLearner::new((model, lr.clone()), &batch, optim);
        let (parts, more) = recorded_parts(split);
        let what = (runs, Iterations::FirstTwo);
        let trace = dry::recorded(&mut rehearsal, &parts, device, what)?.finish(&more).trace;
        let is_told = trace.calls().next().is_some();
        if is_told { Ok(Sample { trace, replaced: Vec::new() }) } else { Err(silent()) }
    };
    SavedTrace::record(about, record).map_err(|error| match error {
        SaveError::Recording { cause, .. } => cause,
        SaveError::EmptyBatch => TrainError::EmptyBatch,
        irregular => TrainError::NotTraced { message: irregular.to_string() },
    })
}
