//! What is alive at each step of a trace, in buffers. The costs and the seeds ask.

use firebox_trace::{TensorIndex, Trace};

/// What is alive at a step of a trace.
pub(crate) struct Alive {
    /// How many tensors of each buffer, by its owner.
    count: Vec<u32>,
    /// The bytes of all buffers.
    pub(crate) bytes: u64,
}

impl Alive {
    pub(crate) fn has(&self, root: usize) -> bool {
        self.count[root] > 0
    }
}

/// Calls `visit` with what is alive at each step: with its results, and with what it uses up.
/// `roots` are the owners of the tensors' buffers.
pub(crate) fn walk_alive(
    trace: &Trace,
    roots: &[TensorIndex],
    mut visit: impl FnMut(usize, &Alive),
) {
    let mut alive = Alive { count: vec![0; trace.tensors.len()], bytes: 0 };
    let of = |tensor: TensorIndex| {
        let root = roots[tensor.0 as usize];
        (root.0 as usize, trace.tensor(root).bytes().get())
    };
    let begin = |alive: &mut Alive, tensor: TensorIndex| {
        let (root, bytes) = of(tensor);
        alive.count[root] += 1;
        alive.bytes += if alive.count[root] == 1 { bytes } else { 0 };
    };
    trace.existing().for_each(|tensor| begin(&mut alive, tensor));
    for (at, step) in trace.steps.iter().enumerate() {
        let (ends, begins) = step.deaths_and_births();
        begins.for_each(|tensor| begin(&mut alive, tensor));
        visit(at, &alive);
        for (root, bytes) in ends.map(of) {
            alive.count[root] -= 1;
            alive.bytes -= if alive.count[root] == 0 { bytes } else { 0 };
        }
    }
}
