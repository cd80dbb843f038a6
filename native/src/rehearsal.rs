//! Rehearses an iteration: real steps on a clone of the learner, measured and thrown away. The
//! optimizer's state and the running statistics are what they were.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;

use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::train::{Learner, LearnerModel, TrainStep};
use firebox_batch::MicroBatch;
use firebox_trace::Bytes;

use crate::gauge::Gauge;
use crate::gradients::{LossReduction, WeightedGradients};

/// What micro-steps take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MicroSteps {
    /// The most that they add to what is held, their outputs and the sum of their gradients
    /// included.
    pub(crate) added: Bytes,
    /// Their outputs.
    pub(crate) outputs: Bytes,
}

/// What updates of the parameters take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Update {
    /// The optimizer's state that is made in the first.
    pub(crate) state: Bytes,
    /// The most that a later one adds to what was held before the first, its gradients and the
    /// optimizer's state included.
    pub(crate) added: Bytes,
    /// What the optimizer's state takes that the measurement itself has read from a checkpoint:
    /// burn reads it where it is first used.
    pub(crate) read: Bytes,
}

/// Measures micro-steps on these parts of a batch.
pub(crate) fn micro_steps<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
    gauge: &Gauge,
) -> MicroSteps
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    unchanged(learner, || {
        let before = gauge.live();
        let ((grads, outputs), peak) = gauge.peak_of(|| gradients(learner, batch, parts));
        drop(grads);
        let with_outputs = gauge.live();
        drop(outputs);
        MicroSteps { added: peak - before, outputs: with_outputs - gauge.live() }
    })
}

/// Steps the optimizer of a clone twice: its state is made in the first step and there from the
/// second on. `parameters` are the bytes of the clone's own parameters, which training has not.
pub(crate) fn update<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
    (gauge, parameters): (&Gauge, Bytes),
) -> Update
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    unchanged(learner, || {
        let at_first = gauge.live();
        let mut learner = learner.clone();
        let mut step = || {
            let (grads, _) = gradients(&learner, batch, parts);
            learner.lr_step();
            gauge.peak_of(|| learner.optimizer_step(grads)).1
        };
        step();
        let with_state = gauge.live();
        let peak = step();
        drop(learner);
        let read = gauge.live() - at_first;
        let before = at_first + read + parameters;
        Update { state: with_state - before, added: peak - before, read }
    })
}

/// The gradient of the parts, and their outputs.
pub(crate) fn gradients<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
) -> (GradientsParams, Vec<<M as TrainStep>::Output>)
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let items: usize = parts.iter().map(Range::len).sum();
    let mut gradients = WeightedGradients::new(LossReduction::Mean, items as f64);
    let mut outputs = Vec::new();
    let model = learner.model();
    for part in parts {
        let output = learner.train_step(batch.range(part.clone()));
        gradients.add(&model, output.grads, part.len() as f64);
        outputs.push(output.item);
    }
    (gradients.finish(&model), outputs)
}

/// Runs steps that leave no mark on the running statistics of the learner's model, which clones
/// share.
pub(crate) fn unchanged<M: LearnerModel, R>(learner: &Learner<M>, steps: impl FnOnce() -> R) -> R {
    let statistics = Statistics::of(learner);
    let result = steps();
    statistics.put_back(learner);
    result
}

/// The running statistics of a model as they are at a time.
pub(crate) struct Statistics(Untrained);

impl Statistics {
    /// Those of now.
    pub(crate) fn of<M: LearnerModel>(learner: &Learner<M>) -> Self {
        let model = learner.model();
        let mut untrained = Untrained::default();
        model.visit(&mut untrained);
        if !untrained.0.is_empty() {
            settle(&model);
            untrained = Untrained::default();
            model.visit(&mut untrained);
        }
        Self(untrained)
    }

    /// Makes them those of the model again.
    pub(crate) fn put_back<M: LearnerModel>(mut self, learner: &Learner<M>) {
        if !self.0.0.is_empty() {
            let model = learner.model();
            settle(&model);
            drop(model.map(&mut self.0));
        }
    }
}

/// A validation snapshot applies the updates that are pending for this thread.
fn settle<M: LearnerModel>(model: &M) {
    drop(model.valid());
}

/// The tensors of a model that are not trained, by their numbers: running statistics are among
/// these. They are shared, not copied.
#[derive(Default)]
pub(crate) struct Untrained(HashMap<ParamId, Box<dyn Any>>);

impl ModuleVisitor for Untrained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            self.0.insert(param.id, Box::new(param.val()));
        }
    }
}

/// Puts them back: running statistics are changed in place.
impl ModuleMapper for Untrained {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let kept = self.0.get(&param.id).and_then(|kept| kept.downcast_ref::<Tensor<D>>());
        match kept {
            Some(kept) => Param::initialized(param.id, kept.clone()),
            None => param,
        }
    }
}
