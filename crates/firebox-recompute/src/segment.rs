//! A part of a trace as a trace of its own.

use std::collections::HashMap;
use std::ops::Range;

use firebox_trace::{Call, Mark, OpIndex, Origin, Step, TensorIndex, Trace, Use};

/// The steps of the model in each micro-step of a rehearsed iteration: from the mark of the
/// micro-step to the end of the backward pass, where the queue is drained.
pub fn model_steps(trace: &Trace) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut begin = None;
    for (at, step) in trace.steps.iter().enumerate() {
        match step {
            Step::Mark(Mark::MicroStep) => begin = Some(at + 1),
            Step::Mark(Mark::Drain) => found.extend(begin.take().map(|begin| begin..at)),
            _ => {}
        }
    }
    found
}

/// The number of steps before `at` that are no ends of tensors.
pub fn anchors_before(trace: &Trace, at: usize) -> u32 {
    let is_anchor = |step: &&Step| !matches!(step, Step::Free(_));
    trace.steps[..at].iter().filter(is_anchor).count() as u32
}

/// The steps of a trace as a trace of their own. Tensors that earlier steps made existed before it.
/// What later steps use, and what later steps end, survives it.
///
/// # Panics
///
/// If the trace does not have the steps.
pub fn segment(trace: &Trace, steps: Range<usize>) -> Trace {
    let mut numbers: HashMap<TensorIndex, TensorIndex> = HashMap::new();
    let mut part = Trace { descriptions: trace.descriptions.clone(), ..Trace::default() };
    for (at, step) in trace.steps[steps].iter().enumerate() {
        let mut number = |tensor: TensorIndex, origin: Origin| {
            *numbers.entry(tensor).or_insert_with(|| {
                let mut info = trace.tensor(tensor).clone();
                info.origin = origin;
                part.tensors.push(info);
                TensorIndex(part.tensors.len() as u32 - 1)
            })
        };
        let made = Origin::Made(OpIndex(at as u32));
        let step = match step {
            Step::Call(call) => {
                let inputs = call.inputs.iter().map(|input| Use {
                    tensor: number(input.tensor, Origin::Existing),
                    last: input.last,
                });
                let inputs = inputs.collect();
                let outputs = call.outputs.iter().map(|output| number(*output, made)).collect();
                let Call { name, description, .. } = &**call;
                let (name, description) = (name.clone(), *description);
                Step::Call(Box::new(Call { name, inputs, outputs, description }))
            }
            Step::Upload { output, host } => {
                Step::Upload { output: number(*output, made), host: *host }
            }
            Step::Free(tensor) => Step::Free(number(*tensor, Origin::Existing)),
            Step::Read(read) => {
                Step::Read(Use { tensor: number(read.tensor, Origin::Existing), last: read.last })
            }
            Step::Mark(mark) => Step::Mark(mark.clone()),
        };
        part.steps.push(step);
    }
    part
}
