//! Runs the steps of a program that recomputes tensors instead of keeping them, in place of those
//! that were recorded.

use std::sync::Arc;

use burn_backend::{Backend, Scalar};
use burn_std::DType;
use firebox_recompute::{Program, StepOrigin};
use firebox_trace::{OpIndex, Step, Trace};

use crate::kind::{Bool, Float, Kind};
use crate::record::recorder::Drain;
use crate::record::values::{Frame, Given, Instruction, Values};
use crate::threads::handover;

/// What runs instead of the recorded steps.
pub(crate) struct Rewriting {
    pub(crate) program: Arc<Program>,
    pub(crate) drain: Drain,
}

/// A rewritten program while it runs.
struct Running<B: Backend> {
    drain: Drain,
    /// The recorded instructions. Those that run once are gone then.
    instructions: Vec<(OpIndex, Option<Instruction<B>>)>,
    /// How many have run.
    next: usize,
}

impl Rewriting {
    /// Runs the program with recorded instructions, and puts what is given in the place of their
    /// results.
    pub(crate) fn run<B: Backend>(
        self,
        instructions: Vec<(OpIndex, Instruction<B>)>,
        given: &Given,
        values: &mut Values<B>,
    ) {
        let instructions = instructions.into_iter().map(|(at, run)| (at, Some(run))).collect();
        let mut running = Running { drain: self.drain, instructions, next: 0 };
        let trace = self.program.trace();
        values.resize(trace.tensors.len());
        for (step, origin) in trace.steps.iter().zip(self.program.origins()) {
            running.step((trace, step, *origin), values);
            if let (StepOrigin::Recorded(of) | StepOrigin::Repeated(of), false) =
                (*origin, given.is_empty())
            {
                values.give(step, given.get(&of).cloned().unwrap_or_default());
            }
        }
        // Effects may come after the last step.
        for (_, instruction) in &mut running.instructions[running.next..] {
            handover::tick();
            run(instruction, &mut Frame::of(None, values));
        }
    }
}

impl<B: Backend> Running<B> {
    fn step(&mut self, (trace, step, origin): (&Trace, &Step, StepOrigin), values: &mut Values<B>) {
        let instructions = &mut self.instructions;
        match (step, origin) {
            (Step::Free(tensor), _) => {
                handover::tick();
                drop(values.remove(*tensor));
            }
            (_, StepOrigin::Recorded(of)) => {
                while let Some((_, instruction)) =
                    instructions.get_mut(self.next).filter(|(at, _)| *at <= of)
                {
                    handover::tick();
                    run(instruction, &mut Frame::of(Some(step), values));
                    self.next += 1;
                }
            }
            (_, StepOrigin::Repeated(of)) => {
                handover::tick();
                let found = instructions.partition_point(|(at, _)| *at <= of);
                let call = found.checked_sub(1).and_then(|last| instructions[last].1.as_ref());
                let Some(Instruction::Call(body)) = call else {
                    unreachable!("only burn's own calls are repeated, after they have run");
                };
                body(&mut Frame::of(Some(step), values));
            }
            (Step::Call(call), StepOrigin::Packed | StepOrigin::Unpacked) => {
                handover::tick();
                let dtype = trace.tensor(call.outputs[0]).dtype;
                let frame = &mut Frame::of(Some(step), values);
                match origin {
                    StepOrigin::Packed => pack(frame, dtype),
                    _ => unpack(frame, dtype),
                }
            }
            (_, StepOrigin::Drained) => (self.drain)(),
            (_, StepOrigin::Dropped | StepOrigin::Packed | StepOrigin::Unpacked) => {
                unreachable!("the checker has seen that it is none")
            }
        }
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
