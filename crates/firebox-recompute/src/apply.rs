//! Applies a recipe to a trace.

use firebox_trace::{Call, OpIndex, Origin, Step, TensorIndex, TensorInfo, Trace, Use};

use crate::recipe::{Edit, Recipe, Rewritten, StepOrigin};

/// Why a recipe does not fit a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// An edit names a step that the trace does not have, or that is no call, or comes too early.
    #[error("an edit before step {0} does not fit the trace")]
    Misplaced(OpIndex),
    /// A call needs a tensor that was dropped.
    #[error("step {at} needs tensor {tensor}, which was dropped")]
    Dropped {
        /// The recorded step.
        at: OpIndex,
        /// The recorded tensor.
        tensor: TensorIndex,
    },
}

/// Where a recorded tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Unborn,
    /// Alive, as this tensor of the rewritten trace.
    Is(TensorIndex),
    /// A recipe dropped it, or used up a repeat.
    Dropped,
    /// It has ended where it was recorded to.
    Ended,
}

/// The trace that a recipe makes of a recorded one.
///
/// # Errors
///
/// If the recipe is one for another trace.
pub fn apply(trace: &Trace, recipe: &Recipe) -> Result<Rewritten, ApplyError> {
    let existing = |tensor: &TensorInfo, index: usize| match tensor.origin {
        Origin::Existing => Version::Is(TensorIndex(index as u32)),
        Origin::Made(_) => Version::Unborn,
    };
    let mut rewriting = Rewriting {
        trace,
        roots: trace.buffers(),
        versions: trace.tensors.iter().enumerate().map(|(at, of)| existing(of, at)).collect(),
        tensors: trace.tensors.clone(),
        steps: Vec::with_capacity(trace.steps.len() + recipe.edits.len()),
        origins: Vec::with_capacity(trace.steps.len() + recipe.edits.len()),
    };
    let mut edits = recipe.edits.iter().copied().peekable();
    for at in 0..trace.steps.len() {
        let at = OpIndex(at as u32);
        while let Some(edit) = edits.next_if(|edit| edit.before() <= at) {
            if edit.before() < at {
                return Err(ApplyError::Misplaced(edit.before()));
            }
            match edit {
                Edit::Drop { buffer, .. } => rewriting.drop_buffer(buffer),
                Edit::Redo { call, .. } => rewriting.redo(at, call)?,
            }
        }
        rewriting.record(at)?;
    }
    if let Some(edit) = edits.next() {
        return Err(ApplyError::Misplaced(edit.before()));
    }
    let Rewriting { tensors, steps, origins, .. } = rewriting;
    let descriptions = trace.descriptions.clone();
    Ok(Rewritten { trace: Trace { tensors, steps, descriptions }, origins })
}

struct Rewriting<'a> {
    trace: &'a Trace,
    roots: Vec<TensorIndex>,
    versions: Vec<Version>,
    tensors: Vec<TensorInfo>,
    steps: Vec<Step>,
    origins: Vec<StepOrigin>,
}

impl Rewriting<'_> {
    fn push(&mut self, step: Step, origin: StepOrigin) {
        self.steps.push(step);
        self.origins.push(origin);
    }

    fn version(&mut self, tensor: TensorIndex) -> &mut Version {
        &mut self.versions[tensor.0 as usize]
    }

    fn drop_buffer(&mut self, root: TensorIndex) {
        for tensor in 0..self.versions.len() {
            if self.roots[tensor] == root
                && let Version::Is(is) = self.versions[tensor]
            {
                self.versions[tensor] = Version::Dropped;
                self.push(Step::Free(is), StepOrigin::Dropped);
            }
        }
    }

    /// The inputs of a call as they are now. Those that it uses up are `after` it.
    fn inputs(&mut self, at: OpIndex, call: &Call, after: Version) -> Result<Vec<Use>, ApplyError> {
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for input in &call.inputs {
            let tensor = input.tensor;
            let Version::Is(is) = *self.version(tensor) else {
                return Err(ApplyError::Dropped { at, tensor });
            };
            inputs.push(Use { tensor: is, last: input.last });
        }
        for input in call.inputs.iter().filter(|input| input.last) {
            *self.version(input.tensor) = after;
        }
        Ok(inputs)
    }

    fn redo(&mut self, before: OpIndex, of: OpIndex) -> Result<(), ApplyError> {
        let trace = self.trace;
        let call = match trace.steps.get(of.0 as usize) {
            Some(Step::Call(call)) if of < before => call,
            _ => return Err(ApplyError::Misplaced(before)),
        };
        let inputs = self.inputs(of, call, Version::Dropped)?;
        let at = OpIndex(self.steps.len() as u32);
        let mut outputs = Vec::with_capacity(call.outputs.len());
        let mut twice = Vec::new();
        for output in &call.outputs {
            let new = TensorIndex(self.tensors.len() as u32);
            let info = trace.tensor(*output).clone();
            self.tensors.push(TensorInfo { origin: Origin::Made(at), ..info });
            outputs.push(new);
            match self.version(*output) {
                Version::Is(_) => twice.push(new),
                version => *version = Version::Is(new),
            }
        }
        let repeat = Call {
            inputs: inputs.into(),
            outputs: outputs.into(),
            name: call.name.clone(),
            description: call.description,
        };
        self.push(Step::Call(Box::new(repeat)), StepOrigin::Repeated(of));
        twice.into_iter().for_each(|new| self.push(Step::Free(new), StepOrigin::Dropped));
        Ok(())
    }

    fn record(&mut self, at: OpIndex) -> Result<(), ApplyError> {
        let trace = self.trace;
        let now = OpIndex(self.steps.len() as u32);
        let step = match &trace.steps[at.0 as usize] {
            Step::Call(call) => {
                let inputs = self.inputs(at, call, Version::Ended)?;
                for output in &call.outputs {
                    *self.version(*output) = Version::Is(*output);
                    self.tensors[output.0 as usize].origin = Origin::Made(now);
                }
                Step::Call(Box::new(Call { inputs: inputs.into(), ..(**call).clone() }))
            }
            Step::Upload { output, host } => {
                *self.version(*output) = Version::Is(*output);
                self.tensors[output.0 as usize].origin = Origin::Made(now);
                Step::Upload { output: *output, host: *host }
            }
            Step::Free(tensor) => match *self.version(*tensor) {
                Version::Is(is) => {
                    *self.version(*tensor) = Version::Ended;
                    Step::Free(is)
                }
                // It has ended before.
                Version::Dropped => return Ok(()),
                Version::Unborn | Version::Ended => return Err(ApplyError::Misplaced(at)),
            },
            Step::Read(read) => {
                let tensor = read.tensor;
                let Version::Is(is) = *self.version(tensor) else {
                    return Err(ApplyError::Dropped { at, tensor });
                };
                if read.last {
                    *self.version(tensor) = Version::Ended;
                }
                Step::Read(Use { tensor: is, last: read.last })
            }
            Step::Mark(mark) => Step::Mark(mark.clone()),
        };
        self.push(step, StepOrigin::Recorded(at));
        Ok(())
    }
}
