//! Runs a recording: the steps of its trace, or what runs instead (`rewriting.rs`).

use std::sync::Arc;

use burn_backend::Backend;
use firebox_recompute::{Program, ProgramError};
use firebox_trace::{OpIndex, Step};

use crate::kind::Value;
use crate::record::recorder::Drain;
use crate::record::recording::Recording;
use crate::record::rewriting::Rewriting;
use crate::record::session::Session;
use crate::record::values::Frame;
use crate::threads::handover::{self, TrainingTurn};
use crate::threads::progress;

impl<B: Backend, T> Recording<B, T> {
    /// Runs `program` instead of what was recorded, once the recording runs. False, and nothing
    /// changes, if the program is that of another recording, does not begin with what reads have
    /// already run, or tensors of the recording are parked. `drain` empties the queue of a backend
    /// that fuses operations.
    ///
    /// Values are those of the recorded steps, bit for bit, unless the backend fuses operations.
    pub fn rewrite(
        &mut self,
        program: &Arc<Program>,
        drain: impl Fn() + Send + Sync + 'static,
    ) -> bool {
        let Some((_, session)) = &mut self.parts else { return false };
        let begins_so = match &session.rewriting {
            Some(rewriting) => rewriting.begins(program),
            None => session.ran == 0,
        };
        let can_run = begins_so && session.parking.is_none() && program.is_of(&session.trace);
        if can_run {
            let drain: Drain = Arc::new(drain);
            let rewriting =
                session.rewriting.get_or_insert_with(|| Rewriting::of(Arc::default(), drain));
            rewriting.program = Some(program.clone());
        }
        can_run
    }

    /// The program that the recording has begun to run, see
    /// [`Recorder::rewrite_at_reads`](crate::Recorder::rewrite_at_reads). None if it runs as
    /// recorded.
    ///
    /// # Errors
    ///
    /// If there is none: the program that was recorded keeps a tensor that was dropped, as it did
    /// not keep it with zeros in place of what it reads.
    pub fn begun_program(&self) -> Option<Result<Program, ProgramError>> {
        let (_, session) = self.parts.as_ref()?;
        let rewriting = session.rewriting.as_ref()?;
        Some(rewriting.whole(&session.trace))
    }
}

impl<B: Backend> Session<B> {
    /// Runs all steps that have not run yet.
    pub(crate) fn run(&mut self) {
        self.run_observed(&mut |_| ());
    }

    /// Runs all steps that have not run yet. Calls `done` after each that does something.
    pub(crate) fn run_observed(&mut self, done: &mut dyn FnMut(OpIndex)) {
        if self.never_runs {
            return;
        }
        let _turn = TrainingTurn::take();
        if self.rewriting.is_some() {
            return self.run_rewriting(done);
        }
        let mut program = std::mem::take(&mut self.program).into_iter().peekable();
        // What was last used before a read.
        if let Some(last) = self.ran.checked_sub(1) {
            self.park_behind(last);
        }
        // Effects may come after the last step.
        for at in self.ran..=self.trace.steps.len() {
            let step = self.trace.steps.get(at);
            while let Some((_, instruction)) = program.next_if(|(of, _)| of.0 as usize <= at) {
                handover::tick();
                instruction.finish(&mut Frame::of(step, &mut self.values));
            }
            match step {
                Some(Step::Free(tensor)) => {
                    handover::tick();
                    drop(self.values.remove(*tensor));
                }
                Some(Step::Call(_) | Step::Upload { .. }) => self.park_behind(at),
                Some(Step::Read(_) | Step::Mark(_)) | None => continue,
            }
            done(OpIndex(at as u32));
        }
        self.park_behind(usize::MAX);
        self.ran = self.trace.steps.len();
    }

    /// Asks at the first read how what was recorded is rewritten.
    pub(crate) fn begin_rewriting(&mut self) {
        if self.ran > 0 || self.rewriting.is_some() || self.parking.is_some() {
            return;
        }
        if let Some(at_reads) = self.at_reads.take()
            && let Some(recipe) = (at_reads.choose)(&self.trace)
        {
            self.rewriting = Some(Rewriting::of(recipe, at_reads.drain));
        }
    }

    /// Runs what was recorded so far, up to the read at its end, and returns the value that is
    /// read. None if that is too large.
    pub(crate) fn read_rewritten(&mut self) -> Option<Value<B>> {
        let mut rewriting = self.rewriting.take()?;
        let rewritten = match rewriting.so_far(&self.trace) {
            Ok(rewritten) => rewritten,
            // Something that cannot be made again ended where it did not with zeros.
            Err(error) => {
                log::debug!("what was computed so far is not that of a recipe: {error}");
                self.refuse_unknown();
                return None;
            }
        };
        let trace = &rewritten.trace;
        let limit = self.read_limit.clone();
        let refused = limit.and_then(|limit| progress::running(|| limit.refuses(trace)));
        if let Some((needed, budget)) = refused {
            self.refuse_read(needed, budget);
            return None;
        }
        rewriting.extend(&mut self.program);
        progress::running(|| {
            let _turn = TrainingTurn::take();
            rewriting.run((trace, &rewritten.origins), &mut self.values, &mut |_| ());
        });
        let Some(Step::Read(used)) = trace.steps.last() else {
            unreachable!("the read is the last step")
        };
        let value = self.values.fetch(*used);
        rewriting.pause(trace, &self.trace, &mut self.values);
        self.ran = self.trace.steps.len();
        self.rewriting = Some(rewriting);
        Some(value)
    }

    /// Runs what is left of a program. Calls `done` with the program's steps.
    pub(crate) fn run_rewriting(&mut self, done: &mut dyn FnMut(OpIndex)) {
        let Some(mut rewriting) = self.rewriting.take() else { return };
        let program = rewriting.program.take().unwrap_or_else(|| {
            let whole = rewriting.whole(&self.trace);
            Arc::new(whole.expect("what was dropped can be computed again"))
        });
        rewriting.extend(&mut self.program);
        rewriting.run((program.trace(), program.origins()), &mut self.values, done);
        rewriting.run_effects(&mut self.values);
        self.ran = self.trace.steps.len();
    }
}
