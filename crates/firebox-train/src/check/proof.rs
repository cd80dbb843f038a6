//! Proves from recordings of the step that a batch may be split, before anything of it runs.

use std::ops::Range;

use burn::tensor::TensorData;
use firebox_lazy::{Recording, StepRecorder, host_bytes_of_rehearsal, mark};
use firebox_proof::{CUT, HostData, Proof, prove};
use firebox_trace::{Category, TensorIndex};

use super::verdict::Coupling;
use super::{Check, Failure, OF_STATISTICS};
use crate::components::{LazyComponents, TrainBatch};
use crate::planner::labels::{label_gradients, label_parameters};
use crate::planner::rehearsal::train_step;
use crate::reduction::LossReduction;
use crate::splitter::Splitter;

/// What a proof says about a split.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Proved {
    /// The gradient of the batch is the sum over its parts.
    Exact,
    /// It is not.
    Differs {
        coupling: Coupling,
        /// The path of a parameter.
        parameter: String,
        /// Where items meet.
        at: Option<String>,
    },
    /// Items meet here, and may come apart again.
    Meet(String),
    /// Nothing, for this reason.
    Undecided(String),
}

/// How often what was recorded counts: a proof has values of its own for the tensors of both
/// recordings.
const VALUES: u64 = 2;

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Compares the recording of the batch with those of these parts.
    pub(crate) fn prove(&self, parts: &[Range<usize>]) -> Proved {
        let proofs = match self.proofs(parts) {
            Ok(proofs) => proofs,
            Err(Failure::Undefined(why) | Failure::Impossible(why)) => {
                return Proved::Undecided(why);
            }
        };
        let mut proved = Proved::Exact;
        for proof in proofs {
            match self.judge(proof) {
                Proved::Exact => {}
                differs @ Proved::Differs { .. } => return differs,
                undecided => proved = undecided,
            }
        }
        proved
    }

    fn proofs(&self, parts: &[Range<usize>]) -> Result<Vec<Proof>, Failure> {
        let items = self.of.items;
        let whole = self.recorded(0..items)?;
        let of_whole = as_proof(&whole, items);
        let mut proofs = Vec::new();
        for part in parts {
            let recorded = self.recorded(part.clone())?;
            let bytes = [&whole, &recorded].map(|it| host_bytes_of_rehearsal(it.trace()));
            if self.means.memory.is_on_host() {
                let needed = (bytes[0] + bytes[1]) * VALUES;
                if needed > self.means.budget {
                    return Err(Failure::Impossible(format!(
                        "comparing recordings needs {needed}"
                    )));
                }
                self.found.needed.set(self.found.needed.get().max(needed));
            }
            let host = |a: TensorIndex, b: TensorIndex| {
                let data = whole.value_of(a).zip(recorded.value_of(b));
                data.map_or(HostData::Other, |(a, b)| compared(&a, &b, items, part))
            };
            proofs.push(prove(&of_whole, &as_proof(&recorded, part.len()), &host));
        }
        Ok(proofs)
    }

    /// Records the step on these items. It never runs.
    fn recorded(&self, range: Range<usize>) -> Result<Recording<LC::Base, ()>, Failure> {
        let share = range.len() as f64 / self.of.items as f64;
        let recorder = StepRecorder::new().glance().keep_uploads();
        self.unchanged(share, || {
            let recording = recorder.record::<LC::Base, _>(|| {
                let micro = self.of.splitter.range(self.of.batch, range);
                mark::<LC::Base>(CUT);
                let model = self.learner.model();
                label_parameters::<LC::Backend, _>(&model);
                let grads = train_step(self.learner, &model, micro).grads;
                label_gradients::<LC::Backend, _>(&model, &grads, Category::Gradient);
            })?;
            Ok(recording)
        })
    }

    fn judge(&self, proof: Proof) -> Proved {
        let differs = |coupling, parameter: Option<String>| {
            let parameter = parameter.unwrap_or_else(|| "all parameters".to_owned());
            Proved::Differs { coupling, parameter, at: None }
        };
        let adds = match proof {
            Proof::Adds(adds) => adds,
            Proof::Undecided(why) => return Proved::Undecided(why),
            // Their users know, and have allowed it.
            Proof::Mixed(_) if self.means.normalizes => {
                return Proved::Undecided(OF_STATISTICS.to_owned());
            }
            Proof::Mixed(mixed) if mixed.certain => {
                let at = Some(mixed.to_string());
                let (coupling, parameter) = (Coupling::Items, mixed.parameter);
                return Proved::Differs { coupling, parameter, at };
            }
            Proof::Mixed(mixed) => return Proved::Meet(mixed.to_string()),
        };
        if !adds.given.is_empty() {
            let why = "parts would have to be given numbers of the whole batch";
            return Proved::Undecided(why.to_owned());
        }
        let fits = match self.of.reduction {
            LossReduction::Mean => adds.is_mean,
            LossReduction::Sum => adds.is_sum,
        };
        match (self.of.reduction, fits, adds.once) {
            (LossReduction::Mean, true, _) => match self.weighs_by_items() {
                true => Proved::Exact,
                false => {
                    Proved::Undecided("the batch weighs otherwise than by its items".to_owned())
                }
            },
            (LossReduction::Mean, false, _) => differs(Coupling::Sum, None),
            (LossReduction::Sum, false, _) => differs(Coupling::Mean, None),
            (LossReduction::Sum, true, None) => Proved::Exact,
            (LossReduction::Sum, true, once) => differs(Coupling::Penalty, once),
        }
    }

    /// Whether the batch and some items of it weigh as much as they are.
    fn weighs_by_items(&self) -> bool {
        let few = self.of.items.min(8);
        self.of.weight == self.of.items as f64
            && self.weights(few).is_some_and(|weights| weights.iter().all(|weight| *weight == 1.0))
    }
}

fn as_proof<B: burn::tensor::backend::Backend, T>(
    recording: &Recording<B, T>,
    items: usize,
) -> firebox_proof::Recording<'_> {
    let inputs = recording.inputs().into_iter().map(|input| (input.id, input.tensor));
    firebox_proof::Recording { trace: recording.trace(), items, inputs: inputs.collect() }
}

/// What host data of a part is to that of all `items` items. Items come first.
fn compared(whole: &TensorData, part: &TensorData, items: usize, of: &Range<usize>) -> HostData {
    if whole.shape == part.shape {
        return if whole == part { HostData::Same } else { HostData::Other };
    }
    let each = whole.bytes.len() / items;
    let rows = whole.bytes.get(of.start * each..of.end * each);
    match whole.bytes.len() == each * items && rows == Some(&part.bytes[..]) {
        true => HostData::Rows,
        false => HostData::Other,
    }
}
