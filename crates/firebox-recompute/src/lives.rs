//! The lives of a trace's tensors and buffers, as the selector sees them.

use burn_std::DType;
use firebox_trace::{Bytes, Mark, Origin, Step, TensorIndex, Trace};

use crate::cost::is_redoable;
use crate::masks::masks;
use crate::recipe::Anchors;

/// No step.
pub(crate) const NEVER: usize = usize::MAX;

/// A tensor and its views.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffer {
    pub(crate) bytes: u64,
    pub(crate) tensors: Vec<TensorIndex>,
    /// The steps that use it, but for those that make views of it, in order.
    pub(crate) uses: Vec<usize>,
    /// Whether calls make all of its tensors that may be repeated.
    pub(crate) is_redoable: bool,
    /// The bytes that it takes in packed form, if it is a mask.
    pub(crate) packed: Option<u64>,
    /// Whether one of its tensors is alive at the end.
    pub(crate) survives: bool,
}

impl Buffer {
    /// Whether it can be given up in the middle of its life, one way or the other.
    pub(crate) fn may_go(&self) -> bool {
        (self.is_redoable || self.packed.is_some()) && !self.survives && self.bytes > 0
    }

    /// The bytes that it leaves while it is given up.
    pub(crate) fn freed(&self) -> u64 {
        self.bytes - self.packed.unwrap_or(0)
    }
}

/// What is known about a trace before it is rewritten.
pub(crate) struct Lives<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) anchors: Anchors,
    /// The buffer of each tensor, by its owner.
    pub(crate) roots: Vec<TensorIndex>,
    /// By owner. Empty for tensors that own none.
    pub(crate) buffers: Vec<Buffer>,
    /// The step that makes each tensor. [`NEVER`] for those that existed.
    pub(crate) made: Vec<usize>,
    /// The step that ends each tensor. [`NEVER`] for those that survive.
    pub(crate) ended: Vec<usize>,
    /// Up to which step each tensor can be made again. Zero for those that cannot.
    pub(crate) remade_until: Vec<usize>,
    /// For each step, the end of the micro-step that it is in: beyond it nothing is recomputed.
    /// Zero outside of micro-steps.
    pub(crate) horizon: Vec<usize>,
}

impl<'a> Lives<'a> {
    /// `bools` is the type that masks are packed in, if any.
    pub(crate) fn of(trace: &'a Trace, bools: Option<DType>) -> Self {
        let count = trace.tensors.len();
        let roots = trace.buffers();
        let mut buffers = vec![Buffer::default(); count];
        let (mut made, mut ended) = (vec![NEVER; count], vec![NEVER; count]);
        for (at, step) in trace.steps.iter().enumerate() {
            let (ends, begins) = step.deaths_and_births();
            begins.for_each(|tensor| made[tensor.0 as usize] = at);
            ends.for_each(|tensor| ended[tensor.0 as usize] = at);
        }
        for (tensor, root) in roots.iter().enumerate() {
            let buffer = &mut buffers[root.0 as usize];
            let index = TensorIndex(tensor as u32);
            if index == *root {
                buffer.bytes = trace.tensor(index).bytes().get();
                buffer.is_redoable = true;
            }
            buffer.tensors.push(index);
            buffer.survives |= ended[tensor] == NEVER;
            let is_call = matches!(trace.tensor(index).origin, Origin::Made(at)
                if matches!(&trace.steps[at.0 as usize], Step::Call(call) if is_redoable(trace, call)));
            buffer.is_redoable &= is_call;
        }
        for (at, step) in trace.steps.iter().enumerate() {
            let of_view = |input: TensorIndex| match step {
                Step::Call(call) => call
                    .outputs
                    .iter()
                    .any(|made| roots[made.0 as usize] == roots[input.0 as usize]),
                _ => false,
            };
            let inputs: Vec<TensorIndex> = match step {
                Step::Call(call) => call.inputs.iter().map(|input| input.tensor).collect(),
                Step::Read(read) => vec![read.tensor],
                _ => continue,
            };
            for input in inputs.into_iter().filter(|input| !of_view(*input)) {
                let uses = &mut buffers[roots[input.0 as usize].0 as usize].uses;
                if uses.last() != Some(&at) {
                    uses.push(at);
                }
            }
        }
        if let Some(dtype) = bools {
            for mask in masks(trace, &roots) {
                let shape = &trace.tensor(TensorIndex(mask as u32)).shape;
                let packed = Bytes::of_elements(shape, dtype).get();
                buffers[mask].packed = Some(packed).filter(|packed| *packed < buffers[mask].bytes);
            }
        }
        let remade_until = remade_until(trace, &ended);
        let anchors = Anchors::of(trace);
        let horizon = horizon(trace);
        Self { trace, anchors, roots, buffers, made, ended, remade_until, horizon }
    }

    pub(crate) fn root(&self, tensor: TensorIndex) -> usize {
        self.roots[tensor.0 as usize].0 as usize
    }

    /// Whether all tensors of a buffer can be made again until they end. Others may be made of what
    /// is alive as recorded, also after its own last use.
    pub(crate) fn comes_back(&self, root: usize) -> bool {
        self.buffers[root].tensors.iter().all(|tensor| {
            let tensor = tensor.0 as usize;
            self.remade_until[tensor] >= self.ended[tensor]
        })
    }

    /// The first use of a buffer at or after a step. [`NEVER`] if there is none.
    pub(crate) fn next_use(&self, root: usize, from: usize) -> usize {
        let uses = &self.buffers[root].uses;
        uses.get(uses.partition_point(|at| *at < from)).copied().unwrap_or(NEVER)
    }
}

/// A tensor can be made again as long as all inputs of its call are there or can be made again.
/// What is dropped with a later use comes back for it, and stays until it ends.
fn remade_until(trace: &Trace, ended: &[usize]) -> Vec<usize> {
    let mut until = vec![0; trace.tensors.len()];
    for (_, call) in trace.calls().filter(|(_, call)| is_redoable(trace, call)) {
        let there = call.inputs.iter().map(|input| {
            let input = input.tensor.0 as usize;
            ended[input].max(until[input])
        });
        let least = there.min().unwrap_or(NEVER);
        call.outputs.iter().for_each(|output| until[output.0 as usize] = least);
    }
    until
}

fn horizon(trace: &Trace) -> Vec<usize> {
    let count = trace.steps.len();
    let marks = |step: &Step| step.is_mark(&Mark::MicroStep);
    if !trace.steps.iter().any(marks) {
        return vec![count; count];
    }
    let mut horizon = vec![0; count];
    let mut begin = None;
    for (at, step) in trace.steps.iter().enumerate() {
        match step {
            Step::Mark(Mark::MicroStep) => begin = Some(at),
            Step::Mark(Mark::MicroStepEnd(_)) => {
                if let Some(begin) = begin.take() {
                    horizon[begin..at].fill(at);
                }
            }
            _ => {}
        }
    }
    horizon
}
