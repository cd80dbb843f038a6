//! Steps of a program on a twin: what each instruction asks of it.

use burn_backend::TensorData;
use burn_ir::{
    BackendIr, BaseOperationIr, CreationOpIr, FloatOperationIr, NumericOperationIr, OperationIr,
    TensorIr,
};
use burn_router::{Runner, RunnerClient};
use burn_std::{Bytes as HostBytes, future::block_on};
use firebox_trace::Step;

use crate::device::DryDevice;
use crate::program::Instruction;
use crate::twin::DryTwin;

pub(crate) fn is_settle(step: &Step) -> bool {
    step.is_mark(Step::SETTLE)
}

pub(crate) fn is_drain(step: &Step) -> bool {
    step.is_mark(Step::DRAIN)
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

/// Makes a tensor as burn's backend makes one from host data: the buffer is asked for at once, not when fusion gets to
/// it. The data itself is not looked at on a dry device, and so there is none.
pub(crate) fn upload<B: BackendIr>(runner: &Runner<B>, tensor: &TensorIr) {
    let (shape, dtype) = (tensor.shape.clone(), tensor.dtype);
    let bytes = HostBytes::from_bytes_vec(Vec::new());
    runner.register_tensor_data_id(tensor.id, TensorData { bytes, shape, dtype });
}

/// A tensor of the same form in place of random numbers. CubeCL has one generator for all devices of a process, and drawing on one
/// that computes nothing would change what the real one draws. Neither is fused with anything.
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
