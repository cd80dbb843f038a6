//! Decides how a training batch is run: by its plan, which is made if there is none yet.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainStep};
use firebox_lazy::LazyBackend;
use firebox_plan::Accumulating;
use firebox_trace::Bytes;

use super::coupled::{Means, ToSplit};
use super::{MEASURED_BATCHES, Run, queue};
use crate::device::DeviceMemory;
use crate::error::{During, Phase, TrainError};
use crate::gradients::summed_bytes;
use crate::planner::Admission;
use crate::planner::rehearsal::{RehearsalPlan, rehearse_training};
use crate::planner::shape::Shape;
use crate::splitter::Splitter;

/// The way to run one batch.
pub(super) struct Work {
    pub(super) shape: Shape,
    /// The item ranges of its micro-batches.
    pub(super) ranges: Vec<Range<usize>>,
    /// What is alive next to one of them.
    pub(super) held: Bytes,
    /// What is alive in addition once one of them is split further than planned.
    pub(super) sum: Bytes,
    /// Whether the plan was made on this same batch.
    pub(super) rehearsed: bool,
}

impl<B, LR, M, O, ST, SV> Run<'_, B, LR, M, O, ST, SV>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    LR: LrScheduler + 'static,
    M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep,
    O: Optimizer<M, B> + 'static,
    ST: Splitter<M::Input>,
{
    /// How to run a batch. Plans it if there is no plan.
    pub(super) fn plan_training(
        &mut self,
        batch: &M::Input,
        items: usize,
        weight: f64,
    ) -> Result<Work, TrainError> {
        let splitter = &self.strategy.train_splitter;
        let planner = match &mut self.planner {
            Some(planner) => planner,
            none => {
                let planner = self.strategy.settings.planner::<B, M>(&self.learner.model())?;
                // A thread of burn's has read the checkpoint, and its pools stay open.
                let goes_on = self.position.0 > 1;
                let usage = goes_on.then(|| <B as LazyBackend>::Base::pool_usage(&self.device));
                let of_others = usage.flatten().map(|usage| usage.reserved - usage.own);
                planner.kept.store(of_others.unwrap_or_default().get(), Relaxed);
                none.insert(planner)
            }
        };
        let shape = Shape::of::<B, _, _>(Phase::Training, batch, items, splitter, planner);
        if let Some(pool) = &self.pool {
            pool.limit(planner.budget);
            planner.pool = Some(pool.clone());
        }
        self.change_shape(self.latest, shape);
        let to_plan = self.to_plan(Phase::Training, shape);
        if let Some(iterations) = to_plan {
            let overhead = self.overhead(items);
            let planner = self.planner.as_mut().expect("made above");
            planner.overhead = overhead;
            let (learner, joins) = (&self.learner, &self.strategy.settings.joins);
            let pages = !planner.memory.is_on_host();
            let has_stepped = self.scheduler_steps > 0;
            let course =
                RehearsalPlan { iterations, has_stepped, batches: self.accumulation, pages };
            let queue = queue::<B>(&self.training, &self.device);
            let planned = planner.plan(Phase::Training, shape, iterations, |split, recorder| {
                let rehearsed =
                    rehearse_training(learner, splitter, batch, split, course, joins, recorder);
                queue.after_rehearsal(recorder);
                rehearsed
            })?;
            let limit = planned.rehearsed.loader_limit;
            self.unmeasured = MEASURED_BATCHES;
            self.report(Phase::Training, shape);
            self.let_loaders_ahead(limit);
        }
        self.latest = Some(shape);
        let planner = self.planner.as_mut().expect("made above");
        let planned = planner.planned(Phase::Training, shape).expect("made above");
        if !planned.plan.is_whole() {
            let settings = &self.strategy.settings;
            let micro_batch = planned.plan.split().largest().get();
            let to_split = ToSplit { batch, items, weight, micro_batch, splitter, settings };
            let means = Means::of(planner, planner.held(planned));
            let needed = means.ask(&mut self.known, &self.learner, &to_split)?;
            planner.predicted = planner.predicted.max(needed);
        }
        let admission = planner.begin(Phase::Training, shape);
        if admission == Admission::RunsOnceGivenBack {
            self.unmeasured = self.unmeasured.max(1);
        }
        queue::<B>(&self.training, &self.device).prepare(admission);
        self.prepare_pool(Phase::Training, shape)?;
        let planner = self.planner.as_mut().expect("made above");
        let planned = planner.planned(Phase::Training, shape).expect("made above");
        let sum = match planned.plan.accumulating() {
            Accumulating::No if self.accumulation == 1 => {
                summed_bytes::<B, M>(&self.learner.model())
            }
            _ => Bytes::ZERO,
        };
        self.watch.begin_batch(During::MicroSteps, items, &planned.plan);
        let (ranges, held) = (planned.plan.ranges().collect(), planner.held(planned));
        Ok(Work { shape, ranges, held, sum, rehearsed: to_plan.is_some() })
    }
}
