//! The validation of an epoch: forward passes only, while the optimizer's state stays in memory.

use burn::data::dataloader::{DataLoader, Progress};
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainStep};
use firebox_lazy::LazyBackend;
use firebox_trace::Bytes;

use super::metrics::{Output, Place};
use super::{MEASURED_BATCHES, Run, ValidInput, queue, sender};
use crate::device::DeviceMemory;
use crate::error::{During, Phase, TrainError};
use crate::planner::Admission;
use crate::planner::rehearsal::{rehearse_validation, validation_model};
use crate::planner::shape::Shape;
use crate::run::micro_step::MicroStep;
use crate::splitter::Splitter;
use crate::weights;
use crate::whole::joined;

impl<B, LR, M, O, ST, SV> Run<'_, B, LR, M, O, ST, SV>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    LR: LrScheduler + 'static,
    M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep,
    O: Optimizer<M, B> + 'static,
    ST: Splitter<M::Input>,
    SV: Splitter<ValidInput<M, B>>,
{
    pub(super) fn valid_epoch(
        &mut self,
        loader: &dyn DataLoader<B::InnerBackend, ValidInput<M, B>>,
        epoch: &Progress,
    ) -> Result<(), TrainError> {
        let model = validation_model(&self.learner);
        self.loader_items = loader.num_items();
        let mut iterator = self.gate.starting(|| loader.iter());
        let mut iteration = 0;
        let mut latest = None;
        while let Some(batch) = self.gate.waiting(|| iterator.next()) {
            iteration += 1;
            let at =
                Place { loader: iterator.progress(), epoch: epoch.clone(), iteration, lr: None };
            let splitter = &self.strategy.valid_splitter;
            let items = splitter.items(&batch)?;
            if items == 0 {
                return Err(TrainError::EmptyBatch { phase: Phase::Validation });
            }
            let planner = self.planner.as_mut().expect("training comes before validation");
            let phase = Phase::Validation;
            let shape = Shape::of::<B::InnerBackend, _, _>(phase, &batch, items, splitter, planner);
            self.change_shape(latest.replace(shape), shape);
            let to_plan = self.to_plan(phase, shape);
            if let Some(iterations) = to_plan {
                let overhead = self.overhead(items);
                let planner = self.planner.as_mut().expect("training comes before validation");
                planner.overhead = overhead;
                let queue = queue::<B::InnerBackend>(&self.training, &self.device);
                let joins = &self.strategy.settings.joins;
                let planned =
                    planner.plan(Phase::Validation, shape, iterations, |split, recorder| {
                        let rehearsed = rehearse_validation::<B::InnerBackend, _, _>(
                            &model, splitter, &batch, split, joins, recorder,
                        );
                        queue.after_rehearsal(recorder);
                        rehearsed
                    })?;
                let limit = planned.rehearsed.loader_limit;
                self.unmeasured = MEASURED_BATCHES;
                self.report(Phase::Validation, shape);
                self.let_loaders_ahead(limit);
            }
            let planner = self.planner.as_mut().expect("training comes before validation");
            let admission = planner.begin(Phase::Validation, shape);
            if admission == Admission::RunsOnceGivenBack {
                self.unmeasured = self.unmeasured.max(1);
            }
            queue::<B::InnerBackend>(&self.training, &self.device).prepare(admission);
            self.prepare_pool(Phase::Validation, shape)?;
            let splitter = &self.strategy.valid_splitter;
            let planner = self.planner.as_mut().expect("training comes before validation");
            let planned = planner.planned(Phase::Validation, shape).expect("made above");
            let held = planner.held(planned);
            let ranges = planned.plan.ranges().collect::<Vec<_>>();
            self.watch.begin_batch(During::Validation, items, &planned.plan);
            let keeps_statistics = !planner.running_state.is_empty();
            let mut micro_step = MicroStep::<B::InnerBackend, M::InnerModule, _, SV> {
                phase: Phase::Validation,
                // No gradient is computed, so a split is always allowed.
                may_split: &mut |_| Ok(Bytes::ZERO),
                planner,
                module: &model,
                keeps_statistics,
                splitter,
                batch: &batch,
                shape,
                rehearsed: to_plan.is_some(),
                held,
                sum: Bytes::ZERO,
                queue: queue(&self.training, &self.device),
                pooled: None,
            };
            let mut sender = sender(&mut self.processor, &self.training, &self.gate);
            let settings = &self.strategy.settings;
            let (reduction, join) = (settings.reduction, settings.joins.of());
            let mut parts = Vec::new();
            if join.is_some() {
                sender.done_with_all();
            }
            for range in ranges {
                micro_step.run(range, &mut |micro| model.step(micro), &mut |output, weight| {
                    // A micro-batch that counts nothing has no loss: its mean is not a number.
                    if weights::scale(weight, 1.0, reduction).is_none() {
                        return Ok(());
                    }
                    match join {
                        None => sender.validated(&at, Output::of_latest(output)),
                        Some(_) => parts.push((output, weight)),
                    }
                    Ok(())
                })?;
            }
            let queue = queue::<B::InnerBackend>(&self.training, &self.device);
            if let Some(output) =
                join.and_then(|join| queue.alone(|| joined(join, reduction, parts)))
            {
                sender.validated(&at, Output::of_latest(output));
            }
            planner.has_run(Phase::Validation);
            if self.should_stop() {
                break;
            }
        }
        self.watch.check()?;
        self.measure()?;
        sender(&mut self.processor, &self.training, &self.gate)
            .end_validated(epoch.items_processed);
        Ok(())
    }
}
