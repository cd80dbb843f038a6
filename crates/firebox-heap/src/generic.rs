//! Rules that need no knowledge of a backend: the plain backend, and the guess for an unknown
//! operation.
//!
//! `run.rs` calls them.

use crate::arena::{Arena, View, bytes_of};
use crate::call::{Form, Invocation};
use crate::flex;
use crate::layout::Layout;

/// The guess for a call without a rule: its outputs are fresh memory, and it needs its inputs and
/// outputs once more as workspace.
pub(super) struct Guess {
    inputs: u64,
    live: u64,
}

impl Guess {
    /// Records what the guess needs, before a rule is tried.
    pub(super) fn new(arena: &Arena, invocation: &Invocation<'_>) -> Self {
        Self { inputs: invocation.inputs.iter().map(View::bytes).sum(), live: arena.live() }
    }

    /// Makes the outputs. Inputs that a rule freed before it gave up count as if they had been
    /// kept.
    pub(super) fn outputs(self, arena: &Arena, outputs: &[Form]) -> Vec<View> {
        let freed = self.live.saturating_sub(arena.live());
        let outputs = fresh(arena, outputs);
        let made: u64 = outputs.iter().map(View::bytes).sum();
        drop(arena.workspace(freed + self.inputs + made));
        outputs
    }
}

/// Every output in fresh memory.
pub(super) fn fresh(arena: &Arena, outputs: &[Form]) -> Vec<View> {
    outputs.iter().map(|form| arena.tensor(form.shape.clone(), form.dtype)).collect()
}

/// A plain CPU backend. Views share, elementwise operations overwrite an operand that they own,
/// everything else allocates its outputs, and convolutions unroll their input for the whole batch.
pub(super) fn simple(arena: &Arena, call: Invocation<'_>) -> Vec<View> {
    if flex::is_view(call.method) && call.inputs.len() == 1 {
        let views = call.inputs.into_iter().zip(call.outputs);
        return views.map(|(view, out)| view.with_layout(Layout::contiguous(out.shape))).collect();
    }
    if flex::is_elementwise(call.method)
        && let [out] = call.outputs.as_slice()
    {
        let bytes = bytes_of(out.shape.iter().product(), out.dtype);
        let owned = |input: &View| input.is_unique() && input.buffer.bytes == bytes;
        if let Some(overwritten) = call.inputs.iter().position(owned) {
            let view = call.inputs[overwritten].clone();
            return vec![view.with_layout(Layout::contiguous(out.shape.clone()))];
        }
    }
    let outputs = fresh(arena, &call.outputs);
    drop(arena.workspace_at_most(unrolled(&call, &outputs)));
    outputs
}

/// The bytes of a convolution's unrolled input: one column for each position of the kernel, each as
/// long as the kernel.
fn unrolled(call: &Invocation<'_>, outputs: &[View]) -> u64 {
    if !call.method.starts_with("conv") || call.method.ends_with("bias_backward") {
        return 0;
    }
    let transposed = call.method.contains("transpose");
    let backward = call.method.ends_with("backward");
    let weight = if transposed && call.method.ends_with("x_backward") { 0 } else { 1 };
    let met = match (transposed, backward) {
        (false, false) => outputs.first(),
        (false, true) => call.inputs.last(),
        (true, _) => call.inputs.first(),
    };
    let (Some(weight), Some(met)) = (call.inputs.get(weight), met) else { return 0 };
    let kernel = weight.elements() / weight.shape()[0].max(1);
    let positions = met.elements() / met.shape()[1].max(1);
    bytes_of(kernel * positions, met.dtype)
}
