//! A rewritten step, ready to run instead of a recorded one.

use burn_ir::OperationIr;
use firebox_trace::{Bytes, Call, Step, TensorIndex, Trace};

use crate::apply::{ApplyError, apply};
use crate::check::{CheckError, check};
use crate::recipe::{Recipe, Rewritten, StepOrigin};

/// Why a recipe makes no program of a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// The recipe is one for another trace.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The rewritten trace does not compute what the recorded one does.
    #[error(transparent)]
    Check(#[from] CheckError),
}

/// What a description takes apart from its operations: shapes and lists.
const DESCRIPTION: usize = 256;

/// Of which recorded tensor each tensor of a rewritten trace is a version. Repeats and unpacked
/// masks are versions of what was recorded.
fn versions(trace: &Trace, rewritten: &Rewritten) -> Vec<TensorIndex> {
    let count = rewritten.trace.tensors.len() as u32;
    let mut versions: Vec<TensorIndex> = (0..count).map(TensorIndex).collect();
    for (step, origin) in rewritten.trace.steps.iter().zip(&rewritten.origins) {
        let Step::Call(call) = step else { continue };
        match *origin {
            StepOrigin::Repeated(of) => {
                if let Step::Call(recorded) = &trace.steps[of.0 as usize] {
                    for (new, recorded) in call.outputs.iter().zip(&recorded.outputs) {
                        versions[new.0 as usize] = *recorded;
                    }
                }
            }
            StepOrigin::Packed | StepOrigin::Unpacked => {
                versions[call.outputs[0].0 as usize] = versions[call.inputs[0].tensor.0 as usize];
            }
            StepOrigin::Recorded(_) | StepOrigin::Dropped | StepOrigin::Drained => {}
        }
    }
    versions
}

/// A rewritten trace that was [verified](check), and stands for all recordings of the same step.
#[derive(Clone, Debug)]
pub struct Program {
    rewritten: Rewritten,
    /// The recorded tensor of which each tensor is a version. Itself for those without one.
    versions: Vec<TensorIndex>,
    steps: usize,
    tensors: usize,
    host_bytes: Bytes,
}

/// The host memory that a rewritten trace takes, with the numbers of its versions.
fn host_bytes(rewritten: &Rewritten, versions: &[TensorIndex]) -> Bytes {
    let Trace { tensors, steps, descriptions } = &rewritten.trace;
    let of_tensors = std::mem::size_of_val(tensors.as_slice());
    let of_steps = steps.len() * (size_of::<Step>() + size_of::<StepOrigin>());
    let of_calls = rewritten.trace.calls().count() * size_of::<Call>();
    let operations: usize =
        descriptions.iter().map(|description| description.operations.len()).sum();
    let of_descriptions = operations * size_of::<OperationIr>() + descriptions.len() * DESCRIPTION;
    let of_versions = std::mem::size_of_val(versions);
    Bytes::new((of_tensors + of_steps + of_calls + of_descriptions + of_versions) as u64)
}

impl Program {
    /// Rewrites a trace and verifies the result.
    ///
    /// # Errors
    ///
    /// If the recipe is for another trace, or the result computes something else.
    pub fn new(trace: &Trace, recipe: &Recipe) -> Result<Self, ProgramError> {
        let rewritten = apply(trace, recipe)?;
        check(trace, &rewritten)?;
        let versions = versions(trace, &rewritten);
        let host_bytes = host_bytes(&rewritten, &versions);
        let (steps, tensors) = (trace.steps.len(), trace.tensors.len());
        Ok(Self { rewritten, versions, steps, tensors, host_bytes })
    }

    /// The rewritten trace.
    pub fn trace(&self) -> &Trace {
        &self.rewritten.trace
    }

    /// Where each of its steps comes from.
    pub fn origins(&self) -> &[StepOrigin] {
        &self.rewritten.origins
    }

    /// How many calls are repeated.
    pub fn repeats(&self) -> usize {
        self.rewritten.repeats()
    }

    /// How many masks are packed.
    pub fn packed(&self) -> usize {
        self.rewritten.packed()
    }

    /// The host memory that the program takes. Heuristic.
    pub fn host_bytes(&self) -> Bytes {
        self.host_bytes
    }

    /// Whether a recording makes the calls of the recording that was rewritten: in the same order,
    /// with the same descriptions and flags, on the same tensors. Ends of tensors in a row may have
    /// another order.
    ///
    /// The caller has looked the program up by the structure of the recording. This makes sure.
    pub fn is_of(&self, trace: &Trace) -> bool {
        let is_same = |(step, origin): (&Step, &StepOrigin)| {
            let StepOrigin::Recorded(of) = *origin else { return true };
            match (step, &trace.steps[of.0 as usize]) {
                (Step::Call(own), Step::Call(recorded)) => {
                    own.name == recorded.name
                        && own.description == recorded.description
                        && own.outputs == recorded.outputs
                        && own.inputs.len() == recorded.inputs.len()
                        && own.inputs.iter().zip(&recorded.inputs).all(|(own, recorded)| {
                            own.last == recorded.last
                                && self.versions[own.tensor.0 as usize] == recorded.tensor
                        })
                }
                (Step::Upload { output: own, .. }, Step::Upload { output: recorded, .. }) => {
                    own == recorded
                }
                (Step::Read(own), Step::Read(recorded)) => {
                    own.last == recorded.last
                        && self.versions[own.tensor.0 as usize] == recorded.tensor
                }
                (Step::Free(_), Step::Free(_)) | (Step::Mark(_), Step::Mark(_)) => true,
                _ => false,
            }
        };
        trace.steps.len() == self.steps
            && trace.tensors.len() == self.tensors
            && self.trace().steps.iter().zip(self.origins()).all(is_same)
    }
}
