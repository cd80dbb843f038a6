//! Proves what the outputs of a step without gradients are, such as the loss of a validation, and
//! gives parts of a batch the numbers of it that their outputs depend on.

use std::cell::RefCell;
use std::ops::Range;

use burn::tensor::TensorData;
use burn::tensor::backend::Backend;
use firebox_lazy::{Recording, StepRecorder};
use firebox_plan::Plan;
use firebox_trace::{Bytes, StructuralHash, TensorIndex, Trace};
use rustc_hash::FxHashMap;

use super::given::{Data, Gift, LATER, Numbers, SOON, missing, with_values};
use super::proof::{as_proof, compare, hosts};
use super::{Failure, Found, Means};
use crate::error::TrainError;
use crate::iteration::running::Give;
use crate::reduction::LossReduction;
use crate::weights;

/// Records a step on some items of a batch. It never runs.
pub(crate) type Record<'a, B, T> =
    &'a dyn Fn(&StepRecorder, Range<usize>) -> Result<Recording<B, T>, Failure>;

/// Gives the parts of a batch numbers of it.
pub(crate) struct Giver<'a, B: Backend, T> {
    gifts: &'a [Gift],
    record: Record<'a, B, T>,
    items: usize,
    means: &'a Means,
    found: &'a Found,
    numbers: Option<Numbers>,
    has_given: bool,
    /// Whether parts are given something, or only known.
    gives: bool,
    /// Whether outputs are only shown, so that parts may be given something and others not.
    shows: bool,
    /// Why nothing is given any more.
    failed: &'a RefCell<Option<String>>,
}

impl<'a, B: Backend, T> Giver<'a, B, T> {
    /// Gives these to the parts of a batch of `items` items.
    pub(crate) fn new(
        gifts: &'a [Gift],
        record: Record<'a, B, T>,
        items: usize,
        (means, found): (&'a Means, &'a Found),
        failed: &'a RefCell<Option<String>>,
    ) -> Self {
        let (numbers, has_given) = (None, false);
        let gives = gifts.iter().any(Gift::is_any);
        Self { gifts, record, items, means, found, numbers, has_given, gives, shows: false, failed }
    }

    /// Gives what outputs depend on that are only shown.
    pub(crate) fn shows(self) -> Self {
        Self { shows: true, ..self }
    }

    fn numbers(&self) -> Result<Numbers, Failure> {
        if !self.gifts.iter().any(Gift::needs_whole) {
            return Ok(Numbers::none());
        }
        let recording = (self.record)(&with_values(), 0..self.items)?;
        let value = &mut |tensor| recording.value_of(tensor);
        let numbers = Numbers::of(&recording, (self.gifts, false), |wanted, known| {
            self.means.computed(recording.trace(), (wanted, known), value, self.found, LATER)
        })?;
        match self.gifts.iter().any(|gift| gift.is_of(&numbers)) {
            true => Ok(numbers),
            false => Err(Failure::Impossible("the step is another program".to_owned())),
        }
    }

    /// Whether the range is a part of which something is proved.
    fn is_proved(&self, range: &Range<usize>) -> bool {
        range.len() < self.items && self.failed.borrow().is_none()
    }

    /// Gives nothing any more.
    fn fail(&mut self, why: String) {
        self.numbers = None;
        *self.failed.borrow_mut() = Some(why);
    }
}

/// What parts are given for outputs that add up to those of their batch, by its form and the sizes
/// of the parts.
#[derive(Debug, Default)]
pub(crate) struct OfOutputs(FxHashMap<(StructuralHash, Vec<usize>), Vec<Gift>>);

impl OfOutputs {
    /// What the parts of a batch of `items` items that is cut as `plan` says are given. Nothing if
    /// it is not known that this makes their outputs those of the batch, which is of this form, or
    /// if the batch states another weight than its items: outputs are joined by that.
    pub(crate) fn gifts<B: Backend, T>(
        &mut self,
        form: Option<StructuralHash>,
        (plan, items, stated): (&Plan, usize, impl FnOnce() -> f64),
        record: Record<'_, B, T>,
        reduction: LossReduction,
        with: (&Means, &Found),
    ) -> &[Gift] {
        let Some(form) = form.filter(|_| !plan.is_whole()) else { return &[] };
        if weights::differ(stated(), items as f64, items) {
            return &[];
        }
        let parts = plan.split().last_of_sizes();
        let split = (form, parts.iter().map(Range::len).collect());
        self.0.entry(split).or_insert_with(|| {
            let gifts = of_outputs((items, &parts), record, reduction, with);
            let gifts = gifts.unwrap_or_else(|failure| {
                log::info!("outputs of parts are shown as they are: {}", failure.why());
                Vec::new()
            });
            if gifts.iter().any(Gift::is_given) { gifts } else { Vec::new() }
        })
    }
}

fn of_outputs<B: Backend, T>(
    (items, parts): (usize, &[Range<usize>]),
    record: Record<'_, B, T>,
    reduction: LossReduction,
    (means, found): (&Means, &Found),
) -> Result<Vec<Gift>, Failure> {
    let whole = record(&with_values(), 0..items)?;
    let mut gifts = Vec::new();
    for range in parts {
        let part = record(&with_values(), range.clone())?;
        means.may_compare(&[whole.trace(), part.trace()], found)?;
        let host = hosts([&whole, &part], items, range);
        let both = [&as_proof(&whole, items), &as_proof(&part, range.len())];
        let Ok(gift) = compare(both, &host, (reduction, false))? else { return Ok(Vec::new()) };
        gifts.push(gift);
    }
    // Whether they can be computed at all.
    let value = &mut |tensor| whole.value_of(tensor);
    Numbers::of(&whole, (&gifts, false), |wanted, known| {
        means.computed(whole.trace(), (wanted, known), value, found, SOON)
    })?;
    Ok(gifts)
}

impl<B: Backend, T> Give for Giver<'_, B, T> {
    fn gives(&self, range: &Range<usize>) -> bool {
        self.gives && self.is_proved(range)
    }

    fn bytes(&self) -> Bytes {
        let numbers = self.numbers.as_ref().filter(|_| self.means.memory.is_on_host());
        numbers.map_or(Bytes::ZERO, Numbers::bytes)
    }

    fn prepare(&mut self, range: &Range<usize>) -> Result<(), TrainError> {
        if self.gives(range) && self.numbers.is_none() {
            match self.numbers() {
                Ok(numbers) => self.numbers = Some(numbers),
                Err(failure) => self.fail(failure.why()),
            }
        }
        Ok(())
    }

    fn give(
        &mut self,
        range: &Range<usize>,
        part: (&Trace, Data<'_>),
    ) -> Result<Vec<(TensorIndex, TensorData)>, TrainError> {
        let Some(numbers) = &self.numbers else {
            let is_known = !self.is_proved(range) || Gift::any_for(self.gifts, part.0);
            let unknown = || TrainError::NoNumbers { why: missing(range) };
            return is_known.then(Vec::new).ok_or_else(unknown);
        };
        let given = numbers.give(self.gifts, part, (range, self.items))?;
        self.has_given |= !given.is_empty();
        Ok(given)
    }

    fn learn(&mut self, range: &Range<usize>) -> Result<Option<Bytes>, TrainError> {
        if self.has_given && !self.shows {
            return Ok(None);
        }
        self.fail(missing(range));
        Ok(Some(Bytes::ZERO))
    }
}
