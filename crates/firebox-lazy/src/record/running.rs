//! Runs a recording: the steps of its trace, or those of a program that computes tensors again
//! instead of keeping them.

use std::sync::Arc;

use burn_backend::{Backend, Scalar};
use burn_std::DType;
use firebox_recompute::{Program, StepOrigin};
use firebox_trace::{OpIndex, Step};

use crate::kind::{Bool, Float, Kind};
use crate::record::recording::Recording;
use crate::record::session::Session;
use crate::record::values::{Frame, Instruction};
use crate::threads::handover::{self, TrainingTurn};

impl<B: Backend, T> Recording<B, T> {
    /// Runs `program` instead of what was recorded, once the recording runs. False, and nothing
    /// changes, if the program is that of another recording, or parts of this one have run or
    /// tensors of it are parked. `drain` empties the queue of a backend that fuses operations.
    ///
    /// Values are those of the recorded steps, bit for bit, unless the backend fuses operations.
    pub fn rewrite(&mut self, program: &Arc<Program>, drain: impl Fn() + 'static) -> bool {
        let Some((_, session)) = &mut self.parts else { return false };
        let can_run =
            session.ran == 0 && session.parking.is_none() && program.is_of(&session.trace);
        if can_run {
            session.rewritten = Some((program.clone(), Box::new(drain)));
        }
        can_run
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
        if let Some((program, drain)) = self.rewritten.take() {
            return self.run_rewritten(&program, &*drain, done);
        }
        let mut program = std::mem::take(&mut self.program).into_iter().peekable();
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
        // What was last used before a read.
        self.park_behind(usize::MAX);
        self.ran = self.trace.steps.len();
    }

    /// Runs the steps of a program. Calls `done` with the program's steps.
    fn run_rewritten(
        &mut self,
        program: &Program,
        drain: &dyn Fn(),
        done: &mut dyn FnMut(OpIndex),
    ) {
        let trace = program.trace();
        self.values.resize(trace.tensors.len());
        let mut instructions: Vec<(OpIndex, Option<Instruction<B>>)> =
            self.program.drain(..).map(|(at, instruction)| (at, Some(instruction))).collect();
        let mut next = 0;
        for ((at, step), origin) in trace.iter().zip(program.origins()) {
            match (step, *origin) {
                (Step::Free(tensor), _) => {
                    handover::tick();
                    drop(self.values.remove(*tensor));
                }
                (_, StepOrigin::Recorded(of)) => {
                    while let Some((_, instruction)) =
                        instructions.get_mut(next).filter(|(at, _)| *at <= of)
                    {
                        handover::tick();
                        run(instruction, &mut Frame::of(Some(step), &mut self.values));
                        next += 1;
                    }
                }
                (_, StepOrigin::Repeated(of)) => {
                    handover::tick();
                    let found = instructions.partition_point(|(at, _)| *at <= of);
                    let call = found.checked_sub(1).and_then(|last| instructions[last].1.as_ref());
                    let Some(Instruction::Call(body)) = call else {
                        unreachable!("only burn's own calls are repeated, after they have run");
                    };
                    body(&mut Frame::of(Some(step), &mut self.values));
                }
                (Step::Call(call), StepOrigin::Packed | StepOrigin::Unpacked) => {
                    handover::tick();
                    let dtype = trace.tensor(call.outputs[0]).dtype;
                    let frame = &mut Frame::of(Some(step), &mut self.values);
                    match origin {
                        StepOrigin::Packed => pack(frame, dtype),
                        _ => unpack(frame, dtype),
                    }
                }
                (_, StepOrigin::Drained) => drain(),
                (_, StepOrigin::Dropped | StepOrigin::Packed | StepOrigin::Unpacked) => {
                    unreachable!("the checker has seen that it is none")
                }
            }
            if !matches!(step, Step::Mark(_)) {
                done(at);
            }
        }
        // Effects may come after the last step.
        for (_, instruction) in &mut instructions[next..] {
            handover::tick();
            run(instruction, &mut Frame::of(None, &mut self.values));
        }
        self.ran = self.trace.steps.len();
    }
}

/// Packs a mask of zeros and ones.
fn pack<B: Backend>(frame: &mut Frame<'_, B>, dtype: DType) {
    let mask = <Float as Kind<B>>::restore(frame.fetch(0));
    let packed = B::float_greater_elem(mask, Scalar::Float(0.5), dtype.into());
    frame.store(0, <Bool as Kind<B>>::erase(packed));
}

/// Makes a mask of its packed form again.
fn unpack<B: Backend>(frame: &mut Frame<'_, B>, dtype: DType) {
    let packed = <Bool as Kind<B>>::restore(frame.fetch(0));
    let mask = B::bool_into_float(packed, dtype.into());
    frame.store(0, <Float as Kind<B>>::erase(mask));
}

/// Runs an instruction that may be asked for again.
fn run<B: Backend>(instruction: &mut Option<Instruction<B>>, frame: &mut Frame<'_, B>) {
    match instruction {
        Some(Instruction::Call(body)) => body(frame),
        Some(Instruction::Once(_)) => {
            if let Some(once) = instruction.take() {
                once.finish(frame);
            }
        }
        None => unreachable!("what was recorded runs once"),
    }
}
