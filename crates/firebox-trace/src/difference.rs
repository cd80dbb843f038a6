//! Finds where two recordings of the same step differ in a number or a shape: such a step depends
//! on how often it was called.

use std::fmt;
use std::ops::Range;

use crate::{Call, Mark, Step, Trace};

/// The first call that differs between two recordings of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its method.
    pub operation: String,
    /// What it takes, or is, in each recording.
    pub values: [String; 2],
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, values: [first, second] } = self;
        write!(f, "`{operation}` has {first} and then {second}")
    }
}

impl Trace {
    /// The steps of each micro-step, by iteration: up to the mark behind what the user's step does.
    fn micro_steps(&self) -> Vec<Vec<Range<usize>>> {
        let mut iterations = vec![Vec::new()];
        let mut begin = None;
        for (at, step) in self.steps.iter().enumerate() {
            let Step::Mark(mark) = step else { continue };
            match (mark, iterations.last_mut()) {
                (Mark::MicroStep, _) => begin = Some(at),
                (Mark::Drain, Some(iteration)) => {
                    iteration.extend(begin.take().map(|begin| begin..at));
                }
                (Mark::IterationEnd, _) => iterations.push(Vec::new()),
                _ => {}
            }
        }
        iterations
    }

    /// Where the last micro-step of the first iteration differs from that of the second, which runs
    /// on the same items. `None` also if there are no two iterations.
    pub fn difference_of_iterations(&self) -> Option<Difference> {
        let iterations = self.micro_steps();
        let last = |iteration: usize| iterations.get(iteration)?.last().cloned();
        self.difference(last(0)?, (self, last(1)?))
    }

    /// Whether the first two micro-steps of the last iteration are the same calls with the same
    /// numbers. `None` if there are no two.
    pub fn has_like_micro_steps(&self) -> Option<bool> {
        let iterations = self.micro_steps();
        let iteration = iterations.iter().rev().find(|iteration| !iteration.is_empty())?;
        let [first, second, ..] = &iteration[..] else { return None };
        Some(self.difference(first.clone(), (self, second.clone())).is_none())
    }

    /// The first call of the steps `own` that differs from that of `others`.
    pub fn difference(
        &self,
        own: Range<usize>,
        (other, others): (&Self, Range<usize>),
    ) -> Option<Difference> {
        let calls = |trace: &'_ Self, steps: Range<usize>| {
            trace.steps[steps.clone()]
                .iter()
                .filter_map(|step| match step {
                    Step::Call(call) => Some((**call).clone()),
                    _ => None,
                })
                .collect::<Vec<Call>>()
        };
        let (own, others) = (calls(self, own), calls(other, others));
        for (own, others) in own.iter().zip(&others) {
            let (first, second) = (self.description(own), other.description(others));
            if own.name != others.name {
                let values = [own.name.to_string(), others.name.to_string()];
                return Some(Difference { operation: "a call".to_owned(), values });
            }
            let is_same = std::ptr::eq(first, second) || first == second;
            if !is_same {
                let operation = own.name.to_string();
                return Some(Difference { operation, values: differing(first, second) });
            }
        }
        let counts = [own.len(), others.len()].map(|count| format!("{count} calls"));
        (own.len() != others.len())
            .then(|| Difference { operation: "a step".to_owned(), values: counts })
    }
}

/// The first words in which two things differ.
fn differing(first: &impl fmt::Debug, second: &impl fmt::Debug) -> [String; 2] {
    let is_between = |c: char| !(c.is_alphanumeric() || matches!(c, '.' | '-' | '_'));
    let (first, second) = (format!("{first:?}"), format!("{second:?}"));
    let mut words = first.split(is_between).zip(second.split(is_between));
    let (one, other) = words.find(|(one, other)| one != other).unwrap_or_default();
    [one.to_owned(), other.to_owned()]
}
