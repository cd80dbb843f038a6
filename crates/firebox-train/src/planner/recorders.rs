//! The recorders of rehearsals and of micro-steps: what they let a model read.

use std::sync::atomic::Ordering::Relaxed;

use firebox_lazy::Recorder;
use firebox_trace::Bytes;

use super::Planner;

impl Planner {
    /// The recorder for rehearsals and for micro-steps that are not known yet.
    pub(super) fn recorder(&self, budget: Bytes) -> Recorder {
        let memory = self.memory.clone();
        let mut recorder = Recorder::new().substitute_random();
        if memory.is_on_host() {
            recorder = recorder.limit_host(budget);
        }
        if self.reads {
            let (rehearsed, beside) = (self.rehearsed.clone(), self.beside);
            recorder.limit_reads(budget, move |trace| {
                let mut trace = trace.clone();
                beside.add_queue(&mut trace, memory.is_on_host());
                let peak = memory.footprint(&trace).peak;
                if peak <= budget {
                    rehearsed.fetch_max(peak.get(), Relaxed);
                }
                peak
            })
        } else {
            recorder.refuse_reads()
        }
    }

    /// The recorder for a micro-step that will run: a read may run what comes before it if that fits beside what is
    /// held.
    pub(crate) fn step_recorder(&self, held: Bytes) -> Recorder {
        let (memory, known) = (self.memory.clone(), self.prefixes.clone());
        Recorder::new().limit_reads(self.budget - held, move |trace| {
            let mut known = known.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let needed = known.entry(trace.structural_hash());
            *needed.or_insert_with(|| memory.footprint(trace).growth())
        })
    }
}
