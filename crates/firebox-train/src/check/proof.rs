//! Proves from recordings of the step that a batch may be split, before anything of it runs.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::train::TrainOutput;
use firebox_lazy::{LazyBackend, Recording, StepRecorder, host_bytes_of_rehearsal, mark};
use firebox_proof::{CUT, HostData, Proof, prove};
use firebox_trace::{Bytes, Category, TensorIndex, Trace};

use super::given::{Gift, Numbers, SOON, compared};
use super::verdict::Coupling;
use super::{Check, Failure, Found, Means, OF_STATISTICS, ToSplit};
use crate::components::{LazyComponents, TrainBatch, TrainItem};
use crate::error::TrainError;
use crate::loss_scale::with_scale;
use crate::planner::labels::{label_gradients, label_parameters};
use crate::planner::rehearsal::train_step;
use crate::reduction::LossReduction;
use crate::settings::Settings;
use crate::splitter::Splitter;
use crate::weights::{self, BatchWeight};

/// What a proof says about a split.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Proved {
    /// The gradient of the batch is the sum over its parts, with what they are given.
    Exact(Vec<Gift>, LossReduction),
    /// It is not.
    Differs {
        coupling: Coupling,
        /// The path of a parameter.
        parameter: String,
        /// Where items meet.
        at: Option<String>,
    },
    /// A part weighs otherwise than the batch says.
    Weighs { items: Range<usize>, stated: f64, counted: f64 },
    /// Items meet here, and may come apart again.
    Meet(String),
    /// Nothing, for this reason.
    Undecided(String),
}

/// How often what was recorded counts: a proof has values of its own for the tensors of both
/// recordings.
const VALUES: u64 = 2;

/// Shares of a batch that differ by no more are the same, rounded.
const WEIGHS_ALIKE: f64 = 1e-3;

/// What a part of these items weighs in a batch of which it is proved that each item weighs the
/// same, once parts are given what scales them. It states `stated`.
///
/// # Errors
///
/// If it states another share of the batch, is given nothing, and the user has not accepted that.
pub(crate) fn proved_weight(
    of: BatchWeight,
    stated: f64,
    part: Range<usize>,
    gives: bool,
    settings: &Settings,
) -> Result<f64, TrainError> {
    let is_accepted = !gives && settings.accepted.contains(&Coupling::Weights);
    if of.reduction == LossReduction::Sum || is_accepted {
        return Ok(stated);
    }
    let counted = part.len() as f64 / of.items as f64;
    let share = stated / of.total();
    if !gives && (share - counted).abs() > WEIGHS_ALIKE {
        return Err(TrainError::OtherWeights { items: part, stated: share, counted });
    }
    Ok(counted * of.total())
}

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Compares the recording of the batch with those of these parts.
    pub(crate) fn prove(&self, parts: &[Range<usize>]) -> Proved {
        let prove = |reduction| match self.proved(parts, reduction) {
            Ok(proved) => proved,
            Err(failure) => Proved::Undecided(failure.why()),
        };
        match prove(self.of.reduction) {
            Proved::Differs { coupling: Coupling::Sum, .. } if !self.of.is_declared => {
                prove(LossReduction::Sum)
            }
            proved => proved,
        }
    }

    fn proved(&self, parts: &[Range<usize>], reduction: LossReduction) -> Result<Proved, Failure> {
        let all = 0..self.of.items;
        let scale = self.of.scale;
        let whole = self.recorded(all.clone(), scale)?;
        let (mut gifts, mut proved) = (Vec::new(), None);
        for part in parts {
            match self.compared((&whole, reduction), &all, (part, scale))? {
                Ok(gift) => gifts.push(gift),
                Err(differs @ Proved::Differs { .. }) => return Ok(differs),
                Err(other) => proved = Some(other),
            }
        }
        drop(whole);
        if let Some(proved) = proved {
            return Ok(proved);
        }
        let mut numbers = None;
        if gifts.iter().any(Gift::is_any) {
            // Whether they can be computed at all.
            let found = self.numbers(all, &gifts, scale, SOON)?;
            if !gifts.iter().all(|gift| gift.is_of(&found)) {
                let why = "the step is another one each time".to_owned();
                return Err(Failure::Impossible(why));
            }
            let has_weight = found.weight.is_some() && gifts.iter().all(Gift::has_weight);
            let is_given = gifts.iter().any(Gift::is_given);
            if self.of.ranks > 1 && is_given && !(reduction == LossReduction::Mean && has_weight) {
                let why = "each rank would have to be given numbers of the batches of all";
                return Ok(Proved::Undecided(why.to_owned()));
            }
            numbers = Some(found);
        }
        let numbers = numbers.as_ref();
        let weighs = match reduction {
            LossReduction::Mean => self.weighed_otherwise(parts, &gifts, numbers)?,
            LossReduction::Sum => None,
        };
        match weighs {
            Some(weighs) => Ok(weighs),
            None => Ok(Proved::Exact(gifts, reduction)),
        }
    }

    /// What the items `part` are given of the items `whole`, in steps whose loss has this scale.
    pub(crate) fn gift(
        &self,
        whole: &Range<usize>,
        part: &Range<usize>,
        scale: Option<f64>,
    ) -> Result<Gift, Failure> {
        let recording = self.recorded(whole.clone(), scale)?;
        let undecided = |_| Failure::Impossible("some items run another program".to_owned());
        self.compared((&recording, self.of.reduction), whole, (part, scale))?.map_err(undecided)
    }

    /// Compares a recording of the items `all` with that of a part of them.
    fn compared(
        &self,
        (whole, reduction): (&Recording<LC::Base, TrainItem<LC>>, LossReduction),
        all: &Range<usize>,
        (part, scale): (&Range<usize>, Option<f64>),
    ) -> Result<Result<Gift, Proved>, Failure> {
        let recorded = self.recorded(part.clone(), scale)?;
        self.means.may_compare(&[whole.trace(), recorded.trace()], &self.found)?;
        let rows = part.start - all.start..part.end - all.start;
        let host = hosts([whole, &recorded], all.len(), &rows);
        let (of_whole, of_part) = (as_proof(whole, all.len()), as_proof(&recorded, part.len()));
        compare([&of_whole, &of_part], &host, (reduction, self.means.normalizes))
    }

    /// Records the step on these items, with a loss of this scale. It never runs.
    fn recorded(
        &self,
        range: Range<usize>,
        scale: Option<f64>,
    ) -> Result<Recording<LC::Base, TrainItem<LC>>, Failure> {
        self.recorded_by(&StepRecorder::new().glance().keep_uploads(), range, scale)
    }

    /// The same by this recorder.
    pub(super) fn recorded_by(
        &self,
        recorder: &StepRecorder,
        range: Range<usize>,
        scale: Option<f64>,
    ) -> Result<Recording<LC::Base, TrainItem<LC>>, Failure> {
        self.unchanged(range.len() as f64 / self.of.items as f64, || {
            let model = self.learner.model();
            let cut = || self.of.splitter.range(self.of.batch, range);
            recorded::<LC::Backend, _, _, _>(recorder, &model, cut, |micro| {
                let step = || train_step(self.learner, &model, micro);
                let TrainOutput { grads, item } = match scale {
                    Some(scale) => with_scale(scale, step).0,
                    None => step(),
                };
                label_gradients::<LC::Backend, _>(&model, &grads, Category::Gradient);
                item
            })
        })
    }

    /// The first part that weighs otherwise in what was recorded than its batch says.
    fn weighed_otherwise(
        &self,
        parts: &[Range<usize>],
        gifts: &[Gift],
        numbers: Option<&Numbers>,
    ) -> Result<Option<Proved>, Failure> {
        let ToSplit { items, weight, .. } = *self.of;
        let is_stated = weights::differ(weight, items as f64, items);
        if weight == 0.0 || !is_stated {
            return Ok(None);
        }
        let Some(stated) = self.weights(parts.iter().cloned()) else { return Ok(None) };
        for ((part, gift), stated) in parts.iter().zip(gifts).zip(stated) {
            let stated = stated / weight;
            let counted = match numbers.filter(|_| gift.is_given()) {
                Some(numbers) => {
                    let all = numbers.weight.map(|weight| weight.counted);
                    self.counted(part, gift)?.zip(all).map(|(part, all)| part / all)
                }
                None => Some(part.len() as f64 / items as f64),
            };
            // Several numbers are no weight.
            let counted = counted.filter(|share| (stated - share).abs() > WEIGHS_ALIKE);
            if let Some(counted) = counted {
                let items = part.clone();
                return Ok(Some(Proved::Weighs { items, stated, counted }));
            }
        }
        Ok(None)
    }
}

/// Records a step of `model` on what `cut` cuts off a batch, as proofs read it. It never runs.
pub(crate) fn recorded<B, M, I, T>(
    recorder: &StepRecorder,
    model: &M,
    cut: impl FnOnce() -> I,
    step: impl FnOnce(I) -> T,
) -> Result<Recording<B::Base, T>, Failure>
where
    B: LazyBackend,
    M: Module<B>,
{
    let recording = recorder.record::<B::Base, _>(|| {
        let micro = cut();
        mark::<B::Base>(CUT);
        label_parameters::<B, _>(model);
        step(micro)
    })?;
    Ok(recording)
}

impl Means {
    /// Counts what comparing these recordings takes.
    ///
    /// # Errors
    ///
    /// If it is more than the host may use.
    pub(crate) fn may_compare(&self, traces: &[&Trace], found: &Found) -> Result<(), Failure> {
        if self.memory.is_on_host() {
            let recorded: Bytes = traces.iter().map(|trace| host_bytes_of_rehearsal(trace)).sum();
            let needed = recorded * VALUES;
            if needed > self.budget {
                return Err(Failure::Impossible(format!("comparing recordings needs {needed}")));
            }
            found.needed.set(found.needed.get().max(needed));
        }
        Ok(())
    }
}

/// Compares the host data of a recording of `items` items with that of one of these `rows`.
pub(crate) fn hosts<'a, B: Backend, T>(
    [whole, part]: [&'a Recording<B, T>; 2],
    items: usize,
    rows: &'a Range<usize>,
) -> impl Fn(TensorIndex, TensorIndex) -> HostData + 'a {
    move |a, b| {
        let data = whole.value_of(a).zip(part.value_of(b));
        data.map_or(HostData::Other, |(a, b)| compared(&a, &b, items, rows))
    }
}

/// Compares the recording of a batch with that of a part of it: what the part is given, or why the
/// gradient of the batch is not known to be the sum over such parts. `normalizes`: whether items
/// may meet in running statistics.
pub(crate) fn compare(
    [whole, part]: [&firebox_proof::Recording<'_>; 2],
    host: &dyn Fn(TensorIndex, TensorIndex) -> HostData,
    (reduction, normalizes): (LossReduction, bool),
) -> Result<Result<Gift, Proved>, Failure> {
    let adds = match prove(whole, part, host) {
        Proof::Adds(adds) => adds,
        proof => return Ok(Err(judge(proof, normalizes))),
    };
    let differs = |coupling, parameter: Option<String>| {
        let parameter = parameter.unwrap_or_else(|| "all parameters".to_owned());
        Ok(Err(Proved::Differs { coupling, parameter, at: None }))
    };
    let given = match (reduction, &adds.mean, &adds.sum) {
        (LossReduction::Mean, Some(given), _) => given,
        (LossReduction::Mean, None, _) => return differs(Coupling::Sum, None),
        (LossReduction::Sum, _, None) => return differs(Coupling::Mean, None),
        (LossReduction::Sum, _, Some(_)) if adds.once.is_some() && adds.once_in.is_none() => {
            return differs(Coupling::Penalty, adds.once.clone());
        }
        (LossReduction::Sum, _, Some(given)) => given,
    };
    let gift = Gift::of((whole.trace, part.trace), given, (&adds, reduction));
    let defect = || Failure::Impossible("a number of the batch has no step".to_owned());
    Ok(Ok(gift.ok_or_else(defect)?))
}

/// What a proof says that finds no sum.
fn judge(proof: Proof, normalizes: bool) -> Proved {
    match proof {
        Proof::Adds(_) => unreachable!("it finds one"),
        Proof::Undecided(why) => Proved::Undecided(why),
        // Their users know, and have allowed it.
        Proof::Mixed(_) if normalizes => Proved::Undecided(OF_STATISTICS.to_owned()),
        Proof::Mixed(mixed) if mixed.certain => {
            let at = Some(mixed.to_string());
            let (coupling, parameter) = (Coupling::Items, mixed.parameter);
            Proved::Differs { coupling, parameter, at }
        }
        Proof::Mixed(mixed) => Proved::Meet(mixed.to_string()),
    }
}

pub(super) fn as_proof<B: Backend, T>(
    recording: &Recording<B, T>,
    items: usize,
) -> firebox_proof::Recording<'_> {
    let inputs = recording.inputs().into_iter().map(|input| (input.id, input.tensor));
    let (inputs, outputs) = (inputs.collect(), recording.held());
    firebox_proof::Recording { trace: recording.trace(), items, inputs, outputs }
}
