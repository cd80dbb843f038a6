//! What training may use. Plans, micro-steps, updates and reads are all held against it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use firebox_trace::Bytes;

/// The budget, and what is known to be needed of it.
#[derive(Debug)]
pub(crate) struct Room {
    /// What training may use.
    pub(crate) budget: Bytes,
    /// The share of it that a plan may use. Less than one once more was measured than predicted.
    share: f64,
    /// The most memory predicted for the run: that of a plan, or of a rehearsal that runs parts of
    /// a step.
    predicted: Bytes,
    /// The most bytes that a rehearsal needed. Counts rehearsals on the host, and those that ran
    /// parts of a step to read values.
    rehearsed: Arc<AtomicU64>,
}

impl Room {
    pub(super) fn new(budget: Bytes) -> Self {
        Self { budget, share: 1.0, predicted: Bytes::ZERO, rehearsed: Arc::default() }
    }

    /// What a plan may need.
    pub(super) fn of_plans(&self) -> Bytes {
        self.budget.scale(self.share)
    }

    /// What may be added to what is held.
    pub(super) fn beside(&self, held: Bytes) -> Bytes {
        self.budget - held
    }

    /// Limits later plans to this share of the budget.
    pub(super) fn limit(&mut self, share: f64) {
        self.share = self.share.min(share);
    }

    /// The most memory predicted for the run so far.
    pub(super) fn predicted(&self) -> Bytes {
        self.predicted
    }

    /// Raises the prediction for the run to at least `needed`.
    pub(super) fn predict(&mut self, needed: Bytes) {
        self.predicted = self.predicted.max(needed);
    }

    /// The most that rehearsals needed. Rehearsals that read raise it while they run.
    pub(super) fn rehearsed(&self) -> &Arc<AtomicU64> {
        &self.rehearsed
    }

    /// Takes what rehearsals needed into account.
    pub(super) fn take_rehearsals(&mut self) {
        self.predict(Bytes::new(self.rehearsed.load(Relaxed)));
    }
}
