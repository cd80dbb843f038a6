//! The driver that rehearses an iteration. Marks in the recording stand for what the other driver
//! does between the calls.

use firebox_lazy::{Arrival, LazyBackend, in_full_precision, mark};
use firebox_trace::Mark;

use crate::iteration::outputs::Outputs;
use crate::iteration::pieces::Piece;
use crate::splitter::Splitter;

/// An iteration in a rehearsal.
pub(crate) struct Rehearsing<'a> {
    pieces: &'a [Piece],
    /// The batch, which arrives once, however often its micro-batches are run.
    arrival: Option<Arrival>,
    /// Whether an update was the last thing.
    has_updated: bool,
}

impl<'a> Rehearsing<'a> {
    /// An iteration on the micro-batches `pieces`.
    pub(crate) fn new(pieces: &'a [Piece]) -> Self {
        Self { pieces, arrival: None, has_updated: false }
    }

    /// Records `step` on each micro-batch. What `keep` makes of its output is held as long as
    /// metrics hold it.
    pub(crate) fn each<B: LazyBackend, I, U, T>(
        &mut self,
        (splitter, batch): (&impl Splitter<I>, &I),
        outputs: &mut Outputs<'_, T>,
        step: &mut dyn FnMut(I) -> U,
        keep: &mut dyn FnMut(U, &Piece) -> T,
    ) {
        let note = mark::<B::Base>;
        self.has_updated = false;
        for (at, piece) in self.pieces.iter().enumerate() {
            outputs.begin(piece);
            outputs.end_earlier();
            // The batch before it has ended, and another arrives.
            if at > 0 && piece.range.start == 0 {
                self.arrival = None;
            }
            let arrival = self.arrival.get_or_insert_default();
            let micro = arrival.cut(|| splitter.range(batch, piece.range.clone()));
            note(Mark::Drain);
            note(Mark::MicroStep);
            let output = step(micro);
            note(Mark::Drain);
            let kept = keep(output, piece);
            note(Mark::Drain);
            outputs.add(kept);
            note(Mark::MicroStepEnd(outputs.more(piece)));
        }
        outputs.join();
    }

    /// Lets go of the batch.
    pub(crate) fn end_batch(&mut self) {
        self.arrival = None;
    }

    /// Records what changes parameters. Before and after it, the device is asked whether all work
    /// succeeded.
    pub(crate) fn update<B: LazyBackend, R>(&mut self, work: impl FnOnce() -> R) -> R {
        let note = mark::<B::Base>;
        self.has_updated = true;
        note(Mark::Settle);
        note(Mark::OptimizerStep);
        let result = in_full_precision(work);
        note(Mark::Settle);
        note(Mark::IterationEnd);
        result
    }

    /// Ends an iteration, also one without an update.
    pub(crate) fn end<B: LazyBackend>(self) {
        if !self.has_updated {
            mark::<B::Base>(Mark::IterationEnd);
        }
    }
}
