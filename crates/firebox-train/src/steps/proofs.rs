//! Proves from a rehearsal of a loop's step that the gradients of its batches are sums over their
//! parts, or says what parts have to be given of the batch.
//!
//! The step is recorded once: each pass over the micro-batches runs on the whole batch and then on
//! the parts, from the same tensors. What [`WeightedGradients`](crate::WeightedGradients) adds up
//! are the gradients.

use std::ops::Range;

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use firebox_lazy::{LazyBackend, Recording, host_bytes_of_rehearsal, mark};
use firebox_proof::{CUT, HostData};
use firebox_trace::{Bytes, Category, Mark, Origin, Step, StructuralHash, TensorIndex, Trace};
use rustc_hash::{FxHashMap, FxHashSet};

use super::MicroBatches;
use crate::check::{
    Failure, Found, Gift, Means, Proved, SOON, SplitCheck, compare, compared, with_values,
};
use crate::components::TrainingBackend;
use crate::error::TrainError;
use crate::gradients::{added_as, with_own_leaves};
use crate::planner::labels::label_parameters;
use crate::reduction::LossReduction;
use crate::settings::Settings;
use crate::splitter::Splitter;

/// The notes around a pass over one part.
const BEGIN: &str = "a part begins";
const END: &str = "a part has run";

/// How often what was recorded counts: a proof has the steps of parts, and values of its own.
const VALUES: u64 = 3;

/// What is proved of the batches of a loop.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    splits: FxHashMap<(Option<StructuralHash>, Vec<usize>), Option<Exact>>,
    gifts: Vec<Gift>,
    found: SplitCheck,
    /// The most that a proof took of the host's memory.
    took: Bytes,
}

/// A split whose parts add up to the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exact {
    /// Whether parts are given numbers of the batch.
    pub(super) gives: bool,
    /// Whether they add up like means, by their numbers of items.
    pub(super) is_mean: bool,
}

/// What a step shows of the gradients of a split.
#[derive(Default)]
struct Shown {
    gifts: Vec<Gift>,
    /// Whether losses are sums, or means.
    reductions: Vec<LossReduction>,
    differs: Option<TrainError>,
    undecided: Option<String>,
}

impl Proofs {
    pub(super) fn found(&self) -> &SplitCheck {
        &self.found
    }

    pub(super) fn took(&self) -> Bytes {
        self.took
    }

    pub(super) fn takes(&mut self, took: Bytes) {
        self.took = self.took.max(took);
    }

    pub(super) fn gifts(&self) -> &[Gift] {
        &self.gifts
    }

    /// What is known of a split into parts of these sizes of batches of this form: nothing, or that
    /// nothing can be proved.
    pub(super) fn known(
        &self,
        form: Option<StructuralHash>,
        parts: &[Range<usize>],
    ) -> Option<Option<Exact>> {
        let split = (form?, parts.iter().map(Range::len).collect());
        self.splits.get(&(Some(split.0), split.1)).copied()
    }

    /// Notes what a step shows of a split.
    ///
    /// # Errors
    ///
    /// If parts do not add up, and the user has not accepted that.
    fn learn(
        &mut self,
        split: (Option<StructuralHash>, Vec<usize>),
        shown: Shown,
        settings: &Settings,
    ) -> Result<Option<Exact>, TrainError> {
        let Shown { gifts, reductions, differs, undecided } = shown;
        let accepted = match &differs {
            Some(TrainError::Coupled { coupling, .. }) if settings.accepted.contains(coupling) => {
                Some(*coupling)
            }
            _ => None,
        };
        let exact = match (differs, undecided) {
            (Some(cause), _) => {
                let Some(coupling) = accepted else { return Err(cause) };
                if self.found != SplitCheck::Accepted(coupling) {
                    log::warn!("{cause}");
                }
                self.found = SplitCheck::Accepted(coupling);
                None
            }
            (None, Some(why)) => {
                if !matches!(self.found, SplitCheck::Unknown(_)) {
                    settings.warn(&format!("whether batches may be split is not known: {why}"));
                }
                self.found = SplitCheck::Unknown(why);
                None
            }
            (None, None) => {
                if matches!(self.found, SplitCheck::NotNeeded) {
                    self.found = SplitCheck::Proved;
                }
                let gives = gifts.iter().any(Gift::is_any);
                let is_new = |gift: &Gift| !self.gifts.contains(gift);
                let new: Vec<Gift> = gifts.into_iter().filter(is_new).collect();
                self.gifts.extend(new);
                Some(Exact { gives, is_mean: !reductions.contains(&LossReduction::Sum) })
            }
        };
        self.splits.insert(split, exact);
        Ok(exact)
    }
}

/// Finds out whether the batch may be split into `parts` in a loop's `step`, which is recorded and
/// never runs.
///
/// # Errors
///
/// If its gradient is not the sum over these parts.
pub(super) fn prove<B, M, O, I, S, R>(
    proofs: &mut Proofs,
    (model, optim): (&M, &O),
    (splitter, batch): (&S, (&I, usize, f64)),
    (form, parts): (Option<StructuralHash>, &[Range<usize>]),
    step: &mut super::Step<'_, B, M, O, I, S, R>,
    (means, settings): (&Means, &Settings),
) -> Result<Option<Exact>, TrainError>
where
    B: TrainingBackend,
    M: AutodiffModule<B>,
    O: Clone,
    S: Splitter<I>,
{
    let (found, mut reductions) = (Found::default(), Vec::new());
    let mut recorder = with_values().zero_reads();
    if means.memory.is_on_host() {
        recorder = recorder.limit_host(means.budget);
    }
    let recording = found.unchanged::<B, _, _>(model, 1.0, || {
        let recording = recorder.record::<B::Base, _>(|| {
            // Leaves of its own: see `rehearse_training`.
            let mut current = with_own_leaves(model.clone());
            let mut optim = optim.clone();
            label_parameters(model);
            let mut passes = MicroBatches::proved(splitter, batch, parts);
            let ended = step(&mut current, &mut optim, &mut passes).map(|_| ());
            reductions = passes.reductions();
            ended
        })?;
        match recording.result() {
            Ok(()) => Ok(recording),
            Err(error) => Err(Failure::Impossible(error.to_string())),
        }
    });
    let shown = recording
        .and_then(|recording| shown(&recording, (batch.1, parts), &reductions, (means, &found)));
    let shown = shown.unwrap_or_else(|failure| {
        let (Failure::Undefined(why) | Failure::Impossible(why)) = failure;
        Shown { undecided: Some(why), ..Shown::default() }
    });
    proofs.takes(found.needed.get());
    proofs.learn((form, parts.iter().map(Range::len).collect()), shown, settings)
}

/// What the passes of a recorded step show of a batch of `items` items.
fn shown<B: Backend, T>(
    recording: &Recording<B, T>,
    (items, parts): (usize, &[Range<usize>]),
    reductions: &[Vec<LossReduction>],
    (means, found): (&Means, &Found),
) -> Result<Shown, Failure> {
    let trace = recording.trace();
    let needed = host_bytes_of_rehearsal(trace) * VALUES;
    if means.memory.is_on_host() {
        if needed > means.budget {
            return Err(Failure::Impossible(format!("comparing recordings needs {needed}")));
        }
        found.needed.set(needed);
    }
    let mut shown = Shown::default();
    let ranges = passes(trace);
    for (pass, reductions) in ranges.chunks(1 + parts.len()).zip(reductions) {
        let whole = Part::of(trace, pass[0].clone());
        if !whole.has_gradients() {
            continue;
        }
        let [reduction] = reductions[..] else {
            let why = "some of its gradients are added up as means, and some as sums";
            return Err(Failure::Impossible(why.to_owned()));
        };
        shown.reductions.push(reduction);
        for (range, steps) in parts.iter().zip(&pass[1..]) {
            let part = Part::of(trace, steps.clone());
            let host = |a: TensorIndex, b: TensorIndex| {
                let data = recording.value_of(a).zip(recording.value_of(b));
                data.map_or(HostData::Other, |(a, b)| compared(&a, &b, items, range))
            };
            let both = [&whole.recording(items), &part.recording(range.len())];
            match compare(both, &host, (reduction, means.normalizes))? {
                Ok(gift) => {
                    // Whether they can be computed at all.
                    let wanted = gift.wanted(&whole.trace);
                    let value = &mut |tensor| recording.value_of(tensor);
                    means.computed(&whole.trace, (&wanted, None), value, found, SOON)?;
                    shown.gifts.push(gift);
                }
                Err(Proved::Differs { coupling, parameter, at }) => {
                    shown.differs = Some(TrainError::Coupled { coupling, by: None, parameter, at });
                    return Ok(shown);
                }
                Err(Proved::Meet(at)) => {
                    shown.undecided = Some(format!("items meet in {at}, and may come apart again"));
                }
                Err(Proved::Undecided(why)) => shown.undecided = Some(why),
                Err(Proved::Exact(..) | Proved::Weighs { .. }) => {
                    unreachable!("that is no result of a comparison")
                }
            }
        }
    }
    if shown.reductions.is_empty() {
        shown.undecided = Some("its gradients are not added to `WeightedGradients`".to_owned());
    }
    Ok(shown)
}

/// The steps of each part that was recorded.
fn passes(trace: &Trace) -> Vec<Range<usize>> {
    let at = |note: &str| {
        let note = Mark::from(note);
        let steps = trace.steps.iter().enumerate();
        steps.filter(move |(_, step)| step.is_mark(&note)).map(|(at, _)| at).collect::<Vec<_>>()
    };
    at(BEGIN).into_iter().zip(at(END)).map(|(begin, end)| begin + 1..end).collect()
}

/// A part of a recorded step, as a recording of its own.
struct Part {
    trace: Trace,
    outputs: Vec<TensorIndex>,
}

impl Part {
    fn of(trace: &Trace, steps: Range<usize>) -> Self {
        let mut part = trace.clone();
        part.steps = trace.steps[steps].to_vec();
        part.tensors.iter_mut().for_each(|tensor| tensor.origin = Origin::Existing);
        part.renumber_origins();
        let is_gradient = |category| category == Category::Gradient;
        for tensor in part.tensors.iter_mut().filter(|tensor| tensor.origin == Origin::Existing) {
            tensor.label.take_if(|label| is_gradient(label.category));
        }
        let made = part.steps.iter().flat_map(Step::outputs).copied();
        let ended: FxHashSet<TensorIndex> =
            part.steps.iter().flat_map(|step| step.deaths_and_births().0).collect();
        let outputs = made.filter(|made| !ended.contains(made)).collect();
        Self { trace: part, outputs }
    }

    fn has_gradients(&self) -> bool {
        let labels = self.trace.tensors.iter().filter_map(|tensor| tensor.label.as_ref());
        labels.into_iter().any(|label| label.category == Category::Gradient)
    }

    fn recording(&self, items: usize) -> firebox_proof::Recording<'_> {
        let inputs = self.trace.existing().map(|tensor| (u64::from(tensor.0), tensor)).collect();
        let outputs = self.outputs.clone();
        firebox_proof::Recording { trace: &self.trace, items, inputs, outputs }
    }
}

/// The passes of a step that is recorded for a proof.
pub(super) struct Proving<'a> {
    parts: &'a [Range<usize>],
    /// How gradients were added up in each pass.
    pub(super) reductions: Vec<Vec<LossReduction>>,
}

impl<'a> Proving<'a> {
    pub(super) fn new(parts: &'a [Range<usize>]) -> Self {
        Self { parts, reductions: Vec::new() }
    }

    /// Records `step` on all items and on each part.
    pub(super) fn each<B: LazyBackend, I, T>(
        &mut self,
        (splitter, batch, items): (&impl Splitter<I>, &I, usize),
        step: &mut dyn FnMut(I) -> T,
        sink: &mut dyn FnMut(T, usize),
    ) {
        let _ = added_as();
        for range in std::iter::once(0..items).chain(self.parts.iter().cloned()) {
            let share = range.len() as f64 / items as f64;
            let count = range.len();
            mark::<B::Base>(BEGIN);
            let micro = splitter.range(batch, range);
            mark::<B::Base>(CUT);
            let output = crate::share::with_share(share, || step(micro));
            mark::<B::Base>(END);
            sink(output, count);
        }
        self.reductions.push(added_as());
    }
}
