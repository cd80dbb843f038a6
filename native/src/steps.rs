//! Training loops of the user's own: each step is planned before it runs, and runs in the
//! micro-batches of its plan.

use std::marker::PhantomData;
use std::ops::Range;

use burn::module::Module;
use firebox_batch::{MicroBatch, item_shapes};
use firebox_plan::{StepLog, StepUse};
use firebox_trace::Bytes;

use crate::error::TrainError;
use crate::gradients::LossReduction;
use crate::learner::{LearnerBuilder, parameter_bytes};
use crate::planner::{PlanReport, Planner};
use crate::rehearsal::{Rehearsal, unchanged};

/// Plans the steps of a training loop of your own.
///
/// [`step`](Self::step) calls a closure with the model, the optimizer and the batch's
/// [micro-batches](MicroBatches). The first time for batches of a shape, it calls the closure with
/// clones before, on parts of the batch, to find out what a step takes.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamConfig, GradientsParams};
/// use burn::tensor::{Device, Tensor};
/// use firebox::{Bytes, Learner, WeightedGradients};
///
/// let device = Device::flex().autodiff();
/// let mut model: Linear = LinearConfig::new(4, 1).init(&device);
/// let mut optim = AdamConfig::new().init();
/// let mut steps = Learner::builder().auto_batch().memory(Bytes::mib(64)).step_planner(&model)?;
///
/// for _ in 0..3 {
///     let batch = Tensor::<2>::ones([64, 4], &device);
///     steps.step(&mut model, &mut optim, &batch, |model, optim, parts| {
///         let mut gradients = WeightedGradients::mean(parts.weight());
///         parts.each(|part, weight| {
///             let loss = model.forward(part).square().mean();
///             let grads = GradientsParams::from_grads(loss.backward(), model);
///             gradients.add(model, grads, weight);
///         })?;
///         let grads = gradients.finish(model);
///         *model = optim.step(1e-3, model.clone(), grads);
///         Ok(())
///     })?;
/// }
/// assert!(steps.plans()[0].plan.is_whole());
/// # Ok::<(), firebox::TrainError>(())
/// ```
///
/// Counts what a step needs, not what else the loop holds, nor batches that loaders prepare.
/// Whether the gradients of a split batch are those of the whole batch is not checked: only the
/// [`Learner`](crate::Learner) knows how a step uses them. On a GPU whose memory runs out all the
/// same, the error shows where a value is read that was not computed.
pub struct StepPlanner<M> {
    planner: Planner,
    settings: LearnerBuilder,
    plans: Vec<PlanReport>,
    log: StepLog,
    ended: usize,
    model: PhantomData<fn(M)>,
}

impl LearnerBuilder {
    /// Builds a [`StepPlanner`] for a training loop of your own, on the device of `model`.
    ///
    /// Uses all options but `seed` and `split_although_coupled`, which have no effect.
    ///
    /// # Errors
    ///
    /// If the model is not on a device that trains, or the budget is not known.
    pub fn step_planner<M: Module>(self, model: &M) -> Result<StepPlanner<M>, TrainError> {
        let device = model.devices().first().cloned().unwrap_or_default();
        let planner = self.planner(&device, parameter_bytes(model), (false, false))?;
        let log = StepLog::open(self.log_path.as_deref())?;
        Ok(StepPlanner {
            planner,
            settings: self,
            plans: Vec::new(),
            log,
            ended: 0,
            model: PhantomData,
        })
    }
}

impl<M: Module> StepPlanner<M> {
    /// Runs one step on a batch. Plans it first if batches of its shape have no plan yet.
    ///
    /// `optim` is what the step changes besides the model: an optimizer, several as a tuple,
    /// schedulers. In rehearsals `step` works on clones of both. What else it changes, rehearsals
    /// change, too: values that it captures, random numbers, and running statistics of models in
    /// `optim`.
    ///
    /// # Errors
    ///
    /// If the batch does not fit however it is cut, and those of `step`.
    pub fn step<O, I, R>(
        &mut self,
        model: &mut M,
        optim: &mut O,
        batch: &I,
        mut step: impl FnMut(&mut M, &mut O, &mut MicroBatches<'_, I>) -> Result<R, TrainError>,
    ) -> Result<R, TrainError>
    where
        O: Clone,
        I: MicroBatch,
    {
        let items = batch.items()?;
        if items == 0 {
            return Err(TrainError::EmptyBatch);
        }
        let weight = batch.weight();
        let sums = self.settings.reduction == LossReduction::Sum;
        if !weight.is_finite() || weight < 0.0 || weight == 0.0 && !sums {
            return Err(TrainError::Weight { weight });
        }
        let shape = (item_shapes(batch), items);
        let plan = match self.planner.known(&shape) {
            Some(plan) => plan,
            None => {
                let used = optim.clone();
                // It ends before the step: the optimizer's state is updated in place then.
                let mut rehearsal = OfLoop { model, optim, used, batch, step: &mut step };
                let report = self.planner.plan(&mut rehearsal, shape)?;
                let is_first = self.plans.is_empty();
                if is_first {
                    self.settings.write_report(&self.planner, &mut rehearsal, &report)?;
                }
                drop(rehearsal);
                self.settings.say_plan(&report, is_first);
                self.planner.gauge().give_back();
                let plan = report.plan.clone();
                self.plans.push(report);
                plan
            }
        };
        let mut parts = MicroBatches {
            batch,
            weight,
            parts: plan.ranges().collect(),
            reduction: self.settings.reduction,
        };
        let gauge = self.planner.gauge().clone();
        let (result, peak) = gauge.peak_of(|| step(model, optim, &mut parts));
        let result = result?;
        self.planner.has_stepped();
        self.ended += 1;
        self.log.add(items, plan.len(), Some(self.planner.taken(peak)));
        let (iteration, budget, predicted) = (self.ended, self.planner.budget(), self.predicted());
        self.log.end(|| StepUse { iteration, budget, predicted, ..StepUse::default() })?;
        self.planner.compare(&plan, peak, &self.settings)?;
        Ok(result)
    }

    /// The plans so far, in the order in which they were made.
    pub fn plans(&self) -> &[PlanReport] {
        &self.plans
    }

    /// What steps may use.
    pub fn budget(&self) -> Bytes {
        self.planner.budget()
    }

    /// The most that was predicted so far.
    pub fn predicted(&self) -> Bytes {
        self.planner.predicted_and_measured().0
    }

    /// The most that a step was measured to take.
    pub fn measured(&self) -> Bytes {
        self.planner.predicted_and_measured().1
    }
}

/// The micro-batches of a batch, in one step. See [`StepPlanner`].
pub struct MicroBatches<'a, I> {
    batch: &'a I,
    weight: f64,
    parts: Vec<Range<usize>>,
    reduction: LossReduction,
}

impl<I: MicroBatch> MicroBatches<'_, I> {
    /// The number of micro-batches.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one micro-batch")]
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// The weight of the batch in the loss: its items, unless the batch
    /// [says otherwise](MicroBatch::weight).
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Calls `step` with each micro-batch and its weight in the loss, as often as a step needs all
    /// of them. One that weighs nothing in a mean is left out.
    ///
    /// # Errors
    ///
    /// If one weighs what is no weight.
    pub fn each(&mut self, mut step: impl FnMut(I, f64)) -> Result<(), TrainError> {
        for range in &self.parts {
            let part = self.batch.range(range.clone());
            let weight = part.weight();
            if !weight.is_finite() || weight < 0.0 {
                return Err(TrainError::Weight { weight });
            }
            if weight > 0.0 || self.reduction == LossReduction::Sum {
                step(part, weight);
            }
        }
        Ok(())
    }
}

/// A step of the user's loop, which is rehearsed on clones.
struct OfLoop<'a, M, O, I, S> {
    model: &'a M,
    optim: &'a O,
    used: O,
    batch: &'a I,
    step: &'a mut S,
}

impl<M, O, I, S, R> Rehearsal for OfLoop<'_, M, O, I, S>
where
    M: Module,
    O: Clone,
    I: MicroBatch,
    S: FnMut(&mut M, &mut O, &mut MicroBatches<'_, I>) -> Result<R, TrainError>,
{
    type Outputs = R;

    fn iterate(&mut self, parts: &[Range<usize>]) -> Result<R, TrainError> {
        let weight = parts.iter().map(|part| self.batch.range(part.clone()).weight()).sum();
        let mut parts = MicroBatches {
            batch: self.batch,
            weight: if weight > 0.0 { weight } else { 1.0 },
            parts: parts.to_vec(),
            reduction: LossReduction::Sum,
        };
        (self.step)(&mut self.model.clone(), &mut self.used, &mut parts)
    }

    fn forget_state(&mut self) {
        self.used = self.optim.clone();
    }

    #[cfg(feature = "cubecl")]
    fn tell_parameters(&self) {
        crate::recording::parameters(self.model);
    }

    fn unchanged<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let model = self.model;
        unchanged(model, || work(self))
    }
}
