//! The outputs that burn's metrics hold while the next micro-steps run, in a rehearsal.

use std::collections::VecDeque;

use crate::iteration::pieces::Piece;
use crate::reduction::LossReduction;
use crate::whole::{Join, joined};

/// While a micro-step runs, the metrics thread may hold the outputs of this many earlier
/// micro-steps.
pub(crate) const OUTPUTS_HELD: usize = 1;

/// The outputs that the metrics hold during a rehearsal.
pub(crate) struct Outputs<'a, T> {
    /// The latest outputs, or all outputs of the current batch if they are joined.
    latest: VecDeque<T>,
    /// The output of the previous batch, or those of its parts if they do not go together.
    earlier: Vec<T>,
    join: Option<&'a Join<T>>,
}

impl<'a, T> Outputs<'a, T> {
    pub(crate) fn new(join: Option<&'a Join<T>>) -> Self {
        Self { latest: VecDeque::new(), earlier: Vec::new(), join }
    }

    /// How many more micro-steps like this one follow. None where outputs are joined: what all
    /// outputs of a batch need together is added to the trace later.
    pub(crate) fn more(&self, piece: &Piece) -> u32 {
        if self.join.is_some() { 0 } else { piece.more_to_mark() }
    }

    /// Called before the micro-batch `piece`. The first micro-batch of a batch starts at item zero.
    pub(crate) fn begin(&mut self, piece: &Piece) {
        if piece.range.start == 0 && !self.latest.is_empty() {
            self.join();
        }
    }

    /// Drops the outputs that the metrics have released by the time a micro-step begins.
    pub(crate) fn end_earlier(&mut self) {
        match self.join {
            None => drop(self.latest.drain(..self.latest.len().saturating_sub(OUTPUTS_HELD))),
            Some(_) => self.earlier.clear(),
        }
    }

    pub(crate) fn add(&mut self, output: T) {
        self.latest.push_back(output);
    }

    /// Joins the outputs at the end of a batch.
    pub(crate) fn join(&mut self) {
        if let Some(join) = self.join {
            let parts = self.latest.drain(..).map(|output| (output, 1.0)).collect();
            self.earlier = joined(join, LossReduction::Mean, parts);
        }
    }
}
