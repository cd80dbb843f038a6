//! The micro-batches of a step, in a rehearsal and when it runs.

use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::AutodiffBackend;
use firebox_lazy::{Arrival, LazyBackend, in_full_precision, mark};
use firebox_plan::Accumulating;
use firebox_trace::{Bytes, Mark, Trace};

use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::watch::Watch;
use crate::error::{Phase, TrainError};
use crate::gradients::summed_bytes;
use crate::park::{Parking, update};
use crate::planner::labels::label_parameters;
use crate::planner::ledger::{Batch, Left};
use crate::planner::pieces::Piece;
use crate::planner::{Planner, Prepared};
use crate::reduction::Reduction;
use crate::run::micro_step::{MicroStep, Repeats};
use crate::run::queue::Queue;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::statistics::Pooled;
use crate::weights;

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
}

/// How the micro-batches run.
enum Mode<'a, B>
where
    B: LazyBackend<Base: DeviceMemory>,
{
    Rehearsed(Rehearsed<'a>),
    Running(Box<Running<'a, B>>),
}

/// A step in a rehearsal.
pub(super) struct Rehearsed<'a> {
    pieces: &'a [Piece],
    /// The batch, which arrives once a step.
    arrival: Arrival,
    /// Whether an update was the last thing.
    has_updated: bool,
}

impl<'a> Rehearsed<'a> {
    pub(super) fn new(pieces: &'a [Piece]) -> Self {
        Self { pieces, arrival: Arrival::new(), has_updated: false }
    }
}

/// A step that runs.
pub(super) struct Running<'a, B: LazyBackend<Base: DeviceMemory>> {
    pub(super) planner: &'a mut Planner,
    pub(super) settings: &'a Settings,
    pub(super) queue: Queue<'a, B>,
    pub(super) watch: &'a mut Watch<B::Base>,
    pub(super) pool: Option<&'a TrainingPool>,
    pub(super) keeps_statistics: bool,
    pub(super) parking: Option<&'a Parking>,
    pub(super) prepared: Prepared,
}

impl<'a, B, M, I, S> MicroBatches<'a, B, M, I, S>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
    M: AutodiffModule<B>,
    S: Splitter<I>,
{
    pub(super) fn rehearsed(
        splitter: &'a S,
        (batch, items, weight): (&'a I, usize, f64),
        rehearsed: Rehearsed<'a>,
    ) -> Self {
        let since = Since { start: None, has_updated: false };
        Self { splitter, batch, items, weight, mode: Mode::Rehearsed(rehearsed), since }
    }

    pub(super) fn running(
        splitter: &'a S,
        (batch, items, weight): (&'a I, usize, f64),
        running: Running<'a, B>,
    ) -> Self {
        let since = Since { start: None, has_updated: false };
        Self { splitter, batch, items, weight, mode: Mode::Running(Box::new(running)), since }
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
    /// computed in rehearsals too. A micro-batch that weighs nothing in a mean is not given to it.
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
                rehearsed.has_updated = false;
                for piece in rehearsed.pieces {
                    let cut = || splitter.range(batch, piece.range.clone());
                    let micro = rehearsed.arrival.cut(cut);
                    mark::<B::Base>(Mark::Drain);
                    mark::<B::Base>(Mark::MicroStep);
                    let output = step(model, micro);
                    mark::<B::Base>(Mark::Drain);
                    sink(model, output, weight * piece.range.len() as f64 / items as f64);
                    mark::<B::Base>(Mark::Drain);
                    mark::<B::Base>(Mark::MicroStepEnd(piece.more_to_mark()));
                }
                Ok(())
            }
            Mode::Running(running) => {
                if running.keeps_statistics && self.since.start.is_none() {
                    self.since.start = Some(model.clone().into_record());
                }
                running.each(model, (splitter, batch), &mut step, &mut sink, weight)
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
            Mode::Rehearsed(rehearsed) => {
                rehearsed.has_updated = true;
                mark::<B::Base>(Mark::Settle);
                mark::<B::Base>(Mark::OptimizerStep);
                let before = model.clone();
                let result = in_full_precision(|| work(model));
                label_parameters(model);
                drop(before);
                mark::<B::Base>(Mark::Settle);
                mark::<B::Base>(Mark::IterationEnd);
                Ok(result)
            }
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
        if let Mode::Rehearsed(Rehearsed { has_updated: false, .. }) = self.mode {
            mark::<B::Base>(Mark::IterationEnd);
        }
    }
}

impl<B> Running<'_, B>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
{
    fn each<M, I, S, T>(
        &mut self,
        model: &M,
        (splitter, batch): (&S, &I),
        step: &mut dyn FnMut(&M, I) -> T,
        sink: &mut dyn FnMut(&M, T, f64),
        whole: f64,
    ) -> Result<(), TrainError>
    where
        M: AutodiffModule<B>,
        S: Splitter<I>,
    {
        let Self { planner, settings, queue, watch, prepared, .. } = self;
        let (shape, plan) = (prepared.shape, prepared.plan.clone());
        let (items, reduction) = (shape.items, settings.reduction);
        let mut micro_step = MicroStep::<B, M, I, S> {
            phase: Phase::Training,
            may_split: &mut |_| Ok(Bytes::ZERO),
            planner,
            module: model,
            keeps_statistics: self.keeps_statistics,
            splitter,
            batch,
            shape,
            rehearsed: prepared.made.is_some(),
            repeats: Repeats::of(prepared.made.as_ref()),
            held: prepared.held,
            sum: match plan.accumulating() {
                Accumulating::No => summed_bytes::<B, _>(model),
                _ => Bytes::ZERO,
            },
            queue: Queue { ..*queue },
            ranks: 1,
            pooled: settings.pools_statistics.map(|momentum| Pooled::new(momentum, items)),
        };
        let mut parts = 0.0;
        for range in plan.ranges() {
            micro_step.run(range, &mut |micro| step(model, micro), &mut |output, weight, _| {
                watch.heard_nothing()?;
                parts += weight;
                if reduction.counts(weight) {
                    queue.alone(|| sink(model, output, weight));
                }
                Ok(())
            })?;
        }
        if let Some(difference) = micro_step.finish() {
            settings.warn_of_counting(&difference);
        }
        if reduction == Reduction::Mean && weights::differ(parts, whole, items) {
            return Err(TrainError::UnequalWeights { parts, whole });
        }
        Ok(())
    }

    /// Runs what changes parameters, once it is known to fit. Also returns whether what it leaves
    /// could be parked.
    fn update<M: Module<B>, R>(
        &mut self,
        model: &mut M,
        work: impl FnOnce(&mut M) -> R,
    ) -> Result<(R, Result<(), TrainError>), TrainError> {
        let Self { planner, queue, watch, pool, parking, prepared, .. } = self;
        let memory = planner.memory().clone();
        let admit = |trace: &Trace| {
            let left = Left::by_recording(trace);
            let needed = || memory.footprint(trace).growth();
            planner.admit_update(prepared.shape, Batch::IsHeld, (&left, needed))
        };
        let update = |()| update::<B, _, _>(*parking, model, work, admit);
        queue.update(watch, *pool, || Ok(()), || Ok(()), update)?
    }
}
