//! A trace as a program for burn-router's runner: one list of instructions, with tensor numbers of its own.

use std::collections::HashMap;

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{BaseOperationIr, FloatOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use firebox_trace::{Call, DescriptionIndex, Step, TensorIndex, Trace};

use crate::translate::{Template, Types};

/// What to do in one step of the trace.
pub(crate) enum Instruction {
    /// Run an operation of burn-ir.
    Run(Box<OperationIr>),
    /// Make a tensor from host data, or in the place of an operation that cannot be run.
    Upload(TensorIr),
    /// Read the values of a tensor.
    Read(TensorIr),
    /// Run what burn has queued.
    Drain,
}

/// A trace, ready to be run as often as it takes.
pub(crate) struct Program {
    /// The tensors that exist before the first step, and the loader thread in whose pools each of them lies.
    pub(crate) existing: Vec<(TensorIr, Option<u16>)>,
    /// The instructions of each step.
    pub(crate) steps: Vec<Vec<Instruction>>,
    /// The names of the calls that cannot be run, each once.
    pub(crate) unaccounted: Vec<String>,
}

impl Program {
    /// Compiles `trace` for a target with these element types.
    ///
    /// # Panics
    ///
    /// If the trace contradicts itself.
    pub(crate) fn new(trace: &Trace, types: Types) -> Self {
        let existing = trace.existing();
        let existing =
            existing.map(|tensor| (made(trace, tensor, &types), trace.tensor(tensor).worker));
        let existing = existing.collect();
        let mut compiler = Compiler {
            trace,
            types,
            templates: HashMap::new(),
            next: trace.tensors.len() as u64,
            unaccounted: Vec::new(),
        };
        let steps = trace.steps.iter().map(|step| compiler.step(step)).collect();
        Self { existing, steps, unaccounted: compiler.unaccounted }
    }
}

struct Compiler<'a> {
    trace: &'a Trace,
    types: Types,
    templates: HashMap<DescriptionIndex, Template>,
    /// The next number for a tensor that only a description knows.
    next: u64,
    unaccounted: Vec<String>,
}

impl Compiler<'_> {
    fn step(&mut self, step: &Step) -> Vec<Instruction> {
        match step {
            Step::Call(call) => self.call(call),
            Step::Upload { output, .. } => {
                vec![Instruction::Upload(made(self.trace, *output, &self.types))]
            }
            Step::Free(tensor) => vec![self.free(*tensor)],
            Step::Read(read) => {
                let mut tensor = made(self.trace, read.tensor, &self.types);
                tensor.status = status(read.last);
                vec![Instruction::Read(tensor)]
            }
            Step::Mark(mark) if mark == Step::DRAIN => vec![Instruction::Drain],
            Step::Mark(_) => Vec::new(),
        }
    }

    fn call(&mut self, call: &Call) -> Vec<Instruction> {
        let description = self.trace.description(call);
        if description.operations.iter().any(is_unknown_to_the_runner) {
            return self.stand_in(call);
        }
        let template = self
            .templates
            .entry(call.description)
            .or_insert_with(|| Template::new(&description.operations, &self.types));
        let inputs = call.inputs.iter().map(|input| input.tensor).enumerate();
        let inputs = inputs.map(|(number, tensor)| (number as u64, global(tensor)));
        let outputs =
            description.outputs.iter().copied().zip(call.outputs.iter().copied().map(global));
        let mut numbers: HashMap<u64, TensorId> = inputs.chain(outputs).collect();
        let next = &mut self.next;
        let operations = template.number(|local| {
            *numbers.entry(local.value()).or_insert_with(|| {
                *next += 1;
                TensorId::new(*next - 1)
            })
        });
        let mut consumed = Vec::new();
        let mut instructions: Vec<Instruction> = Vec::new();
        for operation in operations {
            let ends = operation.inputs().filter(|t| t.status == TensorStatus::ReadWrite);
            consumed.extend(ends.map(|tensor| tensor.id));
            instructions.push(match operation {
                OperationIr::Init(init) => Instruction::Upload(init.out),
                operation => Instruction::Run(Box::new(operation)),
            });
        }
        // What the call owns dies with it, whether the description uses it or not.
        let owned = call.inputs.iter().filter(|input| input.last).map(|input| input.tensor);
        let left = owned.filter(|tensor| !consumed.contains(&global(*tensor)));
        let left: Vec<TensorIndex> = left.collect();
        instructions.extend(left.into_iter().map(|tensor| self.free(tensor)));
        instructions
    }

    /// Fresh memory for the results of a call that cannot be run.
    fn stand_in(&mut self, call: &Call) -> Vec<Instruction> {
        if !self.unaccounted.iter().any(|name| *name == call.name) {
            self.unaccounted.push(call.name.to_string());
        }
        let results = call.outputs.iter().map(|tensor| made(self.trace, *tensor, &self.types));
        let owned = call.inputs.iter().filter(|input| input.last);
        let freed = owned.map(|input| self.free(input.tensor));
        results.map(Instruction::Upload).chain(freed).collect()
    }

    fn free(&self, tensor: TensorIndex) -> Instruction {
        let mut tensor = made(self.trace, tensor, &self.types);
        tensor.status = TensorStatus::ReadWrite;
        Instruction::Run(Box::new(OperationIr::Drop(tensor)))
    }
}

fn global(tensor: TensorIndex) -> TensorId {
    TensorId::new(tensor.0 as u64)
}

fn status(last: bool) -> TensorStatus {
    if last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly }
}

/// A tensor of the trace as it is when it is made.
fn made(trace: &Trace, tensor: TensorIndex, types: &Types) -> TensorIr {
    let info = trace.tensor(tensor);
    TensorIr::uninit(global(tensor), info.shape.clone(), types.translate(info.dtype))
}

/// Whether burn-router's runner would panic at the operation (`runner.rs` of burn-router).
fn is_unknown_to_the_runner(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::Custom(_) => true,
        OperationIr::Float(_, FloatOperationIr::Quantize(_) | FloatOperationIr::Dequantize(_)) => {
            true
        }
        OperationIr::BaseFloat(base) => updates_otherwise_than_by_adding(base),
        OperationIr::BaseInt(base) => updates_otherwise_than_by_adding(base),
        OperationIr::BaseBool(base) => updates_otherwise_than_by_adding(base),
        _ => false,
    }
}

fn updates_otherwise_than_by_adding(operation: &BaseOperationIr) -> bool {
    match operation {
        BaseOperationIr::Scatter(scatter) => scatter.update != IndexingUpdateOp::Add,
        BaseOperationIr::SelectAssign(select) => select.update != IndexingUpdateOp::Add,
        _ => false,
    }
}
