//! A saved trace: recorded from a few splits, it makes the trace of any.

use std::collections::BTreeMap;

use burn_std::DType;
use firebox_plan::Split;
use firebox_trace::{Bytes, TensorType, Trace};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::error::{InstantiateError, Irregular, SaveError};
use crate::form::{Form, samples, verified};
use crate::rule::{Sizes, rank};
use crate::skeleton::{Shared, Skeleton};

/// What a saved trace is of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// The model, in a few words.
    pub model: String,
    /// The backend that recorded it.
    pub backend: String,
    /// The integer type of that backend.
    pub int: DType,
    /// Items of the batch that was recorded.
    pub items: usize,
    /// The bytes of the model's parameters and running statistics.
    pub parameters: Bytes,
    /// The version of firebox that recorded it.
    pub firebox: String,
    /// What the recorded operations show of whether its batches may be split, and where items meet
    /// if not. `None` if they were not looked at.
    pub splits: Option<String>,
}

impl About {
    /// The name of a model's type, without where it is declared and without its backend.
    pub fn name_of<M>() -> String {
        let name = std::any::type_name::<M>();
        let name = name.split('<').next().unwrap_or(name);
        name.rsplit("::").next().unwrap_or(name).to_owned()
    }
}

/// Two training iterations of a model, for every batch size and every split into micro-batches.
///
/// Numbers that differ between splits, such as dimensions, follow rules that were found by
/// comparing recordings of small batches: a size of the split times a whole number, the sum of two
/// such terms, and a constant. One recording more than needed verifies them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedTrace {
    pub(crate) about: About,
    pub(crate) shared: Shared,
    pub(crate) forms: BTreeMap<Form, Recorded>,
}

/// What was recorded of one form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Recorded {
    pub(crate) skeleton: Skeleton,
    /// The sizes of the recordings. What they do not span is unknown.
    pub(crate) sizes: Vec<Sizes>,
    /// The paths of running statistics.
    pub(crate) replaced: Vec<String>,
}

impl Recorded {
    /// Whether it makes a trace for sizes that were recorded. What it cannot make then are numbers
    /// beyond those of any trace.
    fn is_sound(&self, shared: &Shared) -> bool {
        self.sizes.first().is_some_and(|sizes| self.skeleton.trace(sizes, shared).is_ok())
    }
}

/// One recording.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The trace of two iterations.
    pub trace: Trace,
    /// The paths of the model's running statistics.
    pub replaced: Vec<String>,
}

/// How far recording is: the number of the recording, counted from one, and of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingProgress {
    /// The number of this recording, from one.
    pub number: usize,
    /// The number of all recordings.
    pub of: usize,
}

impl SavedTrace {
    /// Records what is needed to know all splits. `record` records two iterations on a batch of
    /// [`Split::batch`] items that is cut as the split says. It is called for about a hundred small
    /// splits, and not for batches of more than `about.items` items.
    ///
    /// # Errors
    ///
    /// If a recording fails, or the step is another program for other sizes.
    pub fn record<E>(
        about: About,
        mut record: impl FnMut(Split, RecordingProgress) -> Result<Sample, E>,
    ) -> Result<Self, SaveError<E>> {
        let samples = samples(about.items);
        if samples.is_empty() {
            return Err(SaveError::EmptyBatch);
        }
        let large = verified(about.items);
        let of = samples.iter().map(Vec::len).sum::<usize>() + large.len();
        let mut number = 0;
        let (mut shared, mut forms) = (Shared::default(), BTreeMap::new());
        for splits in samples {
            let (mut traces, mut replaced) = (Vec::new(), Vec::new());
            for split in &splits {
                number += 1;
                let sample = record(*split, RecordingProgress { number, of });
                let sample =
                    sample.map_err(|cause| SaveError::Recording { split: *split, cause })?;
                traces.push(sample.trace);
                replaced = sample.replaced;
            }
            let sizes: Vec<Sizes> = splits.iter().filter_map(Sizes::of).collect();
            let skeleton = Skeleton::of(&traces, &sizes, &mut shared).map_err(|difference| {
                let largest = *splits.last().expect("a form has a split");
                let (what, why) = (difference.what, difference.why);
                SaveError::Irregular { what, splits: Box::new([splits[0], largest]), why }
            })?;
            forms.insert(Form::of(&splits[0]), Recorded { skeleton, sizes, replaced });
        }
        let saved = Self { about, shared, forms };
        for split in large {
            number += 1;
            let sample = record(split, RecordingProgress { number, of });
            let sample = sample.map_err(|cause| SaveError::Recording { split, cause })?;
            saved.verify(split, &sample)?;
        }
        Ok(saved)
    }

    /// Compares what the rules give for a split with a recording of it.
    fn verify<E>(&self, split: Split, recorded: &Sample) -> Result<(), SaveError<E>> {
        // A small batch does not tell about all of its own splits.
        let Ok(given) = self.sample(split) else { return Ok(()) };
        match calls(&given.trace) == calls(&recorded.trace) {
            true => Ok(()),
            false => Err(SaveError::Irregular {
                what: "the step".to_owned(),
                splits: Box::new([Split::whole(1), split]),
                why: Irregular::Structure,
            }),
        }
    }

    /// Whether the sizes of its recordings are those of batches.
    pub(crate) fn has_sound_sizes(&self) -> bool {
        self.forms.values().flat_map(|recorded| &recorded.sizes).all(Sizes::is_sound)
    }

    /// What it is of.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Two iterations on a batch that is cut as `split` says.
    ///
    /// # Errors
    ///
    /// If the recorded batch was too small to tell, or no memory holds such a batch.
    pub fn sample(&self, split: Split) -> Result<Sample, InstantiateError> {
        let sizes = Sizes::of(&split).ok_or(InstantiateError::TooLarge(split))?;
        let unknown = || InstantiateError::NotRecorded { split, items: self.about.items };
        let recorded = self.forms.get(&Form::of(&split)).ok_or_else(unknown)?;
        let with_it = [&recorded.sizes[..], &[sizes]].concat();
        if rank(&with_it) > rank(&recorded.sizes) {
            return Err(unknown());
        }
        let made = recorded.skeleton.trace(&sizes, &self.shared);
        let trace = made.map_err(|error| match recorded.is_sound(&self.shared) {
            true => InstantiateError::TooLarge(split),
            false => error,
        })?;
        Ok(Sample { trace, replaced: recorded.replaced.clone() })
    }
}

/// How often a method is called on tensors of the same types. The order of calls does not count:
/// automatic differentiation runs a part of the backward pass earlier for a batch that was cut than
/// for one that was not.
fn calls(trace: &Trace) -> FxHashMap<(&str, Vec<&TensorType>), usize> {
    let mut calls = FxHashMap::default();
    for (_, call) in trace.calls() {
        let inputs = call.inputs.iter().map(|input| input.tensor);
        let tensors = inputs.chain(call.outputs.iter().copied());
        let types = tensors.map(|tensor| &*trace.tensor(tensor).ty).collect();
        *calls.entry((&*call.name, types)).or_default() += 1;
    }
    calls
}

#[cfg(test)]
pub(crate) mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use burn_ir::{FloatOperationIr, OperationIr, TensorId, TensorIr, TensorStatus, UnaryOpIr};
    use burn_std::Shape;
    use firebox_plan::Run;
    use firebox_trace::{
        Call, Description, DescriptionIndex, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo,
        Use,
    };

    use super::*;

    /// The exponentials of every micro-batch, `width` numbers an item.
    pub(crate) fn exponentials(split: Split, width: impl Fn(usize) -> usize) -> Trace {
        let mut trace = Trace::default();
        for range in split.ranges() {
            let shape = [range.len(), width(range.len())];
            let ty = Arc::new(TensorType { shape: Shape::new(shape), dtype: DType::F32 });
            let [input, out] = [0, 1].map(|id| TensorIr {
                id: TensorId::new(id),
                shape: Shape::new(shape),
                status: TensorStatus::ReadOnly,
                dtype: DType::F32,
            });
            let exp = FloatOperationIr::Exp(UnaryOpIr { input, out });
            trace.descriptions.push(Arc::new(Description {
                operations: vec![OperationIr::Float(DType::F32, exp)],
                outputs: vec![1],
                workspace: None,
            }));
            let [input, output] = [0, 1].map(|at| TensorIndex(trace.tensors.len() as u32 + at));
            let at = OpIndex(trace.steps.len() as u32);
            trace.tensors.push(TensorInfo::new(ty.clone(), Origin::Existing));
            trace.tensors.push(TensorInfo::new(ty, Origin::Made(at)));
            trace.steps.push(Step::Call(Box::new(Call {
                name: "float_exp".into(),
                inputs: [Use { tensor: input, last: true }].into_iter().collect(),
                outputs: [output].into_iter().collect(),
                description: DescriptionIndex(trace.descriptions.len() as u32 - 1),
            })));
            trace.steps.push(Step::Free(output));
        }
        trace.steps.push(Step::Mark(Mark::IterationEnd));
        trace
    }

    /// Saved from batches of up to `items` items. Splits are recorded as they are, not shortened,
    /// so only those with up to three micro-batches of a size are known.
    pub(crate) fn saved(
        items: usize,
        width: impl Fn(usize) -> usize + Copy,
    ) -> Result<SavedTrace, SaveError<Infallible>> {
        let about = About {
            model: "Exponentials".into(),
            backend: "none".into(),
            int: DType::I64,
            items,
            parameters: Bytes::ZERO,
            firebox: "0.1.0".into(),
            splits: None,
        };
        // From the third on, micro-batches of one size repeat the last.
        let short = |run: Run| Run { count: run.count.min(3), ..run };
        SavedTrace::record(about, |split, _| {
            let split = Split::new(short(split.first()), split.rest().map(short));
            Ok(Sample { trace: exponentials(split, width), replaced: Vec::new() })
        })
    }

    #[test]
    fn sizes_that_were_not_recorded_are_known() {
        let saved = saved(24, |_| 3).expect("it follows rules");
        let run = |count, size| Run { count, size };
        for (first, rest) in [
            (run(1, 1000), None),
            (run(2, 77), None),
            (run(3, 50), Some(run(1, 49))),
            (run(1, 90), Some(run(3, 1))),
        ] {
            let split = Split::new(first, rest);
            let sample = saved.sample(split).expect("it was recorded");
            let expected = exponentials(split, |_| 3);
            assert_eq!(sample.trace.structural_hash(), expected.structural_hash(), "{split}");
            assert_eq!(sample.trace.tensors, expected.tensors, "{split}");
        }
    }

    /// Sizes up to seven are all padded to eight.
    #[test]
    fn a_size_that_is_padded_is_found_out() {
        let error = saved(24, |items| items.next_multiple_of(8)).expect_err("it follows no rule");
        assert!(matches!(error, SaveError::Irregular { .. }), "{error}");
        let error = saved(64, |items| items.min(8)).expect_err("it follows no rule");
        assert!(matches!(error, SaveError::Irregular { .. }), "{error}");
    }

    #[test]
    fn what_cannot_be_verified_is_not_told() {
        // Two sizes of the whole batch fit any rule.
        let saved = saved(3, |items| items * items).expect("nothing contradicts it");
        assert!(matches!(
            saved.sample(Split::whole(1000)),
            Err(InstantiateError::NotRecorded { items: 3, .. })
        ));
    }

    #[test]
    fn a_square_of_a_size_is_named() {
        let error = saved(24, |items| items * items).expect_err("it follows no rule");
        assert!(error.to_string().contains("the shape of an input differs"), "{error}");
    }

    #[test]
    fn batches_beyond_all_memory_are_errors() {
        let saved = saved(24, |_| 3).expect("it follows rules");
        for items in [1 << 47, usize::MAX] {
            let error = saved.sample(Split::whole(items)).expect_err("it is too large");
            assert!(matches!(error, InstantiateError::TooLarge(_)), "{error}");
        }
    }
}
