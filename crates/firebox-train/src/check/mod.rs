//! Finds out, before a batch is split for the first time, whether its gradient is the sum over its
//! parts. The training loop asks; the result decides whether a plan may split batches.
//!
//! A few items of the batch are run together, in two parts, and one by one. They run with the same
//! model and without random numbers. Running statistics are restored, and nothing is learned from
//! the runs. The items are chosen to differ in every tensor of the batch, because equal classes
//! would hide a wrong weight. If a model normalizes over the batch, gradients differ between parts
//! anyway. Then all items get the float inputs of one item, so that statistics agree, and only
//! tensors of other types differ.

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn::train::Learner;
use firebox_lazy::{
    Input, LazyBackend, RecordError, SavedStates, StepRecorder, rehearsing, restore,
};
use firebox_trace::{Bytes, Footprint, MemoryModel, Nonlinear, StructuralHash, Trace};

use crate::components::{LazyComponents, TrainBatch};
use crate::device::own_pool::TrainingPool;
use crate::device::panics::panic_message;
use crate::error::TrainError;
use crate::gradients::forget_graphs_without;
use crate::parameters::{has_untrained, parameters};
use crate::planner::rehearsal::train_step;
use crate::planner::rehearsed::recording_bytes;
use crate::reduction::LossReduction;
use crate::share::with_share;
use crate::splitter::Splitter;

mod choice;
mod given;
mod host;
mod outputs;
mod proof;
mod rows;
mod sketch;
pub(crate) mod verdict;

use self::choice::{CANDIDATES, Candidates, Choice};
use self::given::Share;
pub(crate) use self::given::{Data, Gift, LATER, Numbers, SOON, Weight, with_values};
pub(crate) use self::host::Host;
pub(crate) use self::outputs::{Giver, OfOutputs};
pub(crate) use self::proof::{Proved, compare, hosts, proved_weight, recorded};
use self::rows::{OfBatch, Rows};
use self::sketch::{of_zeros, sketch};
pub use self::verdict::{Coupling, SplitCheck};
use self::verdict::{Gradient, Gradients, Precision, Verdict, Weighed};

/// The number of groups of items that are run together and separately.
const GROUPS: usize = 3;
/// The group sizes that are tried. A group may be too small for a sound loss, such as a variance.
const SIZES: [usize; 3] = [1, 2, 4];

/// How many items before one, and how many from it on, are compared in a later batch. Two sides of
/// different sizes are seldom alike in what couples them.
pub(crate) const AROUND: (usize, usize) = (8, 5);

/// How often gradients of a later batch that do not add up are recomputed.
const REPEATS: usize = 3;

/// Why a model that normalizes over the batch cannot be checked on any device.
pub(crate) const OF_STATISTICS: &str =
    "batch normalization makes the gradient of an item depend on the others";

/// Why it is unknown whether weights are right.
pub(crate) const HIDDEN_WEIGHTS: &str = "what the items weigh does not show in their gradients";

/// The most bytes that are brought to the host, or computed there, when that is not the device.
const MOST: Bytes = Bytes::gib(2);

/// How much of a batch is read to choose items.
const MOST_READ: Bytes = Bytes::mib(32);

/// The result of a check.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The gradients agree, on items that differ.
    Agrees {
        /// The weight of each item, if all weigh the same.
        each: Option<f64>,
    },
    /// No evidence against splitting, but the items show too little to be sure.
    NotEstablished(&'static str),
    /// The check is not possible.
    NotCheckable(String),
    /// The gradients differ.
    Differs {
        /// The reason.
        coupling: Coupling,
        /// The difference, relative to the gradient of the parameter. `None` if it is proved.
        by: Option<f64>,
        /// The path of the parameter that differs most.
        parameter: String,
        /// Where items meet, if it is proved.
        at: Option<String>,
    },
}

/// A batch that is about to be split.
pub(crate) struct ToSplit<'a, I, S> {
    pub(crate) batch: &'a I,
    pub(crate) items: usize,
    /// The total weight of the items.
    pub(crate) weight: f64,
    /// The most items in one of its micro-batches.
    pub(crate) micro_batch: usize,
    /// What tells batches of other shapes apart, if that is known.
    pub(crate) form: Option<StructuralHash>,
    /// The last of its micro-batches of each size.
    pub(crate) parts: Vec<Range<usize>>,
    pub(crate) splitter: &'a S,
    pub(crate) reduction: LossReduction,
    /// Whether that is settled.
    pub(crate) is_declared: bool,
    /// How many ranks share a step.
    pub(crate) ranks: usize,
    /// Whether batches are put together, and the weight of this one beside others counts.
    pub(crate) weighs: bool,
    /// What losses are scaled by.
    pub(crate) scale: Option<f64>,
}

/// What a check may use, and what is known of the model.
pub(crate) struct Means {
    pub(crate) memory: Arc<dyn MemoryModel>,
    /// The most memory that a run of some items may need, next to what is held.
    pub(crate) budget: Bytes,
    pub(crate) held: Bytes,
    /// What threads keep permanently after what has run.
    pub(crate) kept: Arc<AtomicU64>,
    /// Whether the model has running statistics.
    pub(crate) normalizes: bool,
    /// What the step makes of its gradients, if that is nothing linear.
    pub(crate) nonlinear: Option<Nonlinear>,
    /// The pool whose pages fit what runs, if it is firebox's. Those of a batch are to be prepared
    /// afterwards.
    pub(crate) pool: Option<Arc<TrainingPool>>,
}

/// A check of a few items of a batch.
pub(crate) struct Check<'a, LC: LazyComponents, S> {
    pub(crate) learner: &'a Learner<LC>,
    pub(crate) of: &'a ToSplit<'a, TrainBatch<LC>, S>,
    pub(crate) means: &'a Means,
    pub(crate) found: Found,
    /// The host, if gradients are computed there instead of on the batch's device. On the device,
    /// kernels would be compiled and tuned for a few items.
    pub(crate) host: Option<Host>,
    /// Whether parts are given numbers of the whole.
    pub(crate) gives: bool,
}

/// What the runs of a check have shown.
#[derive(Default)]
pub(crate) struct Found {
    /// The most memory that one needed.
    pub(crate) needed: Cell<Bytes>,
    /// Whether one has changed running statistics.
    has_statistics: Cell<bool>,
    /// The most bytes of all pages of the pool.
    pub(crate) pages: Arc<AtomicU64>,
}

/// Why there is no gradient.
pub(crate) enum Failure {
    /// The step panicked, or its gradient is not a number.
    Undefined(String),
    /// The step does not fit or cannot be recorded.
    Impossible(String),
}

impl Failure {
    /// The reason.
    pub(crate) fn why(self) -> String {
        let (Self::Undefined(why) | Self::Impossible(why)) = self;
        why
    }
}

impl From<Failure> for TrainError {
    fn from(failure: Failure) -> Self {
        Self::NoNumbers { why: failure.why() }
    }
}

impl From<RecordError> for Failure {
    fn from(error: RecordError) -> Self {
        Self::Impossible(error.to_string())
    }
}

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Checks a few items first and, if they agree, more. A loss that sorts or picks items may
    /// treat a few of them alike.
    pub(crate) fn run(&self) -> Result<Outcome, TrainError> {
        let sizes: Vec<usize> =
            SIZES.into_iter().filter(|size| self.of.items / size >= 2).collect();
        let most = sizes.iter().map(|size| GROUPS.min(self.of.items / size) * size).max();
        let (tensors, candidates) = self.look(most.unwrap_or_default(), self.host.is_some());
        let mut found = None;
        let mut skipped = None;
        for (at, size) in sizes.iter().enumerate() {
            let groups = GROUPS.min(self.of.items / size);
            let is_last = at + 1 == sizes.len();
            let choice = candidates.choose(groups * size);
            if choice.differ && !choice.differ_in_marks && !is_last {
                skipped.get_or_insert((groups, *size, choice));
                continue;
            }
            match self.compare(groups, *size, &tensors, &choice)? {
                Outcome::Agrees { each } if !is_last => {
                    // If a few items agree, checks groups of more items.
                    let size = sizes[sizes.len() - 1];
                    let groups = GROUPS.min(self.of.items / size);
                    let choice = candidates.choose(groups * size);
                    let more = self.compare(groups, size, &tensors, &choice)?;
                    return Ok(confirmed(each, more));
                }
                // A loss may only need more items, and more items may show more.
                outcome @ Outcome::NotEstablished(_) => found = Some(outcome),
                outcome @ Outcome::Differs { by: Some(f64::INFINITY), .. } => found = Some(outcome),
                // This many do not fit. Fewer may.
                Outcome::NotCheckable(why) => {
                    let (Some((groups, size, choice)), None) = (skipped, &found) else {
                        return Ok(found.unwrap_or(Outcome::NotCheckable(why)));
                    };
                    return self.compare(groups, size, &tensors, &choice);
                }
                outcome => return Ok(outcome),
            }
        }
        Ok(found.unwrap_or(Outcome::NotEstablished("there are too few items")))
    }

    /// Compares the gradient of a few items on both sides of item `middle`, and `within` a range,
    /// with those of each side, in a later batch. Only what differs is run with the
    /// [controls](Self::gradients) of the first check.
    pub(crate) fn run_around(
        &self,
        (middle, within): (usize, Range<usize>),
    ) -> Result<Outcome, TrainError> {
        let left = AROUND.0.min(middle - within.start);
        let chosen: Vec<usize> = (middle - left..within.end.min(middle + AROUND.1)).collect();
        let count = chosen.len();
        let rows = Rows { tensors: &[], chosen: &chosen, in_a_row: true, same: 0 };
        let of = |range: Range<usize>| self.gradient(range, &rows);
        let sides = of(0..left).and_then(|one| Ok(vec![one, of(left..count)?]));
        let (Ok(singles), Ok(whole)) = (sides, of(0..count)) else {
            return Ok(Outcome::NotEstablished("the items have no gradient"));
        };
        let (paths, dtype) = paths_and_type::<LC::Backend, _>(&self.learner.model());
        let dtype = if self.host.is_some() { Host::computes_in(dtype) } else { dtype };
        let permuted = whole.gradient.clone();
        let mut gradients = Gradients { whole, pair: None, singles, permuted };
        let verdict =
            |gradients: &Gradients| gradients.verdict(self.of.reduction, Precision::of(dtype));
        match verdict(&gradients) {
            Verdict::Equal => return Ok(Outcome::Agrees { each: None }),
            Verdict::Nothing => return Ok(Outcome::NotEstablished("the gradient is zero")),
            Verdict::Differs { .. } if self.found.has_statistics.get() => {
                return Ok(Outcome::NotCheckable(OF_STATISTICS.to_owned()));
            }
            Verdict::Differs { .. } => {}
        }
        // The host may draw numbers, too, and seldom.
        for _ in 0..REPEATS {
            let is_same = |range: Range<usize>, before: &Weighed| {
                of(range).is_ok_and(|again| again.gradient == before.gradient)
            };
            let Gradients { whole, singles, .. } = &gradients;
            let repeats = is_same(0..count, whole)
                && is_same(0..left, &singles[0])
                && is_same(left..count, &singles[1]);
            if !repeats {
                let why = "the same items gave two different gradients".to_owned();
                return Ok(Outcome::NotCheckable(why));
            }
        }
        let (tensors, _) = self.look(middle + AROUND.1, self.host.is_some());
        let others: Vec<usize> = chosen.iter().copied().cycle().skip(left).take(count).collect();
        let rows = Rows { tensors: &tensors, chosen: &others, in_a_row: false, same: 0 };
        if let Ok(permuted) = self.gradient(0..count, &rows) {
            gradients.permuted = permuted.gradient;
        }
        Ok(match verdict(&gradients) {
            Verdict::Differs { coupling, by, parameter } => {
                let parameter = paths[parameter].clone();
                Outcome::Differs { coupling, by: Some(by), parameter, at: None }
            }
            _ => Outcome::Agrees { each: None },
        })
    }

    /// Checks on the batch's device, if the host cannot compute the step. Compares a micro-batch
    /// with its halves, so that few kernels are compiled and tuned for it. A sum is compared with
    /// its thirds: two parts do not show whether each has the same penalty.
    pub(crate) fn run_on_device(&self, micro_batch: usize) -> Result<Outcome, TrainError> {
        let most = if self.of.reduction == LossReduction::Sum { GROUPS } else { 2 };
        let groups = most.min(micro_batch.max(2));
        let size = (micro_batch / groups).max(1);
        if self.of.items < groups * size {
            return Ok(Outcome::NotEstablished("there are too few items"));
        }
        let (tensors, candidates) = self.look(groups * size, self.host.is_some());
        let choice = candidates.first(groups * size);
        Ok(match self.compare(groups, size, &tensors, &choice)? {
            Outcome::Differs { by: Some(f64::INFINITY), .. } => {
                Outcome::NotEstablished("a part of a micro-batch has no gradient")
            }
            outcome => outcome,
        })
    }

    /// Compares the gradient of `groups` groups of `size` items with those of its parts.
    fn compare(
        &self,
        groups: usize,
        size: usize,
        tensors: &[OfBatch],
        choice: &Choice,
    ) -> Result<Outcome, TrainError> {
        let gradients = match self.gradients((groups, size), tensors, choice) {
            Ok(gradients) => gradients,
            Err(outcome) => return Ok(outcome),
        };
        let weights: Vec<f64> =
            gradients.singles.iter().map(|single| single.weight / size as f64).collect();
        let (paths, dtype) = paths_and_type::<LC::Backend, _>(&self.learner.model());
        let dtype = if self.host.is_some() { Host::computes_in(dtype) } else { dtype };
        let precision = Precision::of(dtype);
        let precision =
            if self.means.normalizes { precision.behind_equal_items() } else { precision };
        let is_mean = self.of.reduction == LossReduction::Mean;
        // Weights that differ by less make no visible difference.
        let least = (10.0 * precision.tolerance).min(0.02) * weights[0].abs();
        let is_same = weights.iter().all(|weight| (weight - weights[0]).abs() <= least);
        let each = (is_mean && is_same).then(|| weights[0]);
        // In 16 bit no gradient shows different weights.
        let hides_weights = is_mean
            && precision.tolerance <= 0.01
            && match is_same {
                true => (self.of.weight / self.of.items as f64 - weights[0]).abs() > least,
                false => !gradients.depends_on_weights(precision),
            };
        Ok(match gradients.verdict(self.of.reduction, precision) {
            // A normalizing model couples items anyway, and items with one input can still differ
            // in other tensors.
            Verdict::Differs { coupling: Coupling::Items, .. } if self.means.normalizes => {
                Outcome::NotCheckable(OF_STATISTICS.to_owned())
            }
            Verdict::Differs { coupling, by, parameter } => {
                let parameter = paths[parameter].clone();
                Outcome::Differs { coupling, by: Some(by), parameter, at: None }
            }
            Verdict::Nothing => Outcome::NotEstablished("the gradient is zero"),
            Verdict::Equal if !choice.differ => {
                Outcome::NotEstablished("the items are alike in a tensor of the batch")
            }
            Verdict::Equal if hides_weights => Outcome::NotEstablished(HIDDEN_WEIGHTS),
            Verdict::Equal => Outcome::Agrees { each },
        })
    }

    /// The gradients of `groups` groups of `size` items: of all, of each group, of two together,
    /// and of the same items in another order. The outcome if one of them is missing.
    fn gradients(
        &self,
        (groups, size): (usize, usize),
        tensors: &[OfBatch],
        choice: &Choice,
    ) -> Result<Gradients, Outcome> {
        let others = choice.rows.iter().copied().cycle().skip(size).take(groups * size);
        let others: Vec<usize> = others.collect();
        let same = choice.rows.first().copied().unwrap_or(0);
        let in_a_row = choice.in_a_row;
        let rows = Rows { tensors, chosen: &choice.rows, in_a_row, same };
        let permuted = Rows { chosen: &others, in_a_row: false, ..rows };
        let all = 0..groups * size;
        let of_all = |rows: &Rows<'_>| self.gradient(all.clone(), rows);
        let twice = of_all(&rows).and_then(|whole| Ok((whole, of_all(&rows)?)));
        let (whole, again) = twice.map_err(|failure| match failure {
            Failure::Undefined(why) => {
                log::debug!("no gradient of some items: {why}");
                Outcome::NotEstablished("the items have no gradient")
            }
            Failure::Impossible(why) => Outcome::NotCheckable(why),
        })?;
        if whole.weight == 0.0 && self.of.reduction == LossReduction::Mean {
            return Err(Outcome::NotEstablished("the items weigh nothing"));
        }
        if whole.gradient != again.gradient {
            let why = "the same items gave two different gradients".to_owned();
            return Err(Outcome::NotCheckable(why));
        }
        let single = |group| self.gradient(group * size..(group + 1) * size, &rows);
        let singles: Result<Vec<Weighed>, Failure> = (0..groups).map(single).collect();
        let pair = (groups == GROUPS).then(|| self.gradient(0..2 * size, &rows)).transpose();
        let parts = singles.and_then(|singles| pair.map(|pair| (singles, pair)));
        let (singles, pair) = parts.map_err(|failure| match failure {
            Failure::Undefined(parameter) => {
                let (coupling, by) = (Coupling::Items, Some(f64::INFINITY));
                Outcome::Differs { coupling, by, parameter, at: None }
            }
            Failure::Impossible(why) => Outcome::NotCheckable(why),
        })?;
        let permuted = match of_all(&permuted) {
            Ok(permuted) => permuted.gradient,
            Err(_) => whole.gradient.clone(),
        };
        Ok(Gradients { whole, pair, singles, permuted })
    }

    /// Finds the tensors of the batch, and reads at least the first `count` items. Keeps their
    /// values if `keeps` is set.
    fn look(&self, count: usize, keeps: bool) -> (Vec<OfBatch>, Candidates) {
        let recorder = StepRecorder::new().refuse_reads();
        let cut = catch_unwind(AssertUnwindSafe(|| {
            recorder.record::<LC::Base, _>(|| self.of.splitter.range(self.of.batch, 0..1))
        }));
        let recording = match cut {
            Ok(Ok(recording)) => recording,
            // Errors and panics of a splitter are reported when the batch is cut to be run.
            Ok(Err(_)) | Err(_) => return (Vec::new(), Candidates::unknown(self.of.items)),
        };
        let of_items = |input: &Input| input.shape.first() == Some(&self.of.items);
        let inputs: Vec<Input> = recording.inputs().into_iter().filter(of_items).collect();
        let bytes = |input: &Input| input.shape.num_elements() * input.dtype.size() / self.of.items;
        let of_an_item = inputs.iter().map(bytes).sum::<usize>().max(1);
        let most = (MOST_READ.get() as usize / of_an_item).min(CANDIDATES);
        let mut candidates = Candidates::unknown(most.max(count).min(self.of.items));
        let others = inputs.iter().any(|input| !input.dtype.is_float());
        let tensors = inputs.into_iter().map(|input| OfBatch {
            same: self.means.normalizes && others && input.dtype.is_float(),
            candidates: recording.rows_of_input(&input, candidates.count),
            input,
        });
        let mut tensors: Vec<OfBatch> = tensors.collect();
        recording.discard();
        let counting = tensors.iter().filter(|tensor| !tensor.same);
        for data in counting.filter_map(|tensor| tensor.candidates.as_ref()) {
            candidates.add(data);
        }
        let each = (0..candidates.count).map(|item| item..item + 1);
        candidates.add_weights(self.weights(each).unwrap_or_default());
        if !keeps {
            tensors.iter_mut().for_each(|tensor| tensor.candidates = None);
        }
        (tensors, candidates)
    }

    /// The weight of each of these parts, if it can be asked for.
    fn weights(&self, parts: impl Iterator<Item = Range<usize>>) -> Option<Vec<f64>> {
        let of = |part| self.of.splitter.weight(&self.of.splitter.range(self.of.batch, part));
        let weigh = || parts.map(of).collect::<Vec<f64>>();
        let record = || StepRecorder::new().record::<LC::Base, _>(weigh);
        let recording = catch_unwind(AssertUnwindSafe(record)).ok()?.ok()?;
        let weights = recording.result().clone();
        recording.discard();
        Some(weights)
    }

    /// The gradient of the chosen items in `range`. Restores the model and hidden states.
    fn gradient(&self, range: Range<usize>, rows: &Rows<'_>) -> Result<Weighed, Failure> {
        let share = range.len() as f64 / rows.chosen.len() as f64;
        let range = range.start + rows.first()..range.end + rows.first();
        let of_all = self.share_of(&range, rows)?;
        let weighed = self.unchanged(share, || match &self.host {
            None => self.run_there(range, rows, of_all.as_ref()),
            Some(host) => self.run_on_host(host, range, rows, of_all.as_ref()),
        })?;
        let is_number = weighed.gradient.iter().flatten().all(|value| value.is_finite());
        // The mean over nothing is not a number, and does not count.
        match is_number || weighed.weight == 0.0 {
            true => Ok(weighed),
            false => Err(Failure::Undefined("it is no number".to_owned())),
        }
    }

    /// Runs a step on a share of the batch. Restores the model and hidden states.
    fn unchanged<R>(
        &self,
        share: f64,
        run: impl FnOnce() -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.found.unchanged::<LC::Backend, _, _>(&self.learner.model(), share, run)
    }

    /// Runs the items on the batch's device, with their `share` of the numbers of all.
    fn run_there(
        &self,
        range: Range<usize>,
        rows: &Rows<'_>,
        share: Option<&Share>,
    ) -> Result<Weighed, Failure> {
        let (memory, place) = (self.means.memory.clone(), self.place());
        let needs = move |trace: &Trace| {
            let footprint = memory.footprint(trace);
            if place(&footprint) { footprint.growth() } else { Bytes::MAX }
        };
        let recorder = StepRecorder::new().fixed_draws().with_rows(rows.selected());
        let recorder = if share.is_some() { recorder.keep_uploads() } else { recorder };
        let recorder = recorder.limit_reads(self.means.budget, needs);
        let mut recording = recorder.record::<LC::Base, _>(|| {
            let micro = self.of.splitter.range(self.of.batch, range.clone());
            let weight = match self.gives {
                true => range.len() as f64,
                false => self.of.splitter.weight(&micro),
            };
            (train_step(self.learner, &self.learner.model(), micro).grads, weight)
        })?;
        let trace = recording.trace();
        let footprint = self.means.memory.footprint(trace);
        let to_record = recording_bytes(&*self.means.memory, trace, trace.calls().count());
        // What threads keep stays permanently, so only what is new counts.
        let kept = Bytes::new(self.means.kept.load(Relaxed));
        let needed = footprint.growth() + to_record + (footprint.stays - kept);
        if needed > self.means.budget {
            let why = format!("some items need {needed} where {} are allowed", self.means.budget);
            return Err(Failure::Impossible(why));
        }
        if !self.place()(&footprint) {
            return Err(Failure::Impossible("there is no room for the pages of some items".into()));
        }
        self.found.needed.set(self.found.needed.get().max(needed));
        self.means.kept.fetch_max(footprint.stays.get(), Relaxed);
        let given = share.map(|share| share.given(&recording)).transpose()?;
        for (tensor, data) in given.into_iter().flatten() {
            if !recording.give(tensor, data) {
                let why = "a part has run before it is given its numbers".to_owned();
                return Err(Failure::Impossible(why));
            }
        }
        let (grads, weight) = recording.run();
        let mut values = Values { grads, gradient: Vec::new() };
        self.learner.model().visit(&mut values);
        Ok(Weighed { gradient: values.gradient, weight })
    }

    /// Prepares the pages of what runs next. Returns whether the pool has room for them.
    fn place(&self) -> impl Fn(&Footprint) -> bool + Send + Sync + 'static {
        let (pool, most) = (self.means.pool.clone(), self.found.pages.clone());
        move |footprint| {
            let Some(pool) = &pool else { return true };
            let pages = pool.prepare_for(footprint);
            let are_there = pages != Bytes::MAX;
            most.fetch_max(if are_there { pages.get() } else { 0 }, Relaxed);
            are_there
        }
    }
}

impl Found {
    /// Runs a step of a model on a share of a batch. Restores the model and hidden states.
    pub(crate) fn unchanged<B, M, R>(
        &self,
        model: &M,
        share: f64,
        run: impl FnOnce() -> Result<R, Failure>,
    ) -> Result<R, Failure>
    where
        B: AutodiffBackend<InnerBackend: LazyBackend> + LazyBackend,
        M: AutodiffModule<B>,
    {
        let snapshot = has_untrained::<B, _>(model).then(|| model.clone().into_record());
        let result = apart(share, run);
        if let Some(snapshot) = snapshot {
            let restored = restore::<B, _>(model, snapshot);
            let restored = restored.map_err(|error| Failure::Impossible(error.to_string()))?;
            if !restored.is_empty() {
                self.has_statistics.set(true);
            }
        }
        // Those of a step that panicked.
        forget_graphs_without::<B, _>(model, &GradientsParams::new());
        result
    }
}

/// Runs a step on a share of a batch, from which nothing is learned. Restores hidden states.
pub(crate) fn apart<R>(share: f64, run: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    let states = SavedStates::save();
    let run = catch_unwind(AssertUnwindSafe(|| rehearsing(|| with_share(share, run))));
    states.restore();
    run.unwrap_or_else(|panic| Err(Failure::Undefined(panic_message(&*panic))))
}

/// Combines agreement on a few items, of weight `each`, with the result for more items.
fn confirmed(each: Option<f64>, more: Outcome) -> Outcome {
    match more {
        differs @ Outcome::Differs { .. } => differs,
        // Weights are covered if either check saw different ones.
        Outcome::Agrees { each: more } => Outcome::Agrees { each: each.and(more) },
        Outcome::NotEstablished(_) | Outcome::NotCheckable(_) => Outcome::Agrees { each },
    }
}

/// Collects [sketches](sketch) of gradients, in the order of the model. A parameter without a
/// gradient gets zeros.
struct Values {
    grads: GradientsParams,
    gradient: Gradient,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let elements = param.val().shape().num_elements();
        self.gradient.push(match self.grads.remove::<B::InnerBackend, D>(param.id) {
            Some(grad) => sketch(elements, grad.into_data().iter::<f64>()),
            None => of_zeros(elements),
        });
    }
}

/// The paths of a model's parameters, in order, and the coarsest of their types.
fn paths_and_type<B: Backend, M: Module<B>>(model: &M) -> (Vec<String>, DType) {
    let floats = parameters(model).into_iter().filter(|parameter| parameter.dtype.is_float());
    let (paths, dtypes): (Vec<String>, Vec<DType>) =
        floats.map(|parameter| (parameter.path, parameter.dtype)).unzip();
    let coarser = |one: DType, other: DType| {
        let is_coarser = Precision::of(other).tolerance > Precision::of(one).tolerance;
        if is_coarser { other } else { one }
    };
    (paths, dtypes.into_iter().fold(DType::F64, coarser))
}
