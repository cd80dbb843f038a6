//! The validation of an epoch: forward passes only, while the optimizer's state stays in memory.

use std::cell::RefCell;
use std::ops::Range;

use burn::data::dataloader::{DataLoader, Progress};
use burn::train::InferenceStep;
use firebox_lazy::StepRecorder;

use super::metrics::{Output, Parts, Place};
use super::{Run, sender};
use crate::check::{Found, Giver, Means, apart, recorded};
use crate::components::{LazyComponents, TrainBatch, ValidBatch};
use crate::error::{Phase, TrainError};
use crate::iteration::running::{Around, Give, MicroSteps};
use crate::planner::rehearsal::validation_model;
use crate::planner::{Planner, Prepared};
use crate::splitter::Splitter;

impl<LC, ST, SV> Run<'_, LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    pub(super) fn valid_epoch(
        &mut self,
        planner: &mut Planner,
        loader: &dyn DataLoader<LC::Inner, ValidBatch<LC>>,
        epoch: &Progress,
    ) -> Result<(), TrainError> {
        let model = validation_model(&self.learner);
        let mut batches = self.loading.read(loader);
        let (mut iteration, mut before) = (0, 0);
        let mut latest = None;
        while let Some(batch) = batches.next() {
            iteration += 1;
            let loader = batches.iterator.progress();
            let yielded = loader.items_processed;
            let at = Place { loader, before, epoch: epoch.clone(), iteration, lr: None };
            before = yielded;
            let items = self.strategy.valid_splitter.items(&batch)?;
            if items == 0 {
                return Err(TrainError::EmptyBatch { phase: Phase::Validation });
            }
            let prepared = self.prepare_validation(planner, &model, &batch, items, &mut latest)?;
            self.validate(planner, &model, &batch, prepared, &at)?;
            planner.has_run(Phase::Validation);
            if self.stops_validating() {
                break;
            }
        }
        self.on.watch.check()?;
        self.measure(planner)?;
        sender(&mut self.processor, &self.on, &self.loading).end_validated(epoch.items_processed);
        Ok(())
    }

    /// Runs a batch in its micro-batches and sends the outputs to the metrics.
    fn validate(
        &mut self,
        planner: &mut Planner,
        model: &LC::InferenceModel,
        batch: &ValidBatch<LC>,
        prepared: Prepared,
        at: &Place,
    ) -> Result<(), TrainError> {
        let (settings, splitter) = (&self.strategy.settings, &self.strategy.valid_splitter);
        let keeps_statistics = planner.has_running_state();
        let (reduction, items) = (self.reduction(), prepared.shape.items);
        let join = settings.joins.of(prepared.joining);
        let (means, found) = (Means::of(planner, prepared.held), Found::default());
        let record = |recorder: &StepRecorder, range: Range<usize>| {
            apart(range.len() as f64 / items as f64, || {
                let cut = || splitter.range(batch, range);
                recorded::<LC::Inner, _, _, _>(recorder, model, cut, |micro| model.step(micro))
            })
        };
        let of = (&*prepared.plan, items, || splitter.weight(batch));
        // Metrics that see parts see each as it is.
        let form = planner.form().filter(|_| join.is_some());
        let gifts = self.of_outputs.gifts(form, of, &record, reduction, (&means, &found));
        let (gives, failed) = (!gifts.is_empty(), RefCell::new(None));
        let mut giver = Giver::new(gifts, &record, items, (&means, &found), &failed).shows();
        let give = gives.then_some(&mut giver as &mut dyn Give);
        let mut micro_steps = MicroSteps::<LC::Inner, _, _, _>::new(
            planner,
            (Phase::Validation, model, keeps_statistics),
            (splitter, batch),
            &prepared,
            &self.on.queue,
            Around { give, ..Around::default() },
        );
        let mut sender = sender(&mut self.processor, &self.on, &self.loading);
        let screen = settings.telling.screen.as_ref();
        let mut parts = Parts::new();
        if join.is_some() && !prepared.plan.is_whole() {
            sender.done_with_all();
        }
        for range in prepared.plan.ranges() {
            let done = (range.end, items);
            micro_steps.run(
                range,
                &mut |micro| model.step(micro),
                &mut |output, weight, items| {
                    let weight = match gives && failed.borrow().is_none() {
                        true => items as f64,
                        false => weight,
                    };
                    // A micro-batch that counts nothing has no loss: its mean is not a number.
                    if !reduction.counts(weight) {
                        return Ok(());
                    }
                    let output = Output::of_latest(output, done);
                    if join.is_some() {
                        at.show(screen, Phase::Validation, done);
                        parts.add(output, weight);
                    } else {
                        sender.validated(at, output);
                    }
                    Ok(())
                },
            )?;
        }
        if let Some(why) = failed.take() {
            log::warn!("outputs of parts are shown as they are: {why}");
        }
        if let Some(join) = join {
            let queue = &self.on.queue;
            let outputs = parts.end(join, reduction, queue);
            outputs.into_iter().for_each(|output| sender.validated(at, output));
        }
        Ok(())
    }
}
