//! What calls cost, and which may be repeated.

use std::collections::HashSet;

use burn_ir::OperationIr;
use burn_std::DType;
use firebox_trace::{Bytes, Call, Footprint, OpIndex, Step, Trace};

use crate::alive::walk_alive;
use crate::masks::{bytes_of, is_byte};

/// What each step of a trace takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The time of each step, in any unit.
    pub time: Vec<f64>,
    /// The memory that each step takes beside tensors while it runs.
    pub workspace: Vec<Bytes>,
    /// The time of a call that does nothing, and of each byte that a call reads or writes, for
    /// calls that the trace does not have.
    pub launch: f64,
    /// See [`launch`](Self::launch).
    pub per_byte: f64,
    /// The type of the device's booleans, if they take a byte: masks are packed in it.
    pub bools: Option<DType>,
    /// Whether the backend fuses operations, so that its queue is to be
    /// [drained](crate::Recipe::drains).
    pub drains: bool,
}

impl Demand {
    /// The demand of steps that take nothing beside tensors. Other calls take no time.
    pub fn of(time: Vec<f64>) -> Self {
        let workspace = vec![Bytes::ZERO; time.len()];
        Self { time, workspace, launch: 0.0, per_byte: 0.0, bools: None, drains: false }
    }

    /// The demand of a trace on a device, without workspace. The type of booleans is that of the
    /// trace's, if it has any that take a byte.
    pub fn new(trace: &Trace, rates: &Rates) -> Self {
        let (launch, per_byte) = (rates.launch, 1.0 / rates.bandwidth);
        Self { launch, per_byte, bools: bytes_of(trace), ..Self::of(rates.costs(trace)) }
    }

    /// Sets the type of the device's booleans. One that takes more than a byte changes nothing.
    pub fn with_bools(mut self, dtype: DType) -> Self {
        if is_byte(dtype) {
            self.bools = Some(dtype);
        }
        self
    }

    /// The time of packing or unpacking a mask of `bytes` bytes that takes `packed` then.
    pub(crate) fn conversion(&self, bytes: u64, packed: u64) -> f64 {
        self.launch + (bytes + packed) as f64 * self.per_byte
    }

    /// Counts as workspace what a footprint of the trace has at a step above the bytes of tensors.
    ///
    /// # Panics
    ///
    /// If the footprint has no timeline, or one of another trace.
    pub fn with_workspace(mut self, trace: &Trace, footprint: &Footprint) -> Self {
        assert_eq!(footprint.timeline.len(), trace.steps.len(), "each step has a moment");
        walk_alive(trace, &trace.buffers(), |at, alive| {
            self.workspace[at] = footprint.timeline[at].peak - Bytes::new(alive.bytes);
        });
        self
    }

    /// The time of all steps.
    pub fn total(&self) -> f64 {
        self.time.iter().sum()
    }
}

/// How fast a device computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Floating-point operations in a second.
    pub flops: f64,
    /// Bytes read and written in a second.
    pub bandwidth: f64,
    /// The same where an operation takes tensors of different shapes, one of which is repeated.
    pub mixed_bandwidth: f64,
    /// Seconds for a function of one number, such as an exponential.
    pub function: f64,
    /// Seconds for a call that does nothing.
    pub launch: f64,
}

impl Rates {
    /// An RTX 4090 in 32 bit: 82.6 Tflop/s and 1,008 GB/s, from NVIDIA's "Ada GPU architecture",
    /// 2022, appendix A.
    pub const RTX_4090: Self = Self::device(82.6e12, 1008e9);

    /// burn's Flex on two cores of a server (AMD EPYC), measured, in round numbers. What matters
    /// are the ratios between operations.
    pub const CPU: Self = Self {
        flops: 250e9,
        bandwidth: 8e9,
        mixed_bandwidth: 5.5e9,
        function: 1.3e-9,
        launch: 1e-7,
    };

    /// A device that computes so many floating-point operations and moves so many bytes in a
    /// second. Five microseconds for a launch, and as much time for a function of a number as for
    /// sixteen operations, are assumptions.
    pub const fn device(flops: f64, bandwidth: f64) -> Self {
        let function = 16.0 / flops;
        Self { flops, bandwidth, mixed_bandwidth: bandwidth, function, launch: 5e-6 }
    }

    /// The seconds of each step of a trace: what it computes or what it reads and writes, whatever
    /// takes longer, and a launch. Views cost nothing unless they are copies.
    pub fn costs(&self, trace: &Trace) -> Vec<f64> {
        let copies = Copies::of(trace);
        let cost = |(at, step): (OpIndex, &Step)| match step {
            Step::Call(call) if !call.is_view() || copies.0.contains(&at) => {
                let inputs = call.inputs.iter().map(|input| input.tensor);
                let bytes: u64 = inputs
                    .chain(call.outputs.iter().copied())
                    .map(|tensor| trace.tensor(tensor).bytes().get())
                    .sum();
                let is_mixed = is_elementwise(call) && has_several_shapes(trace, call);
                let bandwidth = if is_mixed { self.mixed_bandwidth } else { self.bandwidth };
                let (operations, functions) = work(trace, call);
                let computes = operations / self.flops + functions * self.function;
                computes.max(bytes as f64 / bandwidth) + self.launch
            }
            _ => 0.0,
        };
        trace.iter().map(cost).collect()
    }
}

/// The views of a trace that copy: a tensor whose elements do not lie in order gets another shape.
struct Copies(HashSet<OpIndex>);

impl Copies {
    fn of(trace: &Trace) -> Self {
        let mut in_order = vec![true; trace.tensors.len()];
        let mut copies = HashSet::new();
        for (at, call) in trace.calls().filter(|(_, call)| call.is_view()) {
            let (Some(input), Some(output)) = (call.inputs.first(), call.outputs.first()) else {
                continue;
            };
            let was_in_order = in_order[input.tensor.0 as usize];
            let reshapes = call.name.ends_with("_reshape");
            if reshapes && !was_in_order {
                copies.insert(at);
            }
            let moves = ["_transpose", "_swap_dims", "_permute", "_expand"];
            let moves = moves.iter().any(|view| call.name.ends_with(view));
            in_order[output.0 as usize] = reshapes || was_in_order && !moves;
        }
        Self(copies)
    }
}

fn is_elementwise(call: &Call) -> bool {
    const BINARY: [&str; 6] = ["_add", "_sub", "_mul", "_div", "_powf", "_mask_where"];
    BINARY.iter().any(|name| call.name.ends_with(name))
}

fn has_several_shapes(trace: &Trace, call: &Call) -> bool {
    let mut shapes = call.inputs.iter().map(|input| &trace.tensor(input.tensor).shape);
    let first = shapes.next();
    shapes.any(|shape| Some(shape) != first)
}

/// The floating-point operations of a call, and the functions of numbers. One operation for each
/// element of its results, where it is no product, no convolution and no function.
fn work(trace: &Trace, call: &Call) -> (f64, f64) {
    let shape = |at: usize| call.inputs.get(at).map(|input| &trace.tensor(input.tensor).shape);
    let elements = |at: usize| shape(at).map_or(0.0, |shape| shape.num_elements() as f64);
    let made = call.outputs.iter().map(|tensor| trace.tensor(*tensor).shape.num_elements() as f64);
    let made: f64 = made.sum();
    let last = |at: usize| shape(at).and_then(|shape| shape.last().copied()).unwrap_or(1) as f64;
    let first = |at: usize| shape(at).and_then(|shape| shape.first().copied()).unwrap_or(1) as f64;
    let flops = match &*call.name {
        "float_matmul" | "linear" => 2.0 * made * last(0),
        // (weight, gradient of the output) and (input, gradient of the output)
        "linear_x_backward" => 2.0 * made * last(1),
        "linear_weight_backward" => 2.0 * elements(0) * last(1),
        // (input, weight, gradient of the output): each element of the output has met one filter.
        name if name.starts_with("conv") && name.ends_with("bias_backward") => elements(2),
        name if name.starts_with("conv") && name.ends_with("_backward") => {
            2.0 * elements(2) * elements(1) / first(1)
        }
        name if name.starts_with("conv") => 2.0 * made * elements(1) / first(1),
        "attention" => 4.0 * made * shape(1).map_or(1.0, |keys| keys[keys.len() - 2] as f64),
        _ => made,
    };
    let functions = match &*call.name {
        "gelu" | "gelu_backward" => 2.0 * made,
        "float_exp" | "float_log" | "float_tanh" | "float_erf" | "float_sin" | "float_cos"
        | "float_powf" | "sigmoid" | "softmax" | "log_softmax" => made,
        _ => 0.0,
    };
    (flops, functions)
}

/// Whether a call may be repeated: it gives the same values again, and nothing else happens.
///
/// Not so random draws, memory without values, transfers between devices, positions of non-zero
/// elements, which are read, and calls that burn's intermediate representation does not have, such
/// as those of the user's own. Additions by index
/// may add up in another order on a GPU.
pub fn is_redoable(trace: &Trace, call: &Call) -> bool {
    const NEVER: [&str; 8] = [
        "random",
        "empty",
        "to_device",
        "argwhere",
        "scatter",
        "select_add",
        "embedding_backward",
        "deform_conv2d_backward",
    ];
    let is_foreign = |operation: &OperationIr| matches!(operation, OperationIr::Custom(_));
    !NEVER.iter().any(|word| call.name.contains(word))
        && !trace.description(call).operations.iter().any(is_foreign)
}
