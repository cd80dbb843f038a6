//! Validation in a training loop of the user's own.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module};
use firebox_lazy::StepRecorder;
use firebox_plan::Split;

use super::StepPlanner;
use crate::check::{Found, Giver, Means, apart, recorded};
use crate::components::TrainingBackend;
use crate::error::{During, Phase, TrainError};
use crate::iteration::running::{Around, Give, MicroSteps};
use crate::planner::rehearsal::{Iterations, rehearse_validation};
use crate::planner::shape::Shape;
use crate::planner::{BatchToRun, Prepared};
use crate::splitter::Splitter;
use crate::whole::Joining;

impl<B, M, S> StepPlanner<B, M, S>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
{
    /// Runs `step` without gradients on the micro-batches of a batch, and gives each output to
    /// `sink` with the weight of its micro-batch in the loss. `model` is the model
    /// [without automatic differentiation](AutodiffModule::valid).
    ///
    /// Parts are given the numbers of their batch by which outputs are divided, where the recorded
    /// `step` shows them. Batches of a shape that is new are planned first, in addition to the
    /// parameters and to what the optimizers of the latest training plan keep. `step` is called in
    /// rehearsals as well, `sink` is not. Planned is that `sink` holds the outputs of one
    /// micro-batch; what it computes on the device, or collects there, comes on top.
    ///
    /// ```
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::module::AutodiffModule;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::prelude::*;
    /// # use firebox_lazy::Lazy;
    /// # use firebox_train::Learner;
    /// # use firebox_trace::Bytes;
    /// # type B = Autodiff<Lazy<Flex>>;
    /// # let device = Default::default();
    /// # let model: Linear<B> = LinearConfig::new(8, 1).init(&device);
    /// # let builder = Learner::builder().auto_batch().memory(Bytes::mib(8));
    /// # let mut steps = builder.step_planner(&model)?;
    /// let batch = Tensor::<Lazy<Flex>, 2>::ones([100, 8], &device);
    /// let mut sum = 0.0;
    /// steps.validate(
    ///     &model.valid(),
    ///     &batch,
    ///     |model, rows| model.forward(rows).mean(),
    ///     |mean, weight| sum += f64::from(mean.into_scalar()) * weight,
    /// )?;
    /// assert!((sum / 100.0).is_finite());
    /// # Ok::<(), firebox_train::TrainError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the batch is empty or cannot be cut, does not fit however it is cut, `step` or `sink`
    /// panics, or the device fails.
    pub fn validate<V, I, T>(
        &mut self,
        model: &V,
        batch: &I,
        mut step: impl FnMut(&V, I) -> T,
        mut sink: impl FnMut(T, f64),
    ) -> Result<(), TrainError>
    where
        V: Module<B::InnerBackend>,
        T: 'static,
        S: Splitter<I>,
    {
        let states = self.settings.states.clone();
        let result = states.kept(|| {
            let prepared = self.prepare_validation(model, batch, &mut step)?;
            self.on.watch.begin_batch(During::Validation, prepared.shape.items, &prepared.plan);
            let ran = catch_unwind(AssertUnwindSafe(|| {
                self.run_validation(model, batch, prepared, &mut step, &mut sink)
            }));
            ran.unwrap_or_else(|panic| Err(self.on.watch.panicked(&*panic)))?;
            self.on.watch.heard_nothing()?;
            self.planner.has_run(Phase::Validation);
            self.measure()
        });
        result.map_err(|error| self.on.watch.explain(error))
    }

    fn prepare_validation<V, I, T>(
        &mut self,
        model: &V,
        batch: &I,
        step: &mut dyn FnMut(&V, I) -> T,
    ) -> Result<Prepared, TrainError>
    where
        V: Module<B::InnerBackend>,
        T: 'static,
        S: Splitter<I>,
    {
        let (phase, items) = (Phase::Validation, self.splitter.items(batch)?);
        if items == 0 {
            return Err(TrainError::EmptyBatch { phase });
        }
        let splitter = &self.splitter;
        let shape =
            Shape::of::<B::InnerBackend, _, _>(phase, batch, items, splitter, &mut self.planner);
        let to_run = BatchToRun { phase, shape, again: true, joining: Joining::Asked };
        let queue = &self.on.queue;
        let overhead = self.loading.overhead(items);
        let pages = !self.planner.memory().is_on_host();
        let rehearse = |split: Split, _: (Iterations, Joining), recorder: &StepRecorder| {
            let batch = (splitter, batch);
            let rehearsed = rehearse_validation::<B::InnerBackend, _, _, _, _>(
                model,
                step,
                batch,
                split,
                (None, pages),
                recorder,
            );
            queue.after_rehearsal(recorder);
            rehearsed
        };
        let prepared = self.planner.prepare(&to_run, || overhead, rehearse)?;
        self.begin::<B::InnerBackend, _>(model, phase, &prepared)?;
        Ok(prepared)
    }

    fn run_validation<V, I, T>(
        &mut self,
        model: &V,
        batch: &I,
        prepared: Prepared,
        step: &mut dyn FnMut(&V, I) -> T,
        sink: &mut dyn FnMut(T, f64),
    ) -> Result<(), TrainError>
    where
        V: Module<B::InnerBackend>,
        S: Splitter<I>,
    {
        let (watch, reduction) = (&self.on.watch, self.settings.reduction());
        let (splitter, items, step) = (&self.splitter, prepared.shape.items, RefCell::new(step));
        let (means, found) = (Means::of(&self.planner, prepared.held), Found::default());
        let record = |recorder: &StepRecorder, range: Range<usize>| {
            apart(range.len() as f64 / items as f64, || {
                let cut = || splitter.range(batch, range);
                recorded::<B::InnerBackend, _, _, _>(recorder, model, cut, |micro| {
                    step.borrow_mut()(model, micro)
                })
            })
        };
        let of = (&*prepared.plan, items, || splitter.weight(batch));
        let (form, with) = (self.planner.form(), (&means, &found));
        let gifts = self.of_outputs.gifts(form, of, &record, reduction, with);
        let (gives, failed) = (!gifts.is_empty(), RefCell::new(None));
        let mut giver = Giver::new(gifts, &record, items, (&means, &found), &failed).shows();
        let give = gives.then_some(&mut giver as &mut dyn Give);
        let keeps_statistics = self.planner.has_running_state();
        let queue = &self.on.queue;
        let mut micro_steps = MicroSteps::<B::InnerBackend, _, _, _>::new(
            &mut self.planner,
            (Phase::Validation, model, keeps_statistics),
            (splitter, batch),
            &prepared,
            queue,
            Around { give, ..Around::default() },
        );
        for range in prepared.plan.ranges() {
            let run = &mut |micro| step.borrow_mut()(model, micro);
            micro_steps.run(range, run, &mut |output, weight, items| {
                let weight = match gives && failed.borrow().is_none() {
                    true => items as f64,
                    false => weight,
                };
                watch.heard_nothing()?;
                if reduction.counts(weight) {
                    queue.alone(|| sink(output, weight));
                }
                Ok(())
            })?;
        }
        if let Some(why) = failed.take() {
            log::warn!("outputs of parts are shown as they are: {why}");
        }
        Ok(())
    }
}
