//! The recorders of rehearsals and micro-steps. They decide what a model may read.

use std::sync::atomic::Ordering::Relaxed;

use firebox_lazy::Recorder;
use firebox_trace::{Bytes, Footprint};

use super::Planner;
use crate::device::own_pool::TrainingPool;

impl Planner {
    /// The recorder for rehearsals.
    pub(super) fn recorder(&self, budget: Bytes) -> Recorder {
        let memory = self.memory.clone();
        let mut recorder = Recorder::new().substitute_random();
        if memory.is_on_host() {
            recorder = recorder.limit_host(budget);
        }
        if self.reads {
            let (rehearsed, overhead, pool) =
                (self.rehearsed.clone(), self.overhead, self.pool.clone());
            if let Some(pool) = self.pool.clone() {
                recorder = recorder.at_marks(move |mark| pool.passes(mark));
            }
            recorder.limit_reads(budget, move |trace| {
                let mut trace = trace.clone();
                overhead.add_queue(&mut trace, memory.is_on_host());
                let footprint = memory.footprint(&trace);
                let mut peak = footprint.peak;
                if peak <= budget {
                    peak = peak.max(prepared(pool.as_deref(), &footprint));
                    rehearsed.fetch_max(peak.get(), Relaxed);
                }
                peak
            })
        } else {
            recorder.refuse_reads()
        }
    }

    /// The recorder for a micro-step that will run. A read may run the operations before it if they
    /// fit in addition to what is held.
    pub(crate) fn step_recorder(&self, held: Bytes) -> Recorder {
        let (memory, known) = (self.memory.clone(), self.prefixes.clone());
        Recorder::new().limit_reads(self.budget - held, move |trace| {
            let mut known = known.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let needed = known.entry(trace.structural_hash());
            *needed.or_insert_with(|| memory.footprint(trace).growth())
        })
    }
}

/// Prepares the pages that a part of a step needs, if they lie on a pool of our own. Returns the
/// bytes of all pages then, or [`Bytes::MAX`] if the pages cannot be had.
fn prepared(pool: Option<&TrainingPool>, footprint: &Footprint) -> Bytes {
    let pages = footprint.paging.as_ref().and_then(|paging| paging.pool);
    let Some((pool, pages)) = pool.zip(pages) else { return Bytes::ZERO };
    pool.prepare([pages, pages]).unwrap_or_else(|error| {
        log::debug!("no pages to read a value while planning: {error}");
        Bytes::MAX
    })
}
