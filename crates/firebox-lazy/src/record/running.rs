//! Runs a recording: the steps of its trace, or what runs instead (`rewriting.rs`).

use std::sync::Arc;

use burn_backend::Backend;
use firebox_recompute::Program;
use firebox_trace::{OpIndex, Step};

use crate::record::recording::Recording;
use crate::record::rewriting::Rewriting;
use crate::record::session::Session;
use crate::record::values::Frame;
use crate::threads::handover::{self, TrainingTurn};

impl<B: Backend, T> Recording<B, T> {
    /// Runs `program` instead of what was recorded, once the recording runs. False, and nothing
    /// changes, if the program is that of another recording, a read has already run a part of it,
    /// or tensors of the recording are parked. `drain` empties the queue of a backend that fuses
    /// operations.
    ///
    /// Values are those of the recorded steps, bit for bit, unless the backend fuses operations.
    pub fn rewrite(
        &mut self,
        program: &Arc<Program>,
        drain: impl Fn() + Send + Sync + 'static,
    ) -> bool {
        let Some((_, session)) = &mut self.parts else { return false };
        let is_free = session.program.ran == 0 && session.parks.parking.is_none();
        let can_run = is_free && program.is_of(&session.trace);
        if can_run {
            let program = program.clone();
            session.program.rewriting = Some(Rewriting { program, drain: Arc::new(drain) });
        }
        can_run
    }
}

impl<B: Backend> Session<B> {
    /// Runs all steps that have not run yet.
    pub(crate) fn run(&mut self) {
        if self.options.never_runs {
            return;
        }
        let _turn = TrainingTurn::take();
        if let Some(rewriting) = self.program.rewriting.take() {
            let instructions = std::mem::take(&mut self.program.instructions);
            rewriting.run(instructions, &self.program.given, &mut self.values);
            self.program.ran = self.trace.steps.len();
            return;
        }
        let mut program = std::mem::take(&mut self.program.instructions).into_iter().peekable();
        // What was last used before a read.
        if let Some(last) = self.program.ran.checked_sub(1) {
            self.park_behind(last);
        }
        // Effects may come after the last step.
        for at in self.program.ran..=self.trace.steps.len() {
            let step = self.trace.steps.get(at);
            while let Some((_, instruction)) = program.next_if(|(of, _)| of.0 as usize <= at) {
                handover::tick();
                instruction.finish(&mut Frame::of(step, &mut self.values));
            }
            if let (Some(step), false) = (step, self.program.given.is_empty()) {
                let given = self.program.given.remove(&OpIndex(at as u32));
                self.values.give(step, given.unwrap_or_default());
            }
            match step {
                Some(Step::Free(tensor)) => {
                    handover::tick();
                    drop(self.values.remove(*tensor));
                }
                Some(Step::Call(_) | Step::Upload { .. }) => self.park_behind(at),
                Some(Step::Read(_) | Step::Mark(_)) | None => {}
            }
        }
        self.park_behind(usize::MAX);
        self.program.ran = self.trace.steps.len();
    }
}
