//! Caches footprints for the planner, so that none is computed twice.

use firebox_trace::Bytes;

use crate::error::PlanError;
use crate::need::Need;
use crate::outcome::Answer;
use crate::split::Split;

/// The function that computes footprints, and its results so far.
pub(crate) struct Answers<F> {
    footprints_of: F,
    known: Vec<Answer>,
}

impl<F, E> Answers<F>
where
    F: FnMut(&[Split]) -> Vec<Result<Need, E>>,
{
    pub fn new(footprints_of: F) -> Self {
        Self { footprints_of, known: Vec::new() }
    }

    /// Whether a split fits the budget. Asks for its footprint if it is unknown.
    pub fn fits(&mut self, split: Split, budget: Bytes) -> Result<bool, PlanError<E>> {
        self.ask(&[split])?;
        let answer = self.known(split).expect("it was asked for");
        Ok(answer.need.peak <= budget)
    }

    /// Asks for the footprints of all `splits` that are unknown, in one call.
    ///
    /// A failure is an error only if one split was asked for. If several were asked for, failures
    /// are dropped, because the search may not need all of them; [`fits`](Self::fits) asks again if
    /// it does.
    pub fn ask(&mut self, splits: &[Split]) -> Result<(), PlanError<E>> {
        let mut questions: Vec<Split> = Vec::new();
        for split in splits {
            if self.known(*split).is_none() && !questions.contains(split) {
                questions.push(*split);
            }
        }
        if questions.is_empty() {
            return Ok(());
        }
        let several = questions.len() > 1;
        let needs = (self.footprints_of)(&questions);
        assert_eq!(needs.len(), questions.len(), "a question was not answered");
        for (split, need) in questions.into_iter().zip(needs) {
            match need {
                Ok(need) => self.known.push(Answer { split, need }),
                Err(_) if several => {}
                Err(cause) => return Err(PlanError::Footprint { items: split.largest(), cause }),
            }
        }
        Ok(())
    }
}

impl<F> Answers<F> {
    /// The footprint of a split, if known. Linear search: a plan asks for only ten to forty.
    pub fn known(&self, split: Split) -> Option<&Answer> {
        self.known.iter().find(|answer| answer.split == split)
    }

    /// A known split into single items that exceeds the budget.
    pub fn single_item_misfit(&self, budget: Bytes) -> Option<&Answer> {
        self.misfits(budget).find(|answer| answer.split.largest().get() == 1)
    }

    /// The answers that exceed the budget, in the order they were asked for.
    pub fn misfits(&self, budget: Bytes) -> impl DoubleEndedIterator<Item = &Answer> {
        self.known.iter().filter(move |answer| answer.need.peak > budget)
    }

    /// All answers, in the order they were asked for.
    pub fn into_known(self) -> Vec<Answer> {
        self.known
    }
}
