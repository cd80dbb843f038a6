//! Gives parts of a batch the numbers of the whole that their gradients depend on, as a proof has
//! named them: what a loss is divided by, such as the sum of class weights or the count of real
//! tokens.
//!
//! The step on the whole batch is recorded and never runs. What leads to the numbers is computed on
//! the host, from the values of the batch. They take the place of what a part would compute.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::tensor::TensorData;
use firebox_dry::{Leading, compute_values};
use firebox_lazy::{Recording, StepRecorder, host_bytes_of_rehearsal};
use firebox_proof::{CUT, Given};
use firebox_trace::{Bytes, Mark, Step, TensorIndex, Trace};
use rustc_hash::{FxHashMap, FxHasher};

use super::host::MOST;
use super::{Check, Failure, Rows};
use crate::components::{LazyComponents, TrainBatch, TrainItem};
use crate::splitter::Splitter;

/// How long the host may compute the numbers of one batch.
const TIME: Duration = Duration::from_secs(20);

/// Where a recording makes a tensor: behind how many steps that compute, and which of the results
/// of a step it is.
type Place = (usize, usize);

/// The first steps of a recording that compute, by their names, their results, and what they work
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Beginning {
    steps: usize,
    hash: u64,
}

/// What a part is given of its batch. Holds for all recordings that begin alike.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gift {
    whole: Beginning,
    part: Beginning,
    /// Where the whole has a number, and where the part.
    given: Vec<(Place, Place, Given)>,
}

/// The numbers of a batch.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// How recordings of it begin, as far as gifts know.
    begins: Vec<Beginning>,
    values: BTreeMap<Place, TensorData>,
}

/// The steps of a recording behind the cut of its batch that compute.
struct Computing<'a> {
    trace: &'a Trace,
    steps: Vec<&'a Step>,
}

impl<'a> Computing<'a> {
    fn of(trace: &'a Trace) -> Self {
        let is_cut = |step: &Step| step.is_mark(&Mark::from(CUT));
        let first = trace.steps.iter().position(is_cut).map_or(0, |at| at + 1);
        let computes = |step: &&Step| matches!(step, Step::Call(_) | Step::Upload { .. });
        Self { trace, steps: trace.steps[first..].iter().filter(computes).collect() }
    }

    fn place(&self, tensor: TensorIndex) -> Option<Place> {
        let made = |step: &&Step| step.outputs().iter().position(|made| *made == tensor);
        self.steps.iter().enumerate().find_map(|(at, step)| Some((at, made(step)?)))
    }

    fn tensor(&self, (step, output): Place) -> Option<TensorIndex> {
        self.steps.get(step)?.outputs().get(output).copied()
    }

    fn beginning(&self, steps: usize) -> Option<Beginning> {
        let mut hasher = FxHasher::default();
        let mut numbers = FxHashMap::<TensorIndex, usize>::default();
        for step in self.steps.get(..steps)? {
            step.name().hash(&mut hasher);
            for input in step.inputs() {
                let next = numbers.len();
                numbers.entry(input.tensor).or_insert(next).hash(&mut hasher);
            }
            for made in step.outputs() {
                numbers.insert(*made, numbers.len());
                let tensor = self.trace.tensor(*made);
                (&tensor.shape, tensor.dtype).hash(&mut hasher);
            }
        }
        Some(Beginning { steps, hash: hasher.finish() })
    }
}

impl Gift {
    /// What the proof about these two recordings has named.
    pub(super) fn of(whole: &Trace, part: &Trace, given: &[Given]) -> Option<Self> {
        let (whole, part) = (Computing::of(whole), Computing::of(part));
        let places = given
            .iter()
            .map(|given| Some((whole.place(given.whole)?, part.place(given.part)?, *given)));
        let places: Vec<(Place, Place, Given)> = places.collect::<Option<_>>()?;
        let last =
            |steps: Option<usize>, of: &Computing<'_>| steps.map_or(of.steps.len(), |at| at + 1);
        let of_whole = last(places.iter().map(|(whole, ..)| whole.0).max(), &whole);
        let of_part = last(places.iter().map(|(_, part, _)| part.0).max(), &part);
        let (whole, part) = (whole.beginning(of_whole)?, part.beginning(of_part)?);
        Some(Self { whole, part, given: places })
    }

    /// Whether there is something to give.
    pub(crate) fn is_any(&self) -> bool {
        !self.given.is_empty()
    }
}

impl Numbers {
    /// What the part `range` of `items` items, recorded as `trace`, is given. `None` if no gift
    /// fits.
    pub(crate) fn to_part(
        &self,
        gifts: &[Gift],
        trace: &Trace,
        (range, items): (&Range<usize>, usize),
    ) -> Option<Vec<(TensorIndex, TensorData)>> {
        let part = Computing::of(trace);
        let fits = |gift: &&Gift| {
            self.begins.contains(&gift.whole)
                && part.beginning(gift.part.steps) == Some(gift.part)
                && gift.given.iter().all(|(whole, ..)| self.values.contains_key(whole))
        };
        let gift = gifts.iter().find(fits)?;
        let given = gift.given.iter().map(|(of_whole, of_part, given)| {
            let data = given.to_part(&self.values[of_whole], range, items)?;
            Some((part.tensor(*of_part)?, data))
        });
        given.collect()
    }
}

/// Records steps whose batches have values.
fn with_values() -> StepRecorder {
    StepRecorder::new().glance().with_values().keep_uploads()
}

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Computes the numbers of the items `whole` that `gifts` name, in a step that sees `share` of
    /// its batch if its loss is scaled by that.
    pub(crate) fn numbers(
        &self,
        whole: Range<usize>,
        gifts: &[Gift],
        share: f64,
    ) -> Result<Numbers, Failure> {
        self.numbers_of_rows(whole, gifts, share, None)
    }

    /// The same where these rows of the batch stand in for the items.
    fn numbers_of_rows(
        &self,
        whole: Range<usize>,
        gifts: &[Gift],
        share: f64,
        rows: Option<&Rows<'_>>,
    ) -> Result<Numbers, Failure> {
        let recorder = match rows {
            Some(rows) if self.host.is_none() => with_values().with_rows(rows.selected()),
            _ => with_values(),
        };
        let recording = self.recorded_by(&recorder, whole, share)?;
        let computing = Computing::of(recording.trace());
        let is_so = |begins: &Beginning| computing.beginning(begins.steps) == Some(*begins);
        let mut begins: Vec<Beginning> = gifts.iter().map(|gift| gift.whole).collect();
        begins.dedup();
        begins.retain(is_so);
        let fitting = gifts.iter().filter(|gift| begins.contains(&gift.whole));
        let mut places: Vec<Place> =
            fitting.flat_map(|gift| gift.given.iter().map(|(whole, ..)| *whole)).collect();
        places.sort_unstable();
        places.dedup();
        let wanted: Option<Vec<TensorIndex>> =
            places.iter().map(|place| computing.tensor(*place)).collect();
        let wanted = wanted.unwrap_or_default();
        let values = self.computed(&recording, &wanted, rows)?;
        Ok(Numbers { begins, values: places.into_iter().zip(values).collect() })
    }

    /// What share of the batch the items `part` have by the number that scales their only sum.
    pub(super) fn scaled(
        &self,
        part: &Range<usize>,
        gift: &Gift,
        numbers: &Numbers,
    ) -> Result<Option<f64>, Failure> {
        let scales = gift.given.iter().filter(|(of_whole, _, given)| {
            given.share != 0 && numbers.values[of_whole].num_elements() == 1
        });
        let scales: Vec<_> = scales.collect();
        let [(of_whole, of_part, given)] = scales[..] else { return Ok(None) };
        let recording = self.recorded_by(&with_values(), part.clone(), 1.0)?;
        let tensor = Computing::of(recording.trace()).tensor(*of_part);
        let own = self.computed(&recording, &tensor.into_iter().collect::<Vec<_>>(), None)?;
        let number = |data: &TensorData| data.iter::<f64>().next();
        let numbers = own.first().and_then(number).zip(number(&numbers.values[of_whole]));
        Ok(numbers.map(|(part, whole)| (part / whole).powi(given.share)))
    }

    /// Computes tensors of a recording on the host.
    pub(super) fn computed(
        &self,
        recording: &Recording<LC::Base, TrainItem<LC>>,
        wanted: &[TensorIndex],
        rows: Option<&Rows<'_>>,
    ) -> Result<Vec<TensorData>, Failure> {
        let trace = recording.trace();
        let needed = Leading::to(trace, wanted, &[]).bytes(trace);
        let is_here = self.means.memory.is_on_host();
        let to_record = if is_here { host_bytes_of_rehearsal(trace) } else { Bytes::ZERO };
        let most = if is_here { self.means.budget } else { MOST };
        if needed + to_record > most {
            let needed = needed + to_record;
            return Err(Failure::Impossible(format!(
                "the numbers of the whole batch need {needed} of the host's memory, and {most} are allowed"
            )));
        }
        if is_here {
            self.found.needed.set(self.found.needed.get().max(needed + to_record));
        }
        let mut value = self.values_for(recording, rows);
        let deadline = Instant::now() + TIME;
        compute_values(trace, wanted, &[], &mut value, deadline)
            .map_err(|error| Failure::Impossible(error.to_string()))
    }

    /// What the chosen items in `range` are given of all chosen items. `None`: nothing.
    pub(super) fn share_of(
        &self,
        range: &Range<usize>,
        rows: &Rows<'_>,
    ) -> Result<Option<Share>, Failure> {
        let whole = rows.first()..rows.first() + rows.chosen.len();
        if !self.gives || *range == whole {
            return Ok(None);
        }
        let gifts = [self.gift(&whole, range)?];
        let share = range.len() as f64 / whole.len() as f64;
        let numbers = self.numbers_of_rows(whole.clone(), &gifts, share, Some(rows))?;
        let range = range.start - whole.start..range.end - whole.start;
        Ok(Some(Share { gifts, numbers, range, items: whole.len() }))
    }
}

/// What a part of some items is given of them.
pub(super) struct Share {
    gifts: [Gift; 1],
    numbers: Numbers,
    range: Range<usize>,
    items: usize,
}

impl Share {
    /// What takes the place of tensors of the part, recorded as `trace`.
    pub(super) fn given(&self, trace: &Trace) -> Result<Vec<(TensorIndex, TensorData)>, Failure> {
        let given = self.numbers.to_part(&self.gifts, trace, (&self.range, self.items));
        given.ok_or_else(|| Failure::Impossible("some items run another program".to_owned()))
    }
}
