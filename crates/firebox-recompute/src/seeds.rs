//! Sets of buffers to drop that are good to begin with.
//!
//! Nearly all that is alive at the peak of a step was made in the forward pass and is used again in
//! the backward pass: it has one long gap without use, and the gaps lie around each other. What
//! must go at the peak is therefore a knapsack: the cheapest buffers for their bytes, until enough
//! are chosen.

use firebox_trace::{Bytes, Step, TensorIndex};

use crate::alive::walk_alive;
use crate::cost::Demand;
use crate::lives::{Lives, NEVER};

/// A buffer that may be dropped at the peak.
struct Candidate {
    root: usize,
    bytes: u64,
    /// What it takes to make it again, with what is gone by then, for each byte.
    ratio: f64,
}

/// The buffers that may be dropped, for a step that takes most memory.
pub(crate) struct Seeds {
    /// The cheapest first.
    candidates: Vec<Candidate>,
    /// What is alive at the peak, with its workspace.
    peak: u64,
    /// After which step each buffer has its longest gap. [`NEVER`] if it has none.
    pub(crate) gap: Vec<usize>,
}

impl Seeds {
    pub(crate) fn of(lives: &Lives<'_>, demand: &Demand, clock: &[f64]) -> Self {
        let (trace, costs) = (lives.trace, demand.time.as_slice());
        let gaps = gaps(lives, clock);
        let (peak, at, alive) = fullest(lives, &demand.workspace);
        let mut candidates = Vec::new();
        let mut seen = vec![0; trace.steps.len()];
        for (root, buffer) in lives.buffers.iter().enumerate() {
            let Some((begin, end)) = gaps[root] else { continue };
            let lies_in = begin < at && at < end;
            if !alive[root] || !lies_in || !buffer.may_go() {
                continue;
            }
            if let Some(packed) = buffer.packed {
                let ratio = 2.0 * demand.conversion(buffer.bytes, packed) / buffer.freed() as f64;
                candidates.push(Candidate { root, bytes: buffer.freed(), ratio });
                continue;
            }
            let can = end < lives.horizon[at]
                && buffer.tensors.iter().all(|tensor| {
                    let tensor = tensor.0 as usize;
                    lives.made[tensor] > begin || lives.remade_until[tensor] >= end
                });
            if can {
                let cost = chain(lives, costs, (root, end), &mut seen);
                let ratio = cost / buffer.bytes as f64;
                candidates.push(Candidate { root, bytes: buffer.bytes, ratio });
            }
        }
        candidates.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        let gap = gaps.iter().map(|gap| gap.map_or(NEVER, |(begin, _)| begin)).collect();
        Self { candidates, peak, gap }
    }

    /// The cheapest buffers that together take at least `more` times what is above `limit` at the
    /// peak. None if there are not enough.
    pub(crate) fn enough(&self, limit: u64, more: f64) -> Option<Vec<usize>> {
        let excess = self.peak.saturating_sub(limit) as f64 * more;
        let mut chosen = Vec::new();
        let mut bytes = 0;
        for candidate in &self.candidates {
            if bytes as f64 >= excess {
                break;
            }
            bytes += candidate.bytes;
            chosen.push(candidate.root);
        }
        (bytes as f64 >= excess).then_some(chosen)
    }
}

/// The longest time without use in the life of each buffer: the steps before and after it.
fn gaps(lives: &Lives<'_>, clock: &[f64]) -> Vec<Option<(usize, usize)>> {
    let mut latest = vec![NEVER; lives.buffers.len()];
    let mut gaps: Vec<Option<(usize, usize)>> = vec![None; lives.buffers.len()];
    let length = |(begin, end): (usize, usize)| clock[end] - clock[begin];
    for (at, step) in lives.trace.steps.iter().enumerate() {
        let Step::Call(call) = step else { continue };
        let inputs = call.inputs.iter().map(|input| input.tensor);
        for tensor in inputs.chain(call.outputs.iter().copied()) {
            let root = lives.root(tensor);
            let before = std::mem::replace(&mut latest[root], at);
            if before != NEVER && before < at {
                let gap = (before, at);
                if gaps[root].is_none_or(|known| length(known) < length(gap)) {
                    gaps[root] = Some(gap);
                }
            }
        }
    }
    gaps
}

/// The most bytes of a step with its workspace, the step, and which buffers are alive then.
fn fullest(lives: &Lives<'_>, workspace: &[Bytes]) -> (u64, usize, Vec<bool>) {
    let mut fullest = (0, 0, Vec::new());
    walk_alive(lives.trace, &lives.roots, |at, alive| {
        let taken = alive.bytes + workspace[at].get();
        if taken > fullest.0 {
            let buffers = 0..lives.buffers.len();
            fullest = (taken, at, buffers.map(|root| alive.has(root)).collect());
        }
    });
    fullest
}

/// What it takes to make a buffer again before a step, with the calls whose results have ended by
/// then. What is alive in the recorded step is taken to be there, or to be made again for its own
/// use.
fn chain(
    lives: &Lives<'_>,
    costs: &[f64],
    (root, before): (usize, usize),
    seen: &mut [usize],
) -> f64 {
    let mut cost = 0.0;
    let mut missing = lives.buffers[root].tensors.clone();
    missing.retain(|tensor| lives.ended[tensor.0 as usize] >= before);
    while let Some(tensor) = missing.pop() {
        let at = lives.made[tensor.0 as usize];
        let Some(Step::Call(call)) = lives.trace.steps.get(at) else { continue };
        if std::mem::replace(&mut seen[at], root + 1) == root + 1 {
            continue;
        }
        cost += costs[at];
        let gone = |tensor: &TensorIndex| {
            lives.ended[tensor.0 as usize] < before && lives.made[tensor.0 as usize] != NEVER
        };
        missing.extend(call.inputs.iter().map(|input| input.tensor).filter(gone));
    }
    cost
}
