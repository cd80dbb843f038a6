//! Computes a trace on the host, to inspect the numbers of a device's step without running a kernel
//! on the device.
//!
//! Element types become those in which Flex computes. 16-bit floats become 32-bit ones, so a
//! comparison does not compare rounding.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn_backend::TensorData;
use burn_flex::{Flex, FlexDevice};
use burn_ir::{OperationIr, TensorIr, TensorStatus};
use burn_router::{Runner, RunnerClient};
use burn_std::future::block_on;
use burn_std::{BoolStore, DType};
use firebox_trace::{TensorIndex, Trace};

use crate::replay::panic_message;
use crate::replay::program::{Instruction, Leftovers, Program, Templates, unaccounted};
use crate::replay::translate::Types;

/// Why a trace was not computed on the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotComputed {
    /// burn's interpreter of recorded operations does not know these calls.
    #[error("the host cannot compute {}", .0.join(", "))]
    Unknown(Vec<String>),
    /// The value of a tensor that existed before, or was made from host data, is missing.
    #[error("the value of tensor {} is not on the host", .0.0)]
    NoValue(TensorIndex),
    /// The deadline has passed.
    #[error("the host needs too long for it")]
    TooLong,
    /// An operation panicked.
    #[error("on the host: {0}")]
    Panicked(String),
}

/// Computes `trace` on Flex, with draws from Flex's generator, and returns the tensors `wanted`,
/// which must be alive at its end.
///
/// `value` has the value of a tensor that existed before the trace, or that the trace makes from
/// host data. `deadline` is when to give up, checked between steps.
///
/// # Errors
///
/// If a call is unknown, a value is missing, the deadline passes, or an operation panics, as
/// operations of Flex do on inputs that they do not support. A trace that contradicts itself, or a
/// wanted tensor that is gone at its end, also ends in [`NotComputed::Panicked`].
///
/// # Panics
///
/// If a call names a description that the trace does not have.
pub fn compute_values(
    trace: &Trace,
    wanted: &[TensorIndex],
    value: &mut dyn FnMut(TensorIndex) -> Option<TensorData>,
    deadline: Instant,
) -> Result<Vec<TensorData>, NotComputed> {
    let unknown = unaccounted(trace);
    if !unknown.is_empty() {
        return Err(NotComputed::Unknown(unknown));
    }
    let compute = || -> Result<Vec<TensorData>, NotComputed> {
        let types = host_types();
        let mut templates = Templates::new();
        let runner = Runner::<Flex>::new(FlexDevice);
        let none = Leftovers::default();
        let (mut program, begin) = Program::new(trace, &types, &mut templates, none);
        let mut upload = |made: &TensorIr, tensor: TensorIndex| -> Result<(), NotComputed> {
            let data = value(tensor).ok_or(NotComputed::NoValue(tensor))?;
            runner.register_tensor_data_id(made.id, data.convert_dtype(made.dtype));
            Ok(())
        };
        for (tensor, made) in trace.existing().zip(begin.existing) {
            upload(&made, tensor)?;
        }
        for step in &trace.steps {
            if Instant::now() > deadline {
                return Err(NotComputed::TooLong);
            }
            for instruction in program.step(step) {
                match instruction {
                    Instruction::Run(operation) => runner.register_op(*operation),
                    Instruction::Upload(made) => {
                        upload(&made, TensorIndex(made.id.value() as u32))?;
                    }
                    // The value was read while recording. What was done with it is in the trace.
                    Instruction::Read(tensor) if tensor.status == TensorStatus::ReadWrite => {
                        runner.register_op(OperationIr::Drop(tensor));
                    }
                    Instruction::Read(_) | Instruction::Drain => {}
                }
            }
        }
        Ok(wanted.iter().map(|tensor| read(&runner, program.made(*tensor))).collect())
    };
    catch_unwind(AssertUnwindSafe(compute))
        .unwrap_or_else(|panic| Err(NotComputed::Panicked(panic_message(&*panic))))
}

fn read(runner: &Runner<Flex>, mut made: TensorIr) -> TensorData {
    made.status = TensorStatus::ReadOnly;
    block_on(runner.read_tensor_async(made)).expect("the host can be read")
}

fn host_types() -> Types {
    let instead = vec![
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::Flex32, DType::F32),
        (DType::I32, DType::I64),
    ];
    Types { bools: BoolStore::Native, instead }
}
