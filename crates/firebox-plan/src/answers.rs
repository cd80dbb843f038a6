//! The planner's memory of footprints: each is asked for once.

use firebox_trace::{Bytes, Items};

use crate::error::PlanError;
use crate::need::{Accumulating, Need};
use crate::outcome::Answer;

/// The function that knows footprints, and what it has said so far.
pub(crate) struct Answers<F> {
    footprint_of: F,
    known: Vec<Answer>,
}

impl<F, E> Answers<F>
where
    F: FnMut(Items, Accumulating) -> Result<Need, E>,
{
    pub fn new(footprint_of: F) -> Self {
        Self { footprint_of, known: Vec::new() }
    }

    /// Whether `size` items fit the budget; asks if that is not known.
    pub fn fits(
        &mut self,
        size: usize,
        accumulating: Accumulating,
        budget: Bytes,
    ) -> Result<bool, PlanError<E>> {
        if let Some(answer) = self.known(size, accumulating) {
            return Ok(answer.need.peak <= budget);
        }
        let items = Items::new(size);
        let need = (self.footprint_of)(items, accumulating)
            .map_err(|cause| PlanError::Footprint { items, cause })?;
        let fits = need.peak <= budget;
        self.known.push(Answer { items, accumulating, need });
        Ok(fits)
    }
}

impl<F> Answers<F> {
    /// What is known of `size` items. A plan asks some ten to forty times, too few for a map.
    pub fn known(&self, size: usize, accumulating: Accumulating) -> Option<&Answer> {
        self.known
            .iter()
            .find(|answer| answer.items.get() == size && answer.accumulating == accumulating)
    }

    /// The latest answer that exceeds the budget.
    pub fn latest_misfit(&self, budget: Bytes) -> Option<&Answer> {
        self.known.iter().rev().find(|answer| answer.need.peak > budget)
    }

    /// All answers, in the order of the questions.
    pub fn into_known(self) -> Vec<Answer> {
        self.known
    }
}
