//! Admits an optimizer step before it runs, if it may leave more than the plan counts: parameters
//! have their first gradient, or the optimizer decides by values.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Learner;
use firebox_lazy::{StepRecorder, in_full_precision, mark, rehearse};
use firebox_trace::{Category, Items, Mark, Trace};

use crate::components::LazyComponents;
use crate::error::{Phase, TrainError};
use crate::parameters::parameters;
use crate::park::of_step;
use crate::planner::Planner;
use crate::planner::labels::{
    label_by_lifetime, label_gradients, label_parameters, retire_what_is_replaced,
};
use crate::planner::ledger::{Batch, Left};
use crate::planner::rehearsal::guard;
use crate::planner::shape::Shape;
use crate::ranks::exchange::has_gradient;

/// Of which parameters a gradient is known to leave what the ledger has, in the order of the
/// module's visit.
#[derive(Clone, Debug, Default)]
pub(super) struct Covered(Vec<bool>);

impl Covered {
    /// Admits the step of a learner's optimizer with these gradients.
    ///
    /// # Errors
    ///
    /// If it does not fit. Nothing has changed then.
    pub(super) fn admit<LC: LazyComponents>(
        &mut self,
        planner: &mut Planner,
        shape: Option<Shape>,
        (learner, model): (&Learner<LC>, &LC::TrainingModel),
        grads: &GradientsParams,
    ) -> Result<(), TrainError> {
        let Some(shape) = shape else { return Ok(()) };
        let has = has_gradient::<LC::Backend, _>(model, Some(grads));
        self.0.resize(has.len(), false);
        let is_covered = |(has, covered): (&bool, &bool)| !has || *covered;
        let is_open = planner.ledger().is_open();
        if !is_open && has.iter().zip(&self.0).all(is_covered) {
            return Ok(());
        }
        let changed = parameters::<LC::Backend, _>(model).into_iter();
        let mut changed = changed.filter(|one| one.has_gradient::<LC::Backend>(grads));
        if is_open || !changed.all(|one| planner.ledger().knows(&one.path)) {
            let trace = rehearse_update(learner, model, grads)?;
            let left = Left::by_rehearsal(&trace).pop().unwrap_or_default();
            let memory = planner.memory().clone();
            planner.admit_update(
                shape,
                Batch::IsGone,
                (&left, || memory.footprint(&trace).growth()),
            )?;
        }
        self.0.iter_mut().zip(has).for_each(|(covered, has)| *covered |= has);
        Ok(())
    }
}

/// Records the step of a learner's optimizer on clones, and throws it away.
fn rehearse_update<LC: LazyComponents>(
    learner: &Learner<LC>,
    model: &LC::TrainingModel,
    grads: &GradientsParams,
) -> Result<Trace, TrainError> {
    struct Cloned<'a> {
        grads: &'a GradientsParams,
        cloned: GradientsParams,
    }

    impl<B: AutodiffBackend> ModuleVisitor<B> for Cloned<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
                self.cloned.register::<B::InnerBackend, D>(param.id, grad);
            }
        }
    }

    let mut cloned = Cloned { grads, cloned: GradientsParams::new() };
    model.visit(&mut cloned);
    let grads = cloned.cloned;
    let recorder = StepRecorder::new().substitute_random();
    let rehearsal = guard(Phase::Training, Items::new(1), || {
        rehearse::<LC::Backend, _>(&recorder, model, |model| {
            let mut learner = learner.clone();
            if let Some(device) = model.devices().first() {
                learner.fork(device);
            }
            label_parameters(model);
            mark::<LC::Base>(Mark::OptimizerStep);
            // Those of an optimizer with momentum become its first state.
            let grads = of_step::<LC::Backend, _>(model, grads);
            label_gradients::<LC::Backend, _>(model, &grads, Category::Gradient);
            in_full_precision(|| learner.optimizer_step(grads));
            label_parameters(&learner.model());
            mark::<LC::Base>(Mark::IterationEnd);
        })
    })?;
    let mut trace = rehearsal.trace;
    label_by_lifetime(&mut trace);
    retire_what_is_replaced(&mut trace);
    Ok(trace)
}
