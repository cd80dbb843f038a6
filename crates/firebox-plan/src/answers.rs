//! The planner's memory of footprints: each is asked for once.

use firebox_trace::{Bytes, Items};

use crate::error::PlanError;
use crate::need::{Accumulating, Need, Question};
use crate::outcome::Answer;

/// The function that knows footprints, and what it has said so far.
pub(crate) struct Answers<F> {
    footprints_of: F,
    known: Vec<Answer>,
}

impl<F, E> Answers<F>
where
    F: FnMut(&[Question]) -> Vec<Result<Need, E>>,
{
    pub fn new(footprints_of: F) -> Self {
        Self { footprints_of, known: Vec::new() }
    }

    /// Whether `size` items fit the budget; asks if that is not known.
    pub fn fits(
        &mut self,
        size: usize,
        accumulating: Accumulating,
        budget: Bytes,
    ) -> Result<bool, PlanError<E>> {
        self.ask(&[size], accumulating)?;
        let answer = self.known(size, accumulating).expect("it was asked for");
        Ok(answer.need.peak <= budget)
    }

    /// Makes these sizes known, with one question for all that are not. A failure counts only where one size is asked for; of
    /// several, not all may be needed.
    pub fn ask(&mut self, sizes: &[usize], accumulating: Accumulating) -> Result<(), PlanError<E>> {
        let mut questions: Vec<Question> = Vec::new();
        for size in sizes {
            let question = (Items::new(*size), accumulating);
            if self.known(*size, accumulating).is_none() && !questions.contains(&question) {
                questions.push(question);
            }
        }
        if questions.is_empty() {
            return Ok(());
        }
        let several = questions.len() > 1;
        let needs = (self.footprints_of)(&questions);
        assert_eq!(needs.len(), questions.len(), "a question was not answered");
        for ((items, accumulating), need) in questions.into_iter().zip(needs) {
            match need {
                Ok(need) => self.known.push(Answer { items, accumulating, need }),
                Err(_) if several => {}
                Err(cause) => return Err(PlanError::Footprint { items, cause }),
            }
        }
        Ok(())
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
