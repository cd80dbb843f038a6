//! A saved trace: recorded from a few splits, it makes the trace of any.

use std::collections::BTreeMap;

use burn_std::DType;
use firebox_plan::Split;
use firebox_trace::{Bytes, Trace};
use serde::{Deserialize, Serialize};

use crate::error::{InstantiateError, SaveError};
use crate::form::{Form, samples};
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
}

/// Two training iterations of a model, for every batch size and every split into micro-batches.
///
/// Numbers that differ between splits, such as dimensions, follow rules that were found by comparing
/// recordings of small batches: a size of the split times a whole number, the sum of two such terms,
/// and a constant. One recording more than needed verifies them.
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
        let of = samples.iter().map(Vec::len).sum();
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
        Ok(Self { about, shared, forms })
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
        let trace = recorded.skeleton.trace(&sizes, &self.shared)?;
        Ok(Sample { trace, replaced: recorded.replaced.clone() })
    }
}
