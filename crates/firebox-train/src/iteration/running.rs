//! The driver that runs a batch: each micro-step is recorded, compared with the budget, and then
//! run or split further.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::tensor::TensorData;
use firebox_lazy::{LazyBackend, RecordError, SavedStates, restore};
use firebox_trace::{Bytes, Difference, Items, TensorIndex, Trace};

use crate::check::Data;
use crate::device::DeviceMemory;
use crate::device::panics::panic_message;
use crate::error::{Phase, TrainError};
use crate::iteration::queue::Queue;
use crate::planner::{Applicant, Planned, Planner, Prepared};
use crate::settings::Settings;
use crate::share::with_share;
use crate::splitter::Splitter;
use crate::statistics::Pooled;

/// What no step should see.
const DEFECT: &str = "a program was made for another step: please report this";

/// Runs a step on ranges of a batch, in parts if a range does not fit, and hands every output with
/// its weight and its items to a sink.
pub(crate) struct MicroSteps<'a, B: LazyBackend<Base: DeviceMemory>, M, I, S> {
    phase: Phase,
    planner: &'a mut Planner,
    module: &'a M,
    /// Whether the module has tensors that a step may replace.
    keeps_statistics: bool,
    splitter: &'a S,
    batch: &'a I,
    prepared: &'a Prepared,
    /// Whether the plan was made on this same batch.
    rehearsed: bool,
    /// Whether micro-steps of one size are alike, and must be when they run.
    repeats: Repeats,
    /// What is alive next to the micro-step.
    held: Bytes,
    /// The device's queue, with the guard that keeps other threads away from it.
    queue: &'a Queue<B::Base>,
    around: Around<'a, B>,
}

/// Asks whether the batch may be split, and returns the memory that this took.
type MaySplit<'a> = dyn FnMut(&Planner) -> Result<Bytes, TrainError> + 'a;

/// Gives parts of a batch the numbers of the whole that their gradients depend on.
pub(crate) trait Give {
    /// Finds the numbers for the part `range`. Called before the part is recorded.
    fn prepare(&mut self, range: &Range<usize>) -> Result<(), TrainError>;

    /// What takes the place of tensors of the part `range`, given its recording and its data of the
    /// host.
    ///
    /// # Errors
    ///
    /// [`TrainError::NoNumbers`] if nothing is known of such a part.
    fn give(
        &mut self,
        range: &Range<usize>,
        part: (&Trace, Data<'_>),
    ) -> Result<Vec<(TensorIndex, TensorData)>, TrainError>;

    /// Whether something may be given to the part `range`, and its host data is compared.
    fn gives(&self, range: &Range<usize>) -> bool;

    /// The host memory that the numbers take, if that is what training uses.
    fn bytes(&self) -> Bytes;

    /// Finds out what such a part is given, or that nothing of the batch can be given, and returns
    /// the memory of the device that this took. `None` if that is no longer possible.
    fn learn(&mut self, range: &Range<usize>) -> Result<Option<Bytes>, TrainError>;
}

/// What only some loops do around a micro-step.
pub(crate) struct Around<'a, B: LazyBackend> {
    /// Fails if the batch must not be split. Without gradients, a split is always allowed.
    pub(crate) may_split: Option<&'a mut MaySplit<'a>>,
    /// Gives parts the numbers of the batch that their gradients depend on.
    pub(crate) give: Option<&'a mut dyn Give>,
    /// What is alive in addition once the batch is split further than planned: the gradient sum, if
    /// the plan does not include one.
    pub(crate) sum: Bytes,
    /// How many ranks share the step.
    pub(crate) ranks: usize,
    /// Pools the running statistics of the parts into those of the batch, if the user asked for it.
    pub(crate) pooled: Option<Pooled<B>>,
}

impl<B: LazyBackend> Default for Around<'_, B> {
    fn default() -> Self {
        Self { may_split: None, give: None, sum: Bytes::ZERO, ranks: 1, pooled: None }
    }
}

/// Whether the micro-steps of a batch are the same program. A step that counts its calls when it is
/// no rehearsal gives another number to each.
enum Repeats {
    /// Nothing is known of it, or it was found out.
    Ignored,
    /// They were alike in the rehearsal.
    Alike,
    /// The first one, and its number of items.
    First(usize, Trace),
    /// The second one differed.
    Differ(Difference),
}

impl Repeats {
    /// Of a batch for which this plan was made.
    fn of(made: Option<&Planned>) -> Self {
        match made.is_some_and(|planned| planned.rehearsed.of_step.is_alike) {
            true => Self::Alike,
            false => Self::Ignored,
        }
    }

    /// Compares the first two micro-steps.
    fn compare(&mut self, items: usize, trace: &Trace) {
        *self = match std::mem::replace(self, Self::Ignored) {
            Self::Alike => Self::First(items, trace.clone()),
            Self::First(of, first) if of == items => {
                let steps = 0..first.steps.len();
                match first.difference(steps, (trace, 0..trace.steps.len())) {
                    Some(difference) => Self::Differ(difference),
                    None => Self::Ignored,
                }
            }
            Self::Differ(difference) => Self::Differ(difference),
            Self::First(..) | Self::Ignored => Self::Ignored,
        };
    }
}

impl<'a, B, M, I, S> MicroSteps<'a, B, M, I, S>
where
    B: LazyBackend<Base: DeviceMemory>,
    M: Module<B>,
    S: Splitter<I>,
{
    /// Runs a batch that is `prepared` through a module.
    pub(crate) fn new(
        planner: &'a mut Planner,
        (phase, module, keeps_statistics): (Phase, &'a M, bool),
        (splitter, batch): (&'a S, &'a I),
        prepared: &'a Prepared,
        queue: &'a Queue<B::Base>,
        around: Around<'a, B>,
    ) -> Self {
        let (rehearsed, held) = (prepared.made.is_some(), prepared.held);
        let repeats = match phase {
            Phase::Training => Repeats::of(prepared.made.as_ref()),
            Phase::Validation => Repeats::Ignored,
        };
        Self {
            phase,
            planner,
            module,
            keeps_statistics,
            splitter,
            batch,
            prepared,
            rehearsed,
            repeats,
            held,
            queue,
            around,
        }
    }

    /// Runs `step` on the items `range`.
    pub(crate) fn run<T>(
        &mut self,
        range: Range<usize>,
        step: &mut dyn FnMut(I) -> T,
        sink: &mut dyn FnMut(T, f64, usize) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let ran = self
            .prepare(&range)
            .and_then(|(micro, weight)| Ok((self.attempt(&range, micro, step)?, weight)));
        match ran {
            Ok((output, weight)) => sink(output, weight, range.len()),
            Err(TrainError::NoNumbers { .. }) if self.learns(&range)? => {
                self.run(range, step, sink)
            }
            Err(error) if range.len() == 1 || !is_too_large(&error) => Err(error),
            Err(error) if self.planner.is_never_split() => Err(error),
            Err(error) => {
                log::warn!("splitting a {} micro-batch of {}: {error}", self.phase, range.len());
                self.planner.outgrow(self.phase, self.prepared.shape);
                if let Some(may_split) = &mut self.around.may_split {
                    let needed = may_split(self.planner)?;
                    self.planner.predict(needed);
                }
                self.held += std::mem::take(&mut self.around.sum);
                self.rehearsed = false;
                let middle = range.start + range.len() / 2;
                self.run(range.start..middle, step, sink)?;
                self.run(middle..range.end, step, sink)
            }
        }
    }

    /// Called after the last micro-step of the batch. Warns if the second one was another program
    /// than the first, although they were alike in the rehearsal: the step counts its calls.
    pub(crate) fn finish(self, settings: &Settings) {
        if let Some(pooled) = self.around.pooled {
            self.queue.alone(|| pooled.finish(self.module));
        }
        if let Repeats::Differ(difference) = self.repeats {
            settings.warn_of_counting(&difference);
        }
    }

    /// Cuts the micro-batch of the items `range`, and computes its weight.
    fn cut(&self, range: Range<usize>) -> Result<(I, f64), TrainError> {
        let asked = range.len();
        let cut = catch_unwind(AssertUnwindSafe(|| {
            let micro = self.splitter.range(self.batch, range);
            let got = self.splitter.items(&micro)?;
            let weight = self.splitter.weight(&micro);
            if got == asked {
                Ok((micro, weight))
            } else {
                Err(TrainError::LostItems { asked, got })
            }
        }));
        cut.unwrap_or_else(|panic| Err(self.panicked(asked, &*panic)))
    }

    /// Finds what a part is given of its batch, and cuts it.
    fn prepare(&mut self, range: &Range<usize>) -> Result<(I, f64), TrainError> {
        let queue = self.queue;
        queue.alone(|| {
            let give = self.around.give.as_mut();
            give.map_or(Ok(()), |give| give.prepare(range))?;
            self.cut(range.clone())
        })
    }

    /// Finds out what a part like this one is given of its batch.
    fn learns(&mut self, range: &Range<usize>) -> Result<bool, TrainError> {
        let give = self.around.give.as_mut();
        let needed = give.map_or(Ok(None), |give| give.learn(range))?;
        needed.into_iter().for_each(|needed| self.planner.predict(needed));
        Ok(needed.is_some())
    }

    fn panicked(&self, items: usize, panic: &(dyn std::any::Any + Send)) -> TrainError {
        let message = panic_message(panic);
        TrainError::StepPanicked { phase: self.phase, items: Items::new(items), message }
    }

    /// Records the step, and runs it if it fits. If it does not fit or panics, the module is
    /// restored.
    fn attempt<T>(
        &mut self,
        range: &Range<usize>,
        micro: I,
        step: &mut dyn FnMut(I) -> T,
    ) -> Result<T, TrainError> {
        let items = range.len();
        if let Some(pooled) = &mut self.around.pooled {
            self.queue.alone(|| pooled.begin(self.module));
        }
        let snapshot = self.keeps_statistics.then(|| self.module.clone().into_record());
        let states = SavedStates::save();
        let device = self.queue.device.clone();
        let drain = move || B::Base::drain(&device);
        let give = self.around.give.as_ref();
        let held = self.held + give.map_or(Bytes::ZERO, |give| give.bytes());
        let recorder = self.planner.step_recorder(held);
        let gives = give.is_some_and(|give| give.gives(range));
        let recorder = if gives { recorder.keep_uploads() } else { recorder };
        let share = items as f64 / (self.prepared.shape.items * self.around.ranks) as f64;
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            let mut recording =
                recorder.record::<B::Base, _>(|| with_share(share, || step(micro)))?;
            self.repeats.compare(items, recording.trace());
            let (admission, program) = self.planner.admit(&Applicant {
                phase: self.phase,
                trace: recording.trace(),
                shape: self.prepared.shape,
                held,
                items,
                rehearsed: self.rehearsed,
            })?;
            if let Some(give) = &mut self.around.give {
                let data = |tensor| recording.value_of(tensor);
                for (tensor, data) in give.give(range, (recording.trace(), &data))? {
                    if !recording.give(tensor, data) {
                        let why = "a part has run before it is given its numbers".to_owned();
                        return Err(TrainError::NoNumbers { why });
                    }
                }
            }
            if let Some(program) = program {
                assert!(recording.rewrite(&program, drain), "{DEFECT}");
            }
            self.queue.prepare(admission);
            let output = recording.run();
            self.queue.drain();
            Ok(output)
        }));
        let result = attempt.unwrap_or_else(|panic| Err(self.panicked(items, &*panic)));
        if let (Ok(_), Some(pooled)) = (&result, &mut self.around.pooled) {
            self.queue.alone(|| pooled.end(self.module, items));
        }
        if result.is_err() {
            states.restore();
            if let Some(snapshot) = snapshot {
                let replaced = restore::<B, M>(self.module, snapshot)?;
                self.planner.add_running_state(replaced);
            }
        }
        result
    }
}

/// Whether the micro-batch was found too large before it ran.
fn is_too_large(error: &TrainError) -> bool {
    matches!(
        error,
        TrainError::GrewTooLarge { .. } | TrainError::Record(RecordError::ReadTooLarge { .. })
    )
}
