//! How little a recipe can cost.

use firebox_trace::{Bytes, Step, Trace};

use crate::alive::{Alive, walk_alive};
use crate::cost::Demand;
use crate::lives::{Lives, NEVER};

/// A lower bound of what any recipe costs with which the tensors of `trace` take at most `limit`.
/// None if no recipe can reach it.
///
/// At every step, what is too much must have been dropped, of buffers that this step does not use.
/// Each of them costs at least its own call. The bound is the fractional knapsack of costs against
/// bytes, at the worst step.
pub fn lower_bound(trace: &Trace, limit: Bytes, demand: &Demand) -> Option<f64> {
    let lives = Lives::of(trace, demand.bools);
    let mut bound = Some(0.0_f64);
    walk_alive(trace, &lives.roots, |at, alive| {
        if let Some(least) = bound.filter(|_| alive.bytes > limit.get()) {
            let of_step = knapsack(&lives, at, alive, alive.bytes - limit.get(), demand);
            bound = of_step.map(|of_step| of_step.max(least));
        }
    });
    bound
}

/// The least cost of dropping `bytes` at a step.
fn knapsack(
    lives: &Lives<'_>,
    at: usize,
    alive: &Alive,
    bytes: u64,
    demand: &Demand,
) -> Option<f64> {
    let used = |root: usize| match &lives.trace.steps[at] {
        Step::Call(call) => {
            let inputs = call.inputs.iter().map(|input| input.tensor);
            inputs.chain(call.outputs.iter().copied()).any(|tensor| lives.root(tensor) == root)
        }
        Step::Upload { output, .. } => lives.root(*output) == root,
        Step::Read(read) => lives.root(read.tensor) == root,
        Step::Free(_) | Step::Mark(_) => false,
    };
    let can_go = |root: &usize| {
        let buffer = &lives.buffers[*root];
        alive.has(*root) && buffer.may_go() && !used(*root)
    };
    let mut droppable: Vec<(f64, u64)> = (0..lives.buffers.len())
        .filter(can_go)
        .map(|root| {
            let buffer = &lives.buffers[root];
            if lives.next_use(root, at) == NEVER {
                return (0.0, buffer.bytes);
            }
            match buffer.packed {
                Some(packed) => (2.0 * demand.conversion(buffer.bytes, packed), buffer.freed()),
                None => (demand.time[lives.made[root]], buffer.bytes),
            }
        })
        .collect();
    droppable.sort_by(|(a, of_a), (b, of_b)| (a / *of_a as f64).total_cmp(&(b / *of_b as f64)));
    let mut rest = bytes as f64;
    let mut cost = 0.0;
    for (of, size) in droppable {
        if rest <= 0.0 {
            break;
        }
        let share = (rest / size as f64).min(1.0);
        cost += of * share;
        rest -= size as f64;
    }
    (rest <= 0.0).then_some(cost)
}
