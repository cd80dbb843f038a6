//! Computes a trace on the host, to inspect the numbers of a device's step without running a kernel
//! on the device.
//!
//! Element types become those in which Flex computes. 16-bit floats become 32-bit ones, so a
//! comparison does not compare rounding.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn_backend::TensorData;
use burn_flex::{Flex, FlexDevice};
use burn_ir::{TensorIr, TensorStatus};
use burn_router::{Runner, RunnerClient};
use burn_std::future::block_on;
use burn_std::{BoolStore, DType};
use firebox_trace::{Bytes, Origin, Step, TensorIndex, Trace};

use crate::replay::panic_message;
use crate::replay::program::{Instruction, Leftovers, Program, Templates, unaccounted_of};
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

/// What of a trace leads to some tensors.
pub struct Leading {
    /// Whether each step is one of them.
    steps: Vec<bool>,
    /// Whether each tensor is.
    tensors: Vec<bool>,
}

impl Leading {
    /// What leads to the tensors `wanted` from the tensors that are `known`, which no step needs to
    /// make.
    pub fn to(trace: &Trace, wanted: &[TensorIndex], known: &[TensorIndex]) -> Self {
        let mut tensors = vec![false; trace.tensors.len()];
        wanted.iter().for_each(|tensor| tensors[tensor.0 as usize] = true);
        let mut steps = vec![false; trace.steps.len()];
        for (at, step) in trace.steps.iter().enumerate().rev() {
            let leads = |made: &TensorIndex| tensors[made.0 as usize] && !known.contains(made);
            if step.outputs().iter().any(leads) {
                steps[at] = true;
                step.inputs().iter().for_each(|input| tensors[input.tensor.0 as usize] = true);
                step.outputs().iter().for_each(|made| tensors[made.0 as usize] = true);
            }
        }
        Self { steps, tensors }
    }

    /// The bytes of all tensors of `trace` that lead to those.
    pub fn bytes(&self, trace: &Trace) -> Bytes {
        let tensors = trace.tensors.iter().zip(&self.tensors).filter(|(_, leads)| **leads);
        tensors.map(|(tensor, _)| tensor.bytes()).sum()
    }

    fn has(&self, tensor: TensorIndex) -> bool {
        self.tensors[tensor.0 as usize]
    }
}

/// Computes the tensors `wanted` of `trace` on Flex, with draws from Flex's generator. Only what
/// leads to them is computed.
///
/// `value` has the value of a tensor that existed before the trace, or that the trace makes from
/// host data, or that is `known`: what it has for these takes the place of what the trace makes.
/// `deadline` is when to give up, checked between steps.
///
/// # Errors
///
/// If a call is unknown, a value is missing, the deadline passes, or an operation panics, as
/// operations of Flex do on inputs that they do not support. A trace that contradicts itself also
/// ends in [`NotComputed::Panicked`].
///
/// # Panics
///
/// If a call names a description that the trace does not have.
pub fn compute_values(
    trace: &Trace,
    wanted: &[TensorIndex],
    known: &[TensorIndex],
    value: &mut dyn FnMut(TensorIndex) -> Option<TensorData>,
    deadline: Instant,
) -> Result<Vec<TensorData>, NotComputed> {
    let leading = Leading::to(trace, wanted, known);
    let needed = || trace.steps.iter().zip(&leading.steps).filter(|(_, leads)| **leads);
    let calls = needed().filter_map(|(step, _)| match step {
        Step::Call(call) => Some(&**call),
        _ => None,
    });
    let unknown = unaccounted_of(trace, calls);
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
            if leading.has(tensor) {
                upload(&made, tensor)?;
            }
        }
        // What is wanted may be used up later.
        let mut found = vec![None; wanted.len()];
        let mut look = |program: &Program<'_>, made: &mut dyn FnMut(&TensorIndex) -> bool| {
            for (tensor, found) in wanted.iter().zip(&mut found) {
                if made(tensor) {
                    *found = Some(read(&runner, program.made(*tensor)));
                }
            }
        };
        look(&program, &mut |tensor| trace.tensor(*tensor).origin == Origin::Existing);
        for (step, leads) in trace.steps.iter().zip(&leading.steps) {
            if Instant::now() > deadline {
                return Err(NotComputed::TooLong);
            }
            let runs = *leads || matches!(step, Step::Free(tensor) if leading.has(*tensor));
            let instructions = if runs { program.step(step) } else { Vec::new() };
            for instruction in instructions {
                match instruction {
                    Instruction::Run(operation) => runner.register_op(*operation),
                    Instruction::Upload(made) => {
                        upload(&made, TensorIndex(made.id.value() as u32))?;
                    }
                    Instruction::Read(_) | Instruction::Drain => {}
                }
            }
            let is_known = |made: &&TensorIndex| leading.has(**made) && known.contains(made);
            let mut has_known = false;
            for made in step.outputs().iter().filter(is_known) {
                upload(&program.made(*made), *made)?;
                has_known = true;
            }
            if *leads || has_known {
                look(&program, &mut |tensor| step.outputs().contains(tensor));
            }
        }
        Ok(found.into_iter().map(|found| found.expect("a step makes it")).collect())
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
