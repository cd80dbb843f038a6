//! Rehearses an iteration: real steps on a clone of the learner, measured and thrown away. The
//! optimizer's state and the running statistics are what they were.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::train::{Learner, LearnerModel, TrainStep};
use firebox_batch::MicroBatch;
use firebox_trace::Bytes;

use crate::gauge::Gauge;
use crate::gradients::{LossReduction, WeightedGradients};

/// What updates of the parameters take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Update {
    /// The optimizer's state that is made in the first.
    pub(crate) state: Bytes,
    /// The most that a later one adds to what was held before the first, its gradients and the
    /// optimizer's state included.
    pub(crate) added: Bytes,
}

/// The most that micro-steps on these parts of a batch add to what is held, with the sum of their
/// gradients.
pub(crate) fn micro_steps<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
    gauge: Gauge,
) -> Bytes
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    unchanged(learner, || {
        let before = gauge.live();
        let (_, peak) = gauge.peak_of(|| gradients(learner, batch, parts));
        peak - before
    })
}

/// Steps the optimizer of a clone twice: its state is made in the first step and there from the
/// second on.
pub(crate) fn update<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
    gauge: Gauge,
) -> Update
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    unchanged(learner, || {
        let before = gauge.live();
        let mut learner = learner.clone();
        let mut step = || {
            let grads = gradients(&learner, batch, parts);
            learner.lr_step();
            gauge.peak_of(|| learner.optimizer_step(grads)).1
        };
        step();
        let state = gauge.live() - before;
        Update { state, added: step() - before }
    })
}

/// The gradient of the parts.
fn gradients<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    parts: &[Range<usize>],
) -> GradientsParams
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let items: usize = parts.iter().map(Range::len).sum();
    let mut gradients = WeightedGradients::new(LossReduction::Mean, items as f64);
    let model = learner.model();
    for part in parts {
        let output = learner.train_step(batch.range(part.clone()));
        gradients.add(&model, output.grads, part.len() as f64);
    }
    gradients.finish(&model)
}

/// Runs steps that leave no mark on the running statistics of the learner's model, which clones
/// share.
pub(crate) fn unchanged<M: LearnerModel, R>(learner: &Learner<M>, steps: impl FnOnce() -> R) -> R {
    let model = learner.model();
    // A validation snapshot applies the updates that are pending for this thread.
    let settle = || drop(model.valid());
    let record = keeps_state(&model).then(|| {
        settle();
        model.clone().into_record()
    });
    let result = steps();
    if let Some(record) = record {
        settle();
        drop(model.clone().load_record(record));
    }
    result
}

/// Whether a model has tensors that are not trained: running statistics are among these.
pub(crate) fn keeps_state<M: Module>(model: &M) -> bool {
    struct Untrained(bool);

    impl ModuleVisitor for Untrained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= !param.is_require_grad();
        }
    }

    let mut untrained = Untrained(false);
    model.visit(&mut untrained);
    untrained.0
}
