//! The micro-batches of a step, in a rehearsal and when it runs.

use std::cell::RefCell;
use std::ops::Range;

use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::AutodiffBackend;
use firebox_lazy::{LazyBackend, StepRecorder, in_full_precision};
use firebox_plan::Accumulating;
use firebox_trace::{Bytes, Trace};

use super::proofs::{Exact, Passes, Proofs, Proving};
use crate::check::{Found, Giver, Means, proved_weight, recorded};
use crate::components::TrainingBackend;
use crate::device::DeviceMemory;
use crate::error::{Phase, TrainError};
use crate::gradients::summed_bytes;
use crate::iteration::on_device::OnDevice;
use crate::iteration::outputs::Outputs;
use crate::iteration::rehearsing::Rehearsing;
use crate::iteration::running::{Around, Give, MicroSteps};
use crate::park::{Parking, update};
use crate::planner::labels::label_parameters;
use crate::planner::ledger::{Batch, Left};
use crate::planner::{Planner, Prepared};
use crate::reduction::LossReduction;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::statistics::Pooled;
use crate::weights::{self, BatchWeight};

/// The micro-batches of a batch, in one step. See [`StepPlanner::step`](crate::StepPlanner::step).
///
/// A step runs them with [`each`](Self::each), as often as it needs, and changes parameters in
/// [`update`](Self::update).
pub struct MicroBatches<'a, B, M, I, S>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    M: Module<B>,
{
    splitter: &'a S,
    batch: &'a I,
    items: usize,
    weight: f64,
    mode: Mode<'a, B>,
    since: Since<M::Record>,
}

/// What a step that fails goes back to.
pub(super) struct Since<R> {
    /// The model before the first micro-step since the last update, if it may have running
    /// statistics.
    pub(super) start: Option<R>,
    /// Whether there was an update.
    pub(super) has_updated: bool,
    /// The micro-batches of the pass that had the most.
    pub(super) micro_batches: usize,
}

impl<R> Since<R> {
    fn nothing() -> Self {
        Self { start: None, has_updated: false, micro_batches: 0 }
    }
}

/// How the micro-batches run.
enum Mode<'a, B>
where
    B: LazyBackend<Base: DeviceMemory>,
{
    Rehearsed(Rehearsing<'a>),
    /// Recorded on the whole batch and on some parts of it.
    Proved(Proving<'a>),
    Running(Box<Running<'a, B>>),
}

/// A step that runs.
pub(super) struct Running<'a, B: LazyBackend<Base: DeviceMemory>> {
    pub(super) planner: &'a mut Planner,
    pub(super) settings: &'a Settings,
    pub(super) on: &'a mut OnDevice<B::Base>,
    pub(super) keeps_statistics: bool,
    pub(super) parking: Option<&'a Parking>,
    pub(super) prepared: Prepared,
    /// What is proved of each pass, and how many have begun.
    pub(super) passes: Option<Passes>,
    pub(super) begun: usize,
    pub(super) proofs: &'a mut Proofs,
}

impl<'a, B, M, I, S> MicroBatches<'a, B, M, I, S>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
    S: Splitter<I>,
{
    pub(super) fn rehearsed(
        splitter: &'a S,
        (batch, items, weight): (&'a I, usize, f64),
        rehearsed: Rehearsing<'a>,
    ) -> Self {
        let since = Since::nothing();
        Self { splitter, batch, items, weight, mode: Mode::Rehearsed(rehearsed), since }
    }

    pub(super) fn proved(
        splitter: &'a S,
        (batch, items, weight): (&'a I, usize, f64),
        parts: &'a [Range<usize>],
    ) -> Self {
        let since = Since::nothing();
        let mode = Mode::Proved(Proving::new(parts));
        Self { splitter, batch, items, weight, mode, since }
    }

    pub(super) fn running(
        splitter: &'a S,
        (batch, items, weight): (&'a I, usize, f64),
        running: Running<'a, B>,
    ) -> Self {
        let since = Since::nothing();
        Self { splitter, batch, items, weight, mode: Mode::Running(Box::new(running)), since }
    }

    /// How gradients were added up in each pass of a proof.
    pub(super) fn reductions(self) -> Vec<Vec<LossReduction>> {
        match self.mode {
            Mode::Proved(proving) => proving.end(),
            Mode::Rehearsed(_) | Mode::Running(_) => Vec::new(),
        }
    }

    /// Ends a step that ran.
    pub(super) fn since(self) -> Since<M::Record> {
        self.since
    }

    /// The number of items in the batch.
    pub fn items(&self) -> usize {
        self.items
    }

    /// The weight of the batch in the loss: its items, unless the batch
    /// [says otherwise](firebox_batch::MicroBatch::weight).
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Runs `step` on each micro-batch, and gives its output to `sink` with the weight of the
    /// micro-batch in the loss. `model` is what `step` uses.
    ///
    /// `step` is recorded, and runs once its memory is known to fit; what it returns has no values
    /// before that. `sink` comes after it and is where gradients are added up. What it reads is
    /// computed in rehearsals too, but is zero where the step is only looked at, to prove a split.
    /// A micro-batch that weighs nothing in a mean is not given to it.
    ///
    /// Where parts are given numbers of their batch, `step` is also called on the whole batch,
    /// which is recorded and never runs. [`is_rehearsal`](firebox_lazy::is_rehearsal) tells it what
    /// not to repeat.
    ///
    /// # Errors
    ///
    /// If the batch cannot be cut, `step` panics, or a micro-batch does not fit although it has one
    /// item.
    pub fn each<T>(
        &mut self,
        model: &M,
        mut step: impl FnMut(&M, I) -> T,
        mut sink: impl FnMut(&M, T, f64),
    ) -> Result<(), TrainError> {
        let (splitter, batch) = (self.splitter, self.batch);
        let (items, weight) = (self.items, self.weight);
        match &mut self.mode {
            Mode::Rehearsed(rehearsed) => {
                let step = &mut |micro| step(model, micro);
                let mut outputs = Outputs::new(None);
                rehearsed.each::<B, _, _, ()>(
                    (splitter, batch),
                    &mut outputs,
                    step,
                    &mut |output, piece| {
                        sink(model, output, weight * piece.range.len() as f64 / items as f64);
                    },
                );
                Ok(())
            }
            Mode::Proved(proving) => {
                proving.each::<B, _, _>(
                    (splitter, batch, items),
                    &mut |micro| step(model, micro),
                    &mut |output, part| {
                        sink(model, output, weight * part as f64 / items as f64);
                    },
                );
                Ok(())
            }
            Mode::Running(running) => {
                if running.keeps_statistics && self.since.start.is_none() {
                    self.since.start = Some(model.clone().into_record());
                }
                let ran = running.each(model, (splitter, batch), &mut step, &mut sink, weight)?;
                self.since.micro_batches = self.since.micro_batches.max(ran);
                Ok(())
            }
        }
    }

    /// Runs what changes parameters: the step of an optimizer, or of a moving average. The tensors
    /// that `work` makes and that are alive at its end are counted as lasting.
    ///
    /// With [parked](crate::LearnerBuilder::park_optimizer) state, `work` is recorded and runs at
    /// its end; a value that it reads is computed at once. Those tensors then leave the device, but
    /// for the parameters of `model`. What uses one again brings it back.
    ///
    /// # Errors
    ///
    /// If `work` panics, the device has failed, or parked state could not be written, after which
    /// the update is whole.
    pub fn update<R>(
        &mut self,
        model: &mut M,
        work: impl FnOnce(&mut M) -> R,
    ) -> Result<R, TrainError> {
        match &mut self.mode {
            Mode::Rehearsed(rehearsed) => Ok(rehearsed.update::<B, _>(|| {
                let before = model.clone();
                let result = work(model);
                label_parameters(model);
                drop(before);
                result
            })),
            Mode::Proved(_) => Ok(in_full_precision(|| {
                let result = work(model);
                label_parameters(model);
                result
            })),
            Mode::Running(running) => {
                // It holds the tensors that the update replaces.
                self.since.start = None;
                let (result, parked) = running.update(model, work)?;
                self.since.has_updated = true;
                parked.map(|()| result)
            }
        }
    }

    /// Ends a rehearsed step.
    pub(super) fn end(self) {
        if let Mode::Rehearsed(rehearsed) = self.mode {
            rehearsed.end::<B>();
        }
    }
}

impl<B> Running<'_, B>
where
    B: TrainingBackend,
{
    fn each<M, I, S, T>(
        &mut self,
        model: &M,
        (splitter, batch): (&S, &I),
        step: &mut dyn FnMut(&M, I) -> T,
        sink: &mut dyn FnMut(&M, T, f64),
        whole: f64,
    ) -> Result<usize, TrainError>
    where
        M: AutodiffModule<B>,
        S: Splitter<I>,
    {
        let Self { planner, settings, on, prepared, passes, proofs, .. } = self;
        let OnDevice { queue, watch, .. } = &**on;
        let (items, reduction) = (prepared.shape.items, settings.reduction());
        let step = RefCell::new(step);
        let (means, found) = (Means::of(planner, prepared.held), Found::default());
        let record = |recorder: &StepRecorder, range: Range<usize>| {
            found.unchanged::<B, _, _>(model, 1.0, || {
                let cut = || splitter.range(batch, range);
                recorded::<B, _, _, _>(recorder, model, cut, |micro| {
                    step.borrow_mut()(model, micro)
                })
            })
        };
        let exact = passes.as_ref().and_then(|passes| passes.get(self.begun).cloned());
        self.begun += 1;
        let failed = RefCell::new(match (&passes, &exact) {
            (Some(_), None) => Some("it has more passes than when it was proved".to_owned()),
            _ => None,
        });
        let exact = exact.flatten();
        let mut giver = exact
            .as_ref()
            .map(|exact| Giver::new(&exact.gifts, &record, items, (&means, &found), &failed));
        let around = Around {
            give: giver.as_mut().map(|giver| giver as &mut dyn Give),
            sum: match prepared.plan.accumulating() {
                Accumulating::No => summed_bytes::<B, _>(model),
                _ => Bytes::ZERO,
            },
            pooled: settings.pools_statistics.map(|momentum| Pooled::new(momentum, items)),
            ..Around::default()
        };
        let of = (Phase::Training, model, self.keeps_statistics);
        let mut micro_steps =
            MicroSteps::new(planner, of, (splitter, batch), prepared, queue, around);
        let (mut parts, mut micro_batches, mut begin) = (0.0, 0, 0);
        let of_batch = BatchWeight::new(whole, items, reduction)?;
        let mut run = |micro| step.borrow_mut()(model, micro);
        for range in prepared.plan.ranges() {
            micro_steps.run(range, &mut run, &mut |output, weight, of_part| {
                watch.heard_nothing()?;
                let part = begin..begin + of_part;
                let (weight, reduction) = match &exact {
                    Some(Exact { gives, reduction, .. }) if failed.borrow().is_none() => {
                        let of = BatchWeight { reduction: *reduction, ..of_batch };
                        (proved_weight(of, weight, part, *gives, settings)?, *reduction)
                    }
                    _ => (weight, reduction),
                };
                begin += of_part;
                micro_batches += 1;
                parts += weight;
                if reduction.counts(weight) {
                    queue.alone(|| sink(model, output, weight));
                }
                Ok(())
            })?;
        }
        micro_steps.finish(settings);
        proofs.takes(found.needed.get());
        if let Some(why) = failed.take() {
            proofs.is_unknown(why, settings);
            proofs.forget();
        }
        if reduction == LossReduction::Mean && weights::differ(parts, whole, items) {
            return Err(TrainError::UnequalWeights { parts, whole });
        }
        Ok(micro_batches)
    }

    /// Runs what changes parameters, once it is known to fit. Also returns whether what it leaves
    /// could be parked.
    fn update<M: Module<B>, R>(
        &mut self,
        model: &mut M,
        work: impl FnOnce(&mut M) -> R,
    ) -> Result<(R, Result<(), TrainError>), TrainError> {
        let Self { planner, on, parking, prepared, .. } = self;
        let OnDevice { queue, watch, pool } = &mut **on;
        let memory = planner.memory().clone();
        let admit = |trace: &Trace| {
            let left = Left::by_recording(trace);
            let needed = || memory.footprint(trace).growth();
            planner.admit_update(prepared.shape, Batch::IsHeld, (&left, needed))
        };
        let update = |()| update::<B, _, _>(*parking, model, work, admit);
        queue.update(watch, pool.as_deref(), || Ok(()), || Ok(()), update)?
    }
}
