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
use burn::tensor::backend::Backend;
use firebox_dry::{Leading, compute_values};
use firebox_lazy::{Recording, StepRecorder, host_bytes_of_rehearsal};
use firebox_proof::{Adds, CUT, Given, HostData};
use firebox_trace::{Bytes, Mark, Step, TensorIndex, TensorInfo, TensorType, Trace};
use rustc_hash::{FxHashMap, FxHasher};

use super::{Check, Failure, Found, MOST, Means, Rows};
use crate::components::{LazyComponents, TrainBatch, TrainItem};
use crate::error::TrainError;
use crate::reduction::LossReduction;
use crate::splitter::Splitter;

/// How long the host may compute the numbers of a batch, for them to be given.
pub(crate) const SOON: Duration = Duration::from_secs(1);
/// How long it may compute those of a later batch. It may have other work.
pub(crate) const LATER: Duration = Duration::from_secs(20);

/// Where a recording makes a tensor: behind how many steps that compute, and which of the results
/// of a step it is.
type Place = (usize, usize);

/// The steps of a recording that compute, by their names, their results, and what they work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Program(u64);

/// What a part is given of its batch. Holds for recordings of these programs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gift {
    whole: Program,
    part: Program,
    /// Where the whole has a number, and where the part.
    given: Vec<(Place, Place, Given)>,
    /// What is zero in all parts but the first.
    once: Vec<Place>,
    /// The same of host data, and what that of the part is to that of the whole.
    hosts: Vec<(Place, Place, HostData)>,
    counts: Option<Counts>,
}

/// By what a gradient is divided.
#[derive(Clone, Debug, PartialEq)]
struct Counts {
    /// A sum, in the whole and in the part.
    sum: [Place; 2],
    /// The steps of the whole up to it, for any number of items.
    leading: Program,
    /// Numbers of the whole, and the powers of the sum that they are proportional to.
    scales: Vec<(Place, i32)>,
    /// Whether something that occurs once stands beside what is divided.
    has_once: bool,
}

/// The numbers of a batch.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// The program of the batch. `None` if nothing of it is needed.
    program: Option<Program>,
    values: BTreeMap<Place, TensorData>,
    /// Data of the host.
    hosts: BTreeMap<Place, TensorData>,
    /// What the batch weighs beside others, if that was asked and is one number.
    pub(crate) weight: Option<Weight>,
}

/// The values of tensors that were made from data of the host.
pub(crate) type Data<'a> = &'a dyn Fn(TensorIndex) -> Option<TensorData>;

/// The steps of a recording behind the cut of its batch that compute.
struct Computing<'a> {
    trace: &'a Trace,
    steps: Vec<&'a Step>,
    /// How often values are read.
    reads: usize,
}

impl<'a> Computing<'a> {
    fn of(trace: &'a Trace) -> Self {
        let is_cut = |step: &Step| step.is_mark(&Mark::from(CUT));
        let first = trace.steps.iter().position(is_cut).map_or(0, |at| at + 1);
        let computes = |step: &&Step| matches!(step, Step::Call(_) | Step::Upload { .. });
        let reads = trace.steps.iter().filter(|step| matches!(step, Step::Read(_))).count();
        Self { trace, steps: trace.steps[first..].iter().filter(computes).collect(), reads }
    }

    fn place(&self, tensor: TensorIndex) -> Option<Place> {
        let made = |step: &&Step| step.outputs().iter().position(|made| *made == tensor);
        self.steps.iter().enumerate().find_map(|(at, step)| Some((at, made(step)?)))
    }

    fn tensor(&self, (step, output): Place) -> Option<TensorIndex> {
        self.steps.get(step)?.outputs().get(output).copied()
    }

    fn program(&self) -> Program {
        self.hash(self.steps.len(), true)
    }

    /// The steps up to one that makes this tensor, without their shapes.
    fn leading(&self, (last, _): Place) -> Program {
        self.hash(self.steps.len().min(last + 1), false)
    }

    fn hash(&self, steps: usize, has_shapes: bool) -> Program {
        let mut hasher = FxHasher::default();
        let mut numbers = FxHashMap::<TensorIndex, usize>::default();
        for step in &self.steps[..steps] {
            step.name().hash(&mut hasher);
            for input in step.inputs() {
                let next = numbers.len();
                numbers.entry(input.tensor).or_insert(next).hash(&mut hasher);
            }
            for made in step.outputs() {
                numbers.insert(*made, numbers.len());
                let tensor = self.trace.tensor(*made);
                has_shapes.then_some(&tensor.shape).hash(&mut hasher);
                tensor.dtype.hash(&mut hasher);
            }
        }
        self.reads.hash(&mut hasher);
        Program(hasher.finish())
    }
}

impl Gift {
    /// What the proof about these two recordings has named.
    pub(super) fn of(
        (whole, part): (&Trace, &Trace),
        given: &[Given],
        (adds, reduction): (&Adds, LossReduction),
    ) -> Option<Self> {
        let Adds { hosts, counts, once_in, .. } = adds;
        let (whole, part) = (Computing::of(whole), Computing::of(part));
        let places = given
            .iter()
            .map(|given| Some((whole.place(given.whole)?, part.place(given.part)?, *given)));
        let places: Vec<(Place, Place, Given)> = places.collect::<Option<_>>()?;
        let hosts = hosts.iter().map(|(a, b, is)| Some((whole.place(*a)?, part.place(*b)?, *is)));
        let hosts: Vec<(Place, Place, HostData)> = hosts.collect::<Option<_>>()?;
        let once = once_in.iter().flatten().filter(|_| reduction == LossReduction::Sum);
        let once = once.map(|[_, of_part]| part.place(*of_part)).collect::<Option<_>>()?;
        let counts = counts.as_ref().and_then(|counts| {
            let scales = counts.scales.iter().map(|(scale, by)| Some((whole.place(*scale)?, *by)));
            let sum = [whole.place(counts.sum[0])?, part.place(counts.sum[1])?];
            let leading = whole.leading(sum[0]);
            let has_once = adds.once.is_some();
            Some(Counts { sum, leading, scales: scales.collect::<Option<_>>()?, has_once })
        });
        let (whole, part) = (whole.program(), part.program());
        Some(Self { whole, part, given: places, once, hosts, counts })
    }

    /// What the recording of the whole has to compute.
    pub(crate) fn wanted(&self, whole: &Trace) -> Vec<TensorIndex> {
        let whole = Computing::of(whole);
        self.given.iter().filter_map(|(place, ..)| whole.tensor(*place)).collect()
    }

    /// Whether one of these is for parts of this program.
    pub(super) fn any_for(gifts: &[Self], part: &Trace) -> bool {
        let program = Computing::of(part).program();
        gifts.iter().any(|gift| gift.part == program)
    }

    /// Whether it is of this batch.
    pub(crate) fn is_of(&self, numbers: &Numbers) -> bool {
        self.fits(numbers.program)
    }

    fn fits(&self, whole: Option<Program>) -> bool {
        whole.map_or(!self.needs_whole(), |whole| self.whole == whole)
    }

    /// Whether parts are given something of the whole, or their host data is compared with its.
    pub(crate) fn needs_whole(&self) -> bool {
        !(self.given.is_empty() && self.hosts.is_empty())
    }

    /// Whether the whole divides by a single number.
    pub(crate) fn has_weight(&self) -> bool {
        self.counts.is_some()
    }

    /// Whether there is something to give.
    pub(crate) fn is_given(&self) -> bool {
        !(self.given.is_empty() && self.once.is_empty())
    }

    /// Whether there is something to give, or to compare.
    pub(crate) fn is_any(&self) -> bool {
        self.is_given() || !self.hosts.is_empty()
    }
}

impl Numbers {
    /// Those that `gifts` name of a batch with this recording, and its weight if `weighs` is set.
    /// `compute` computes tensors of it, given the values of some.
    pub(crate) fn of<B: Backend, T>(
        recording: &Recording<B, T>,
        (gifts, weighs): (&[Gift], bool),
        mut compute: impl FnMut(&[TensorIndex], Known) -> Result<Vec<TensorData>, Failure>,
    ) -> Result<Self, Failure> {
        let computing = Computing::of(recording.trace());
        let program = computing.program();
        let gifts = || gifts.iter().filter(|gift| gift.whole == program);
        let mut places: Vec<Place> =
            gifts().flat_map(|gift| gift.given.iter().map(|(whole, ..)| *whole)).collect();
        places.sort_unstable();
        places.dedup();
        let wanted: Option<Vec<TensorIndex>> =
            places.iter().map(|place| computing.tensor(*place)).collect();
        let values = compute(&wanted.unwrap_or_default(), None)?;
        let values: BTreeMap<Place, TensorData> = places.into_iter().zip(values).collect();
        let counts = gifts().next().and_then(|gift| gift.counts.as_ref()).filter(|_| weighs);
        let weight = match counts {
            Some(counts) => weight(&values, &computing, counts, &mut compute)?,
            None => None,
        };
        let hosts = gifts().flat_map(|gift| &gift.hosts).filter_map(|(place, ..)| {
            Some((*place, recording.value_of(computing.tensor(*place)?)?))
        });
        let hosts = hosts.collect();
        Ok(Self { program: Some(program), values, hosts, weight })
    }

    /// Those of a batch of which parts need nothing.
    pub(crate) fn none() -> Self {
        Self { program: None, values: BTreeMap::new(), hosts: BTreeMap::new(), weight: None }
    }

    /// The host memory that they take, next to what a part is given of them.
    pub(crate) fn bytes(&self) -> Bytes {
        let values = self.values.values().chain(self.hosts.values());
        Bytes::new(2 * values.map(|data| data.bytes.len() as u64).sum::<u64>())
    }

    /// Whether parts are given some.
    pub(crate) fn has_any(&self) -> bool {
        !self.values.is_empty()
    }

    /// What the part `range` of `items` items is given, recorded as `trace` with this `data` of the
    /// host.
    ///
    /// # Errors
    ///
    /// [`TrainError::NoNumbers`] if no gift fits.
    pub(crate) fn give(
        &self,
        gifts: &[Gift],
        part: (&Trace, Data<'_>),
        (range, items): (&Range<usize>, usize),
    ) -> Result<Vec<(TensorIndex, TensorData)>, TrainError> {
        let given = self.to_part(gifts, part, (range, items));
        given.ok_or_else(|| TrainError::NoNumbers { why: missing(range) })
    }

    /// The same. `None` if no gift fits.
    fn to_part(
        &self,
        gifts: &[Gift],
        (trace, data): (&Trace, Data<'_>),
        (range, items): (&Range<usize>, usize),
    ) -> Option<Vec<(TensorIndex, TensorData)>> {
        let part = Computing::of(trace);
        let is_so = |(of_whole, of_part, is): &(Place, Place, HostData)| {
            let own = part.tensor(*of_part).and_then(data);
            let of_both = self.hosts.get(of_whole).zip(own);
            of_both.is_some_and(|(whole, own)| compared(whole, &own, items, range) == *is)
        };
        let program = part.program();
        let fits = |gift: &&Gift| {
            gift.part == program
                && gift.fits(self.program)
                && gift.given.iter().all(|(whole, ..)| self.values.contains_key(whole))
                && gift.hosts.iter().all(is_so)
        };
        let gift = gifts.iter().find(fits)?;
        let given = gift.given.iter().map(|(of_whole, of_part, given)| {
            let data = given.to_part(&self.values[of_whole], range, items)?;
            Some((part.tensor(*of_part)?, data))
        });
        let once = gift.once.iter().filter(|_| range.start > 0).map(|of_part| {
            let tensor = part.tensor(*of_part)?;
            let TensorInfo { ty, .. } = trace.tensor(tensor);
            Some((tensor, zeros(ty)))
        });
        given.chain(once).collect()
    }
}

/// What is wrong with a part for which there is no gift.
pub(super) fn missing(part: &Range<usize>) -> String {
    format!("a part of {} items is another program than is proved", part.len())
}

impl Means {
    /// Computes tensors of a trace on the host, given those that it begins with.
    pub(crate) fn computed(
        &self,
        trace: &Trace,
        (wanted, known): (&[TensorIndex], Known),
        value: &mut dyn FnMut(TensorIndex) -> Option<TensorData>,
        found: &Found,
        time: Duration,
    ) -> Result<Vec<TensorData>, Failure> {
        let is_known: Vec<TensorIndex> = known.iter().map(|(tensor, _)| *tensor).collect();
        let needed = Leading::to(trace, wanted, &is_known).bytes(trace);
        let is_here = self.memory.is_on_host();
        let to_record = if is_here { host_bytes_of_rehearsal(trace) } else { Bytes::ZERO };
        let most = if is_here { self.budget } else { MOST };
        if needed + to_record > most {
            let needed = needed + to_record;
            return Err(Failure::Impossible(format!(
                "the numbers of the whole batch need {needed} of the host's memory, and {most} are allowed"
            )));
        }
        if is_here {
            found.needed.set(found.needed.get().max(needed + to_record));
        }
        let deadline = Instant::now() + time;
        let mut value = |tensor| match &known {
            Some((of, data)) if *of == tensor => Some(data.clone()),
            _ => value(tensor),
        };
        compute_values(trace, wanted, &is_known, &mut value, deadline)
            .map_err(|error| Failure::Impossible(error.to_string()))
    }
}

/// A tensor whose value is not to be computed, and its value.
pub(crate) type Known = Option<(TensorIndex, TensorData)>;

/// By what a batch divides its gradient, and what it counts beside other batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weight {
    /// What it counts, and no less than the floor.
    pub(crate) divisor: f64,
    pub(crate) counted: f64,
    /// The least that batches divide by.
    pub(crate) floor: f64,
}

impl Weight {
    /// Of a batch that counts so much.
    pub(crate) fn of(counted: f64, floor: f64) -> Self {
        Self { divisor: counted.max(floor), counted, floor }
    }
}

/// Numbers that differ by no more, relative to one, are the same, rounded.
const ROUNDED: f64 = 1e-4;

/// What a batch weighs, if its numbers are proportional to these powers of its sum where that is
/// large. What they are where it is nothing shows the floor.
fn weight(
    values: &BTreeMap<Place, TensorData>,
    computing: &Computing<'_>,
    Counts { sum, scales, has_once, .. }: &Counts,
    compute: &mut impl FnMut(&[TensorIndex], Known) -> Result<Vec<TensorData>, Failure>,
) -> Result<Option<Weight>, Failure> {
    let Some(sum) = computing.tensor(sum[0]) else { return Ok(None) };
    let Some(own) = compute(&[sum], None)?.pop() else { return Ok(None) };
    let counted = own.iter::<f64>().next().filter(|counted| *counted >= 0.0);
    let Some(counted) = counted else { return Ok(None) };
    let tensors: Option<Vec<TensorIndex>> =
        scales.iter().map(|(place, _)| computing.tensor(*place)).collect();
    let tensors = tensors.unwrap_or_default();
    let large = 1024.0 * counted.max(1.0);
    let mut with = |counted: f64| {
        let sum_is = TensorData::new(vec![counted], own.shape.clone()).convert_dtype(own.dtype);
        compute(&tensors, Some((sum, sum_is)))
    };
    let (none, once, twice) = (with(0.0)?, with(large)?, with(2.0 * large)?);
    let own = scales.iter().filter_map(|(place, _)| values.get(place));
    let numbers = |data: &TensorData| data.iter::<f64>().collect::<Vec<f64>>();
    let mut found: Option<[f64; 2]> = None;
    for ((((own, none), once), twice), (_, power)) in
        own.zip(&none).zip(&once).zip(&twice).zip(scales)
    {
        let [own, none, once, twice] = [own, none, once, twice].map(numbers);
        for at in (0..once.len()).filter(|at| once[*at] != 0.0) {
            let power = f64::from(*power);
            if (once[at] * 2f64.powf(power) - twice[at]).abs() > ROUNDED * twice[at].abs() {
                return Ok(None);
            }
            // By what it divides, and by what where nothing counts.
            let divides = [own[at], none[at]].map(|of| large * (of / once[at]).powf(1.0 / power));
            let is_other = |known: [f64; 2]| {
                let alike = |a: f64, b: f64| (a - b).abs() <= ROUNDED * a || a.is_nan() || a == b;
                !(alike(known[0], divides[0]) && alike(known[1], divides[1]))
            };
            if found.replace(divides).is_some_and(is_other) {
                return Ok(None);
            }
        }
    }
    let Some([divisor, floor]) = found else {
        return Ok((counted == 0.0).then_some(Weight::of(0.0, 0.0)));
    };
    let floor = if floor.is_finite() { floor } else { 0.0 };
    let weight = Weight::of(counted, floor);
    let is_so = (divisor - weight.divisor).abs() <= ROUNDED * weight.divisor;
    // What occurs once would be divided by the floor, too.
    let binds = *has_once && weight.divisor > weight.counted;
    // A sum over nothing divides by nothing.
    Ok((!binds && (is_so || weight.divisor == 0.0)).then_some(weight))
}

/// Records steps whose batches have values.
pub(crate) fn with_values() -> StepRecorder {
    StepRecorder::new().glance().with_values().keep_uploads()
}

impl<LC, S> Check<'_, LC, S>
where
    LC: LazyComponents,
    S: Splitter<TrainBatch<LC>>,
{
    /// Computes the numbers of the items `whole` that `gifts` name, in a step whose loss has this
    /// scale. The host may compute for `time`.
    pub(crate) fn numbers(
        &self,
        whole: Range<usize>,
        gifts: &[Gift],
        scale: Option<f64>,
        time: Duration,
    ) -> Result<Numbers, Failure> {
        self.numbers_of_rows(whole, gifts, (scale, time), None)
    }

    /// The same where these rows of the batch stand in for the items.
    fn numbers_of_rows(
        &self,
        whole: Range<usize>,
        gifts: &[Gift],
        (scale, time): (Option<f64>, Duration),
        rows: Option<&Rows<'_>>,
    ) -> Result<Numbers, Failure> {
        let recorder = match rows {
            Some(rows) if self.host.is_none() => with_values().with_rows(rows.selected()),
            _ => with_values(),
        };
        let recording = self.recorded_by(&recorder, whole, scale)?;
        let weighs = rows.is_none() && self.of.weighs;
        Numbers::of(&recording, (gifts, weighs), |wanted, known| {
            let value = &mut self.values_for(&recording, rows);
            self.means.computed(recording.trace(), (wanted, known), value, &self.found, time)
        })
    }

    /// The sum over the items `part` by which the gradient of a batch is divided.
    pub(super) fn counted(&self, part: &Range<usize>, gift: &Gift) -> Result<Option<f64>, Failure> {
        let Some(Counts { sum, .. }) = &gift.counts else { return Ok(None) };
        let recording = self.recorded_by(&with_values(), part.clone(), self.of.scale)?;
        let tensor = Computing::of(recording.trace()).tensor(sum[1]);
        let own = self.computed(&recording, tensor.as_slice(), (None, SOON))?;
        Ok(own.first().and_then(|sum| sum.iter::<f64>().next()))
    }

    /// What a batch of a single item counts beside others, which `gifts` are of. Nothing can be
    /// proved of it.
    pub(crate) fn count_of_one(&self, gifts: &[Gift]) -> Result<Option<f64>, Failure> {
        if !gifts.iter().any(Gift::has_weight) {
            return Ok(None);
        }
        let recording = self.recorded_by(&with_values(), 0..self.of.items, self.of.scale)?;
        let computing = Computing::of(recording.trace());
        let is_alike = |counts: &&Counts| computing.leading(counts.sum[0]) == counts.leading;
        let counts = gifts.iter().filter_map(|gift| gift.counts.as_ref()).find(is_alike);
        let Some(sum) = counts.and_then(|counts| computing.tensor(counts.sum[0])) else {
            return Ok(None);
        };
        let sum = self.computed(&recording, &[sum], (None, LATER))?;
        Ok(sum.first().and_then(|sum| sum.iter::<f64>().next()))
    }

    /// Computes tensors of a recording on the host.
    pub(super) fn computed(
        &self,
        recording: &Recording<LC::Base, TrainItem<LC>>,
        wanted: &[TensorIndex],
        (rows, time): (Option<&Rows<'_>>, Duration),
    ) -> Result<Vec<TensorData>, Failure> {
        let value = &mut self.values_for(recording, rows);
        self.means.computed(recording.trace(), (wanted, None), value, &self.found, time)
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
        // No loss is scaled here.
        let gifts = [self.gift(&whole, range, None)?];
        let numbers = self.numbers_of_rows(whole.clone(), &gifts, (None, SOON), Some(rows))?;
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
    /// What takes the place of tensors of the part.
    pub(super) fn given<B: Backend, T>(
        &self,
        part: &Recording<B, T>,
    ) -> Result<Vec<(TensorIndex, TensorData)>, Failure> {
        let data = |tensor| part.value_of(tensor);
        let of = (&self.range, self.items);
        let given = self.numbers.to_part(&self.gifts, (part.trace(), &data), of);
        given.ok_or_else(|| Failure::Impossible("some items run another program".to_owned()))
    }
}

fn zeros(of: &TensorType) -> TensorData {
    let bytes = vec![0; Bytes::of_elements(&of.shape, of.dtype).get() as usize];
    TensorData::from_bytes_vec(bytes, of.shape.clone(), of.dtype)
}

/// What host data of a part is to that of all `items` items. Items come first.
pub(super) fn compared(
    whole: &TensorData,
    part: &TensorData,
    items: usize,
    of: &Range<usize>,
) -> HostData {
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
