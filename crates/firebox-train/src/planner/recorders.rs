//! The recorders of rehearsals and micro-steps. They decide what a model may read.

use std::sync::atomic::Ordering::Relaxed;

use firebox_lazy::{StepRecorder, forget_calls};
use firebox_trace::Bytes;

use super::Planner;
use crate::planner::rehearsed::{loop_bytes, recording_bytes};

/// The share of the budget that a rehearsal leaves for what autodiff holds of each call. It is not
/// counted, and took 22 to 29 % of what is for 400 layers.
const BESIDE_RECORDING: f64 = 0.2;

/// What a rehearsal takes whose recording alone takes `recording`.
pub(super) fn with_autodiff(recording: Bytes) -> Bytes {
    recording.scale(1.0 / (1.0 - BESIDE_RECORDING))
}

impl Planner {
    /// The recorder for rehearsals. On the host, calls of others are forgotten: no plan counts what
    /// remembering them takes.
    pub(super) fn recorder(&self, budget: Bytes) -> StepRecorder {
        let memory = self.memory.clone();
        if memory.is_on_host() {
            forget_calls();
        }
        let mut recorder = StepRecorder::new().substitute_random();
        if memory.is_on_host() {
            recorder = recorder.limit_host(budget.scale(1.0 - BESIDE_RECORDING));
        }
        if self.step.reads {
            let (rehearsed, overhead, pool) =
                (self.room.rehearsed().clone(), self.overhead, self.pool.clone());
            if let Some(pool) = self.pool.clone() {
                recorder = recorder.at_marks(move |mark| pool.passes(mark));
            }
            recorder.limit_reads(budget, move |trace| {
                let mut trace = trace.clone();
                overhead.add_queue(&mut trace, memory.is_on_host());
                let footprint = memory.footprint(&trace);
                // What was recorded so far takes host memory, too.
                let recording = recording_bytes(&*memory, &trace, trace.calls().count());
                let mut peak = footprint.peak + recording + loop_bytes(&*memory);
                if peak <= budget {
                    let pages = pool.as_ref().map(|pool| pool.prepare_for(&footprint));
                    peak = peak.max(pages.unwrap_or_default());
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
    pub(crate) fn step_recorder(&self, held: Bytes) -> StepRecorder {
        let (memory, known) = (self.memory.clone(), self.structures.prefixes.clone());
        StepRecorder::new().limit_reads(self.room.beside(held), move |trace| {
            let mut known = known.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let needed = known.entry(trace.structural_hash());
            // What was recorded so far takes host memory, too.
            *needed.or_insert_with(|| {
                let recording = recording_bytes(&*memory, trace, trace.calls().count());
                memory.footprint(trace).growth() + recording
            })
        })
    }
}
