//! Rehearses an iteration: real steps with the parameters of training, measured and thrown away.
//! The optimizer is one of the rehearsal's own, and running statistics are what they were.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, GradientCheckpointingStrategy, Int, Tensor};
use burn::train::{LearnerModel, TrainStep};
use burn_dispatch::DispatchAutodiffContext;
use firebox_batch::MicroBatch;
use firebox_trace::Bytes;

use crate::error::TrainError;
use crate::gauge::Gauge;
use crate::gradients::{LossReduction, WeightedGradients};

/// What an iteration takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Iteration {
    /// The most that it adds to what is held, the optimizer's state left out: in its micro-steps,
    /// with their outputs and the sum of their gradients, or in its update.
    pub(crate) added: Bytes,
    /// The outputs of its micro-steps.
    pub(crate) outputs: Bytes,
    /// What it costs to run: its operations on a GPU, the seconds that it took on the host.
    pub(crate) cost: f64,
}

/// An iteration that can be rehearsed.
pub(crate) trait Rehearsal {
    /// What it hands out, for metrics.
    type Outputs;

    /// Runs micro-steps on these parts of the batch and updates a copy of the parameters. What
    /// stays is the state of the rehearsal's own optimizer.
    ///
    /// # Errors
    ///
    /// Those of the user's step.
    fn iterate(&mut self, parts: &[Range<usize>]) -> Result<Self::Outputs, TrainError>;

    /// Forgets the state of the rehearsal's own optimizer.
    fn forget_state(&mut self);

    /// Tells a recording which tensors are the parameters.
    #[cfg(feature = "cubecl")]
    fn tell_parameters(&self);

    /// Runs `work` so that it leaves no mark on running statistics.
    fn unchanged<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R;
}

/// Measures an iteration on these parts of a batch, on the host. The optimizer has its state.
///
/// # Errors
///
/// Those of the user's step.
pub(crate) fn measured(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    gauge: &Gauge,
) -> Result<Iteration, TrainError> {
    rehearsal.unchanged(|rehearsal| {
        let (before, begin) = (gauge.live(), Instant::now());
        let (outputs, peak) = gauge.peak_of(|| rehearsal.iterate(parts));
        let (with_outputs, cost) = (gauge.live(), begin.elapsed().as_secs_f64());
        drop(outputs?);
        Ok(Iteration { added: peak - before, outputs: with_outputs - gauge.live(), cost })
    })
}

/// Makes the state of the rehearsal's own optimizer on the host. Returns what it takes.
///
/// # Errors
///
/// Those of the user's step.
pub(crate) fn state(
    rehearsal: &mut impl Rehearsal,
    parts: &[Range<usize>],
    gauge: &Gauge,
) -> Result<Bytes, TrainError> {
    rehearsal.unchanged(|rehearsal| {
        // Threads start, and keep buffers, in the first step of a process.
        drop(rehearsal.iterate(parts)?);
        rehearsal.forget_state();
        let before = gauge.live();
        drop(rehearsal.iterate(parts)?);
        Ok(gauge.live() - before)
    })
}

/// An iteration of burn's learner.
pub(crate) struct OfLearner<'a, M: LearnerModel> {
    model: &'a M,
    lr: ModuleLearningRate,
    batch: &'a <M as TrainStep>::Input,
    /// The optimizer without its state, and with that of the rehearsal.
    optim: &'a ModuleOptimizer,
    used: ModuleOptimizer,
}

impl<'a, M: LearnerModel> OfLearner<'a, M> {
    pub(crate) fn new(
        (model, lr): (&'a M, ModuleLearningRate),
        batch: &'a <M as TrainStep>::Input,
        optim: &'a ModuleOptimizer,
    ) -> Self {
        Self { model, lr, batch, optim, used: optim.clone() }
    }
}

impl<M> Rehearsal for OfLearner<'_, M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    type Outputs = Vec<<M as TrainStep>::Output>;

    fn iterate(&mut self, parts: &[Range<usize>]) -> Result<Self::Outputs, TrainError> {
        let items: usize = parts.iter().map(Range::len).sum();
        let mut gradients = WeightedGradients::new(LossReduction::Mean, items as f64);
        let mut outputs = Vec::new();
        for part in parts {
            let output = TrainStep::step(self.model, self.batch.range(part.clone()));
            gradients.add(self.model, output.grads, part.len() as f64);
            outputs.push(output.item);
        }
        let grads: GradientsParams = gradients.finish(self.model);
        drop(self.model.clone().optimize(&mut self.used, self.lr.clone(), grads));
        Ok(outputs)
    }

    fn forget_state(&mut self) {
        self.used = self.optim.clone();
    }

    #[cfg(feature = "cubecl")]
    fn tell_parameters(&self) {
        crate::recording::parameters(self.model);
    }

    fn unchanged<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let model = self.model;
        unchanged(model, || work(self))
    }
}

/// The same model, whose parameters are shared, with burn's gradient checkpointing.
pub(crate) fn with_checkpointing<M: Module>(model: M) -> M {
    struct Checkpointing;

    fn of<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Tensor<D, K> {
        let mut tensor = tensor.into_dispatch();
        tensor.autodiff = DispatchAutodiffContext::Enabled(GradientCheckpointingStrategy::Balanced);
        Tensor::from_dispatch(tensor)
    }

    impl ModuleMapper for Checkpointing {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let is_trained = param.is_require_grad();
            let tensor = of(param.val().detach());
            Param::initialized(param.id, tensor.set_require_grad(is_trained))
        }

        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Int>>,
        ) -> Param<Tensor<D, Int>> {
            Param::initialized(param.id, of(param.val()))
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<D, Bool>>,
        ) -> Param<Tensor<D, Bool>> {
            Param::initialized(param.id, of(param.val()))
        }
    }

    model.map(&mut Checkpointing)
}

/// Runs steps that leave no mark on the running statistics of a model, which clones share.
pub(crate) fn unchanged<M: Module, R>(model: &M, steps: impl FnOnce() -> R) -> R {
    let statistics = Statistics::of(model);
    // A step that panics has changed them, too.
    let result = catch_unwind(AssertUnwindSafe(steps));
    statistics.put_back(model);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// The running statistics of a model as they are at a time.
pub(crate) struct Statistics(Untrained);

impl Statistics {
    /// Those of now.
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut untrained = Untrained::default();
        model.visit(&mut untrained);
        if !untrained.0.is_empty() {
            settle(model);
            untrained = Untrained::default();
            model.visit(&mut untrained);
        }
        Self(untrained)
    }

    /// Makes them those of the model again.
    pub(crate) fn put_back<M: Module>(mut self, model: &M) {
        if !self.0.0.is_empty() {
            settle(model);
            drop(model.clone().map(&mut self.0));
        }
    }
}

/// A validation snapshot applies the updates that are pending for this thread.
fn settle<M: Module>(model: &M) {
    drop(model.valid());
}

/// The tensors of a model that are not trained, by their numbers: running statistics are among
/// these. They are shared, not copied.
#[derive(Default)]
struct Untrained(HashMap<ParamId, Box<dyn Any>>);

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
