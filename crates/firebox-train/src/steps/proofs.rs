//! Proves from a rehearsal of a loop's step that the gradients of its batches are sums over their
//! parts, or says what parts have to be given of the batch.
//!
//! The step is recorded once: each pass over the micro-batches runs on the whole batch and then on
//! the parts, from the same tensors. What [`WeightedGradients`](crate::WeightedGradients) adds up
//! are the gradients.

use std::ops::Range;
use std::rc::Rc;

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use firebox_lazy::{LazyBackend, Recording, mark};
use firebox_proof::CUT;
use firebox_trace::{
    Bytes, Category, Label, Mark, Origin, Step, StructuralHash, TensorIndex, Trace,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::MicroBatches;
use crate::check::{
    Coupling, Failure, Found, Gift, Means, Proved, SOON, SplitCheck, compare, hosts, with_values,
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

/// What is proved of the batches of a loop.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    splits: FxHashMap<(StructuralHash, Vec<usize>), Passes>,
    found: SplitCheck,
    /// The most that a proof took of the host's memory.
    took: Bytes,
    /// How often a step was proved again because it had become another program.
    again: usize,
}

/// How often a step that becomes another program is proved again.
const ATTEMPTS: usize = 8;

/// What is proved of each pass over the parts of a batch. Nothing of those without gradients.
pub(super) type Passes = Rc<[Option<Exact>]>;

/// A pass whose gradients add up to those of the batch.
#[derive(Clone, Debug)]
pub(super) struct Exact {
    /// Whether parts are given numbers of the batch.
    pub(super) gives: bool,
    pub(super) reduction: LossReduction,
    /// What its parts are given, and which programs they are.
    pub(super) gifts: Rc<[Gift]>,
}

/// What a recorded step shows of a pass.
enum Shown {
    NoGradient,
    Exact(Vec<Gift>, LossReduction),
    Differs(Coupling, TrainError),
    Undecided(String),
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

    /// What is known of a split into parts of these sizes of batches of this form.
    pub(super) fn known(
        &self,
        form: Option<StructuralHash>,
        parts: &[Range<usize>],
    ) -> Option<Passes> {
        self.splits.get(&(form?, parts.iter().map(Range::len).collect())).cloned()
    }

    /// Notes that a step was another program than those that are proved. They are proved again, if
    /// that is not so time and again.
    pub(super) fn forget(&mut self) {
        if self.again < ATTEMPTS {
            self.again += 1;
            self.splits.clear();
        }
    }

    /// Notes that something is not known of a split that runs, and tells the user once.
    pub(super) fn is_unknown(&mut self, why: String, settings: &Settings) {
        if !matches!(self.found, SplitCheck::Unknown(_)) {
            settings.warn(&format!("whether batches may be split is not known: {why}"));
        }
        self.found = SplitCheck::Unknown(why);
    }

    /// Notes what a step shows of the passes over a split.
    ///
    /// # Errors
    ///
    /// If parts do not add up, and the user has not accepted that.
    fn learn(
        &mut self,
        split: (Option<StructuralHash>, Vec<usize>),
        shown: Vec<Shown>,
        settings: &Settings,
    ) -> Result<Passes, TrainError> {
        let (mut passes, mut accepted, mut undecided) = (Vec::new(), None, None);
        for shown in shown {
            passes.push(None);
            match shown {
                Shown::NoGradient => {}
                Shown::Exact(gifts, reduction) => {
                    let gives = gifts.iter().any(Gift::is_any);
                    passes.pop();
                    passes.push(Some(Exact { gives, reduction, gifts: gifts.into() }));
                }
                Shown::Differs(coupling, cause) => {
                    if !settings.accepted.contains(&coupling) {
                        return Err(cause);
                    }
                    if self.found != SplitCheck::Accepted(coupling) {
                        log::warn!("{cause}");
                    }
                    accepted = Some(coupling);
                }
                Shown::Undecided(why) => undecided = Some(why),
            }
        }
        match (undecided, accepted) {
            (Some(why), _) => self.is_unknown(why, settings),
            (None, Some(coupling)) => self.found = SplitCheck::Accepted(coupling),
            (None, None) if matches!(self.found, SplitCheck::NotNeeded) => {
                self.found = SplitCheck::Proved;
            }
            (None, None) => {}
        }
        let passes: Passes = passes.into();
        if let (Some(form), parts) = split {
            self.splits.insert((form, parts), passes.clone());
        }
        Ok(passes)
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
) -> Result<Passes, TrainError>
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
    let with = (means, &found);
    let shown = recording
        .and_then(|recording| shown(&recording, (batch.1, parts), &reductions, with))
        .unwrap_or_else(|failure| vec![undecided(failure)]);
    proofs.takes(found.needed.get());
    proofs.learn((form, parts.iter().map(Range::len).collect()), shown, settings)
}

fn undecided(failure: Failure) -> Shown {
    Shown::Undecided(failure.why())
}

/// What a recorded step shows of each pass over a batch of `items` items.
fn shown<B: Backend, T>(
    recording: &Recording<B, T>,
    (items, parts): (usize, &[Range<usize>]),
    reductions: &[Vec<LossReduction>],
    (means, found): (&Means, &Found),
) -> Result<Vec<Shown>, Failure> {
    let trace = recording.trace();
    // The steps of a part are taken out of it.
    means.may_compare(&[trace, trace], found)?;
    let ranges = passes(trace);
    let passes: Vec<&[Range<usize>]> = ranges.chunks(1 + parts.len()).collect();
    if reductions.iter().all(Vec::is_empty) {
        let why = "its gradients are not added to `WeightedGradients`";
        return Err(Failure::Impossible(why.to_owned()));
    }
    let of_pass = |(at, reductions): (usize, &Vec<LossReduction>)| {
        let next = passes.get(at + 1).map_or(trace.steps.len(), |next| next[0].start);
        let pass = (passes[at], next);
        of_pass(recording, (items, parts), pass, reductions, (means, found))
            .unwrap_or_else(undecided)
    };
    Ok(reductions.iter().enumerate().map(of_pass).collect())
}

/// What is shown of a pass: the steps of the whole batch and of the parts, before `next` the ones
/// that add its gradients up.
fn of_pass<B: Backend, T>(
    recording: &Recording<B, T>,
    (items, parts): (usize, &[Range<usize>]),
    (steps, next): (&[Range<usize>], usize),
    reductions: &[LossReduction],
    (means, found): (&Means, &Found),
) -> Result<Shown, Failure> {
    let impossible = |why: &str| Err(Failure::Impossible(why.to_owned()));
    let trace = recording.trace();
    let reduction = match reductions {
        [] if !has_gradients(trace, &steps[0]) => return Ok(Shown::NoGradient),
        [] => return impossible("its gradients are added up later"),
        [reduction] => *reduction,
        _ => return impossible("some gradients are added up as means, and some as sums"),
    };
    let is_changed = (0..).map(TensorIndex).zip(&trace.tensors).any(|(_, tensor)| {
        let is_gradient = |label: &Label| label.category == Category::Gradient;
        let Origin::Made(at) = tensor.origin else { return false };
        let at = at.0 as usize;
        let is_behind = (steps[0].start..next).contains(&at);
        let is_within = steps.iter().any(|steps| steps.contains(&at));
        tensor.label.as_deref().is_some_and(is_gradient) && is_behind && !is_within
    });
    if is_changed {
        return impossible("its gradients are changed before they are added up");
    }
    let whole = Part::of(trace, steps[0].clone());
    let mut gifts = Vec::new();
    for (range, steps) in parts.iter().zip(&steps[1..]) {
        let part = Part::of(trace, steps.clone());
        let host = hosts([recording, recording], items, range);
        let both = [&whole.recording(items), &part.recording(range.len())];
        let gift = match compare(both, &host, (reduction, means.normalizes))? {
            Ok(gift) => gift,
            Err(Proved::Differs { coupling, parameter, at }) => {
                let cause = TrainError::Coupled { coupling, by: None, parameter, at };
                return Ok(Shown::Differs(coupling, cause));
            }
            Err(Proved::Meet(at)) => {
                return impossible(&format!("items meet in {at}, and may come apart again"));
            }
            Err(Proved::Undecided(why)) => return impossible(&why),
            Err(Proved::Exact(..) | Proved::Weighs { .. }) => {
                unreachable!("that is no result of a comparison")
            }
        };
        // Whether they can be computed at all.
        let wanted = gift.wanted(&whole.trace);
        let value = &mut |tensor| recording.value_of(tensor);
        means.computed(&whole.trace, (&wanted, None), value, found, SOON)?;
        gifts.push(gift);
    }
    Ok(Shown::Exact(gifts, reduction))
}

/// Whether these steps make a gradient of a parameter.
fn has_gradients(trace: &Trace, steps: &Range<usize>) -> bool {
    trace.tensors.iter().any(|tensor| {
        let is_gradient = |label: &Label| label.category == Category::Gradient;
        let Origin::Made(at) = tensor.origin else { return false };
        steps.contains(&(at.0 as usize)) && tensor.label.as_deref().is_some_and(is_gradient)
    })
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

    fn recording(&self, items: usize) -> firebox_proof::Recording<'_> {
        let inputs = self.trace.existing().map(|tensor| (u64::from(tensor.0), tensor)).collect();
        let outputs = self.outputs.clone();
        firebox_proof::Recording { trace: &self.trace, items, inputs, outputs }
    }
}

/// The passes of a step that is recorded for a proof.
pub(super) struct Proving<'a> {
    parts: &'a [Range<usize>],
    /// How gradients were added up behind each pass.
    reductions: Vec<Vec<LossReduction>>,
    passes: usize,
}

impl<'a> Proving<'a> {
    pub(super) fn new(parts: &'a [Range<usize>]) -> Self {
        let _ = added_as();
        Self { parts, reductions: Vec::new(), passes: 0 }
    }

    /// How gradients were added up behind each pass.
    pub(super) fn end(mut self) -> Vec<Vec<LossReduction>> {
        self.end_pass();
        self.reductions
    }

    fn end_pass(&mut self) {
        let added = added_as();
        if self.passes > 0 {
            self.reductions.push(added);
        }
    }

    /// Records `step` on all items and on each part.
    pub(super) fn each<B: LazyBackend, I, T>(
        &mut self,
        (splitter, batch, items): (&impl Splitter<I>, &I, usize),
        step: &mut dyn FnMut(I) -> T,
        sink: &mut dyn FnMut(T, usize),
    ) {
        self.end_pass();
        self.passes += 1;
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
    }
}
