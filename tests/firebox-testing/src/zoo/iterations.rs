//! Two iterations of training as the Learner runs them, for tests that compare footprints with each
//! other and with a device.

use std::collections::VecDeque;
use std::ops::Range;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::TrainStep;
use firebox::trace::{StepRecorder, Trace, mark};
use firebox::{LazyBackend, MicroBatch, initialize};

use super::Zoo;

/// Number of earlier micro-steps whose outputs burn's metrics thread may hold while one runs.
const OUTPUTS_HELD: usize = 1;

/// Trains `model` for two iterations, with one micro-step per part of `batch`.
///
/// The optimizer steps on the weighted sum of the gradients. Returns what training leaves behind.
pub fn train<B, M>(
    model: M,
    batch: &<M as Zoo<B>>::Batch,
    parts: &[Range<usize>],
) -> (M, impl Optimizer<M, B> + use<B, M>)
where
    B: AutodiffBackend,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let mut model = model;
    let mut optimizer = AdamConfig::new().init::<B, M>();
    let mut outputs = VecDeque::new();

    for _ in 0..2 {
        let mut sum = GradientsParams::new();
        for part in parts {
            outputs.drain(..outputs.len().saturating_sub(OUTPUTS_HELD));
            let output = model.step(batch.range(part.clone()));
            if parts.len() == 1 {
                sum = output.grads;
            } else {
                model.visit(&mut AddScaled { sum: &mut sum, gradients: output.grads });
            }
            outputs.push_back(output.item);
        }
        model = optimizer.step(1e-3, model, sum);
    }
    (model, optimizer)
}

/// Records the trace of [`train`] on a batch of `items` items, on the backend below `B`.
pub fn record<B, M>(items: usize, parts: &[Range<usize>], device: &B::Device) -> Trace
where
    B: AutodiffBackend + LazyBackend,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let model = M::new(device);
    initialize::<B, M>(&model);
    let numbers: Vec<usize> = (0..items).collect();
    let batch = M::batch(&numbers, device);
    let recording = StepRecorder::new().record::<B::Base, _>(|| {
        mark::<B::Base>("begin");
        train(model, &batch, parts)
    });
    let trace = recording.expect("this thread records nothing else").discard().trace;
    assert_eq!(trace.check(), Ok(()));
    trace
}

/// Adds half of each gradient to the sum. Training uses another weight, which needs the same
/// memory.
struct AddScaled<'a> {
    sum: &'a mut GradientsParams,
    gradients: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for AddScaled<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) else { return };
        let gradient = gradient.mul_scalar(0.5);
        let gradient = match self.sum.remove::<B::InnerBackend, D>(param.id) {
            Some(sum) => sum.add(gradient),
            None => gradient,
        };
        self.sum.register::<B::InnerBackend, D>(param.id, gradient);
    }
}

/// Consecutive parts of a batch with these sizes.
pub fn parts(sizes: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut begin = 0;
    let part = |size| {
        begin += size;
        begin - size..begin
    };
    sizes.into_iter().map(part).collect()
}
