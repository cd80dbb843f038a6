//! Runs the steps of a program on a twin. `model.rs` and `pooled.rs` call it for each instruction
//! of `program.rs`.

use burn_backend::TensorData;
use burn_ir::{
    BackendIr, BaseOperationIr, CreationOpIr, FloatOperationIr, NumericOperationIr, OperationIr,
    TensorIr,
};
use burn_router::{Runner, RunnerClient};
use burn_std::{Bytes as HostBytes, future::block_on};
use firebox_trace::{Mark, Step};

use crate::device::DryDevice;
use crate::replay::program::Instruction;
use crate::twin::DryTwin;

pub(crate) fn is_settle(step: &Step) -> bool {
    step.is_mark(&Mark::Settle)
}

pub(crate) fn is_drain(step: &Step) -> bool {
    step.is_mark(&Mark::Drain)
}

pub(crate) fn execute<B: DryTwin>(
    runner: &Runner<B::Twin>,
    device: &DryDevice<B::Target>,
    instruction: Instruction,
) {
    match instruction {
        Instruction::Run(operation) => runner.register_op(without_draws(*operation)),
        Instruction::Upload(tensor) => upload(runner, &tensor),
        Instruction::Read(tensor) => drop(block_on(runner.read_tensor_async(tensor))),
        Instruction::Drain => B::drain(device),
    }
}

/// Makes a tensor as burn's backend makes one from host data: the buffer is requested immediately,
/// not when fusion gets to it. A dry device does not look at the data, so there is none.
pub(crate) fn upload<B: BackendIr>(runner: &Runner<B>, tensor: &TensorIr) {
    let (shape, dtype) = (tensor.shape.clone(), tensor.dtype);
    let bytes = HostBytes::from_bytes_vec(Vec::new());
    runner.register_tensor_data_id(tensor.id, TensorData { bytes, shape, dtype });
}

/// Replaces random numbers by an empty tensor of the same form. CubeCL has one generator for all
/// devices of a process, so drawing on a device that computes nothing would change what the real
/// one draws. Neither operation is fused with anything.
fn without_draws(operation: OperationIr) -> OperationIr {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Random(draw)) => {
            OperationIr::BaseFloat(BaseOperationIr::Empty(CreationOpIr { out: draw.out }))
        }
        OperationIr::NumericInt(_, NumericOperationIr::IntRandom(draw)) => {
            OperationIr::BaseInt(BaseOperationIr::Empty(CreationOpIr { out: draw.out }))
        }
        operation => operation,
    }
}
