//! Runs the steps of a program that computes tensors again instead of keeping them, in place of
//! those that were recorded.
//!
//! A program that reads values runs in parts: at each read what was recorded so far, rewritten by a
//! recipe for a program that began in the same way. The rest follows once it is known, verified as
//! a whole.

use std::sync::Arc;

use burn_backend::{Backend, Scalar};
use burn_std::DType;
use firebox_recompute::{
    Anchor, Program, ProgramError, Recipe, Rewritten, StepOrigin, apply, check_begun, restore,
};
use firebox_trace::{OpIndex, Step, Trace};

use crate::kind::{Bool, Float, Kind, Value};
use crate::record::recorder::Drain;
use crate::record::values::{Frame, Instruction, Values};
use crate::threads::handover;

/// What runs instead of the recorded steps.
pub(crate) struct Rewriting<B: Backend> {
    /// The program of the whole recording, once it is known.
    pub(crate) program: Option<Arc<Program>>,
    /// The recipe of what comes before a read.
    recipe: Arc<Recipe>,
    drain: Drain,
    /// The origins of the steps that have run, and the place behind them in what was recorded.
    ran: Vec<StepOrigin>,
    end: Anchor,
    /// The instructions so far, and how many have run. Those that run once are gone then.
    instructions: Vec<(OpIndex, Option<Instruction<B>>)>,
    next: usize,
    /// The values of tensors that were not recorded, each with the step that made it and the number
    /// of the result, while the recording goes on.
    carried: Vec<(usize, usize, Box<Value<B>>)>,
}

impl<B: Backend> Rewriting<B> {
    pub(crate) fn of(recipe: Arc<Recipe>, drain: Drain) -> Self {
        Self {
            program: None,
            recipe,
            drain,
            ran: Vec::new(),
            end: Anchor { step: 0, reads: 0 },
            instructions: Vec::new(),
            next: 0,
            carried: Vec::new(),
        }
    }

    /// What was recorded so far, rewritten and verified. If the recipe is not for it, what was
    /// dropped comes back.
    pub(crate) fn so_far(&mut self, trace: &Trace) -> Result<Rewritten, ProgramError> {
        let end = Anchor::end_of(trace);
        let apply = |recipe: &Recipe| -> Result<Rewritten, ProgramError> {
            let rewritten = apply(trace, recipe)?;
            check_begun(trace, &rewritten)?;
            Ok(rewritten)
        };
        apply(&self.recipe.until(end)).or_else(|error| {
            log::debug!("what was computed so far comes back: {error}");
            let restored = restore(trace, &self.recipe, self.end)?.until(end);
            let rewritten = apply(&restored)?;
            self.recipe = Arc::new(restored);
            Ok(rewritten)
        })
    }

    /// The program of the whole recording.
    pub(crate) fn whole(&self, trace: &Trace) -> Result<Program, ProgramError> {
        Program::new(trace, &self.recipe).or_else(|error| {
            log::debug!("what was computed so far comes back: {error}");
            Program::new(trace, &restore(trace, &self.recipe, self.end)?)
        })
    }

    /// Runs the steps of a rewritten trace that have not run yet. Calls `done` after each.
    pub(crate) fn run(
        &mut self,
        (trace, origins): (&Trace, &[StepOrigin]),
        values: &mut Values<B>,
        done: &mut dyn FnMut(OpIndex),
    ) {
        assert!(
            origins.starts_with(&self.ran),
            "a program does not begin with what has run: please report this"
        );
        values.resize(trace.tensors.len());
        for (step, result, value) in self.carried.drain(..) {
            if let Step::Call(call) = &trace.steps[step] {
                values.store(call.outputs[result], *value);
            }
        }
        let steps = trace.iter().zip(origins).skip(self.ran.len());
        for ((at, step), origin) in steps {
            self.step((trace, step, *origin), values);
            if !matches!(step, Step::Mark(_) | Step::Read(_)) {
                done(at);
            }
        }
        self.ran = origins.to_vec();
    }

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

    /// Whether a program begins with what has run.
    pub(crate) fn begins(&self, program: &Program) -> bool {
        program.origins().starts_with(&self.ran)
    }

    /// Takes over instructions that were recorded.
    pub(crate) fn extend(&mut self, program: &mut Vec<(OpIndex, Instruction<B>)>) {
        self.instructions.extend(program.drain(..).map(|(at, run)| (at, Some(run))));
    }

    /// Runs the effects that come after the last step.
    pub(crate) fn run_effects(&mut self, values: &mut Values<B>) {
        for (_, instruction) in &mut self.instructions[self.next..] {
            handover::tick();
            run(instruction, &mut Frame::of(None, values));
        }
    }

    /// Waits for more to be recorded after `recorded`: takes what is no value of a recorded tensor
    /// out of the values.
    pub(crate) fn pause(&mut self, trace: &Trace, recorded: &Trace, values: &mut Values<B>) {
        self.end = Anchor::end_of(recorded);
        let recorded = recorded.tensors.len();
        for (step, of) in trace.steps.iter().enumerate() {
            let Step::Call(call) = of else { continue };
            for (result, output) in call.outputs.iter().enumerate() {
                if output.0 as usize >= recorded
                    && let Some(value) = values.remove(*output)
                {
                    self.carried.push((step, result, value));
                }
            }
        }
        values.resize(recorded);
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
