//! A trace as a program for burn-router's runner: instructions for each step, with tensor numbers
//! of the program's own.
//!
//! Compiles the operations with `translate.rs`; `execute.rs` runs the instructions.

use std::collections::HashMap;

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{BaseOperationIr, FloatOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_std::DType;
use firebox_trace::{
    Bytes, Call, Category, Description, DescriptionIndex, Label, Mark, OpIndex, Step, TensorIndex,
    Trace,
};

use crate::replay::translate::{Template, Types};

/// One instruction of a step of the trace.
pub(crate) enum Instruction {
    /// Run an operation of burn-ir.
    Run(Box<OperationIr>),
    /// Make a tensor from host data, or in place of an operation that cannot be run.
    Upload(TensorIr),
    /// Read the values of a tensor.
    Read(TensorIr),
    /// Run what burn has queued.
    Drain,
}

/// A trace as a program. It is made step by step while it runs: a whole program would be the
/// largest thing that planning holds.
pub(crate) struct Program<'a> {
    trace: &'a Trace,
    types: &'a Types,
    templates: &'a mut Templates,
    /// The number of the trace's first tensor.
    first: u64,
    /// The numbers of the tensors that an earlier program has left.
    taken_over: HashMap<TensorIndex, TensorId>,
    /// The next number for a tensor that only a description knows.
    next: u64,
}

/// What to do before the first step.
pub(crate) struct Begin {
    /// Frees what an earlier program left and this one does not use.
    pub(crate) discarded: Vec<Instruction>,
    /// The tensors to make. Excludes those that an earlier program left.
    pub(crate) existing: Vec<TensorIr>,
}

/// What is alive after the last step.
pub(crate) struct End {
    /// Frees what no later program uses: batches, outputs.
    pub(crate) freed: Vec<Instruction>,
    pub(crate) left: Leftovers,
}

/// What a later program can use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leftovers {
    tensors: Vec<Left>,
    /// The first free tensor number.
    next: u64,
}

/// The descriptions of a trace, ready to be numbered.
pub(crate) type Templates = HashMap<DescriptionIndex, Template>;

/// A parameter, or a part of the optimizer's state, at the end of a program.
#[derive(Clone, Debug)]
pub(crate) struct Left {
    label: Label,
    tensor: TensorIr,
}

impl<'a> Program<'a> {
    /// Makes `trace` a program for a target with these element types. It runs after a program that
    /// has left `earlier`.
    ///
    /// A parameter or a part of the optimizer's state that exists before the trace is taken over
    /// from the earlier program if label, shape and element type are the same.
    ///
    /// # Panics
    ///
    /// If the trace contradicts itself.
    pub(crate) fn new(
        trace: &'a Trace,
        types: &'a Types,
        templates: &'a mut Templates,
        earlier: Leftovers,
    ) -> (Self, Begin) {
        let Leftovers { tensors: mut left, next: first } = earlier;
        let next = first + trace.tensors.len() as u64;
        let mut program = Self { trace, types, templates, first, taken_over: HashMap::new(), next };
        let mut existing = Vec::new();
        for tensor in trace.existing() {
            let form = program.made(tensor);
            let is_same = |left: &Left| {
                trace.tensor(tensor).label.as_deref() == Some(&left.label)
                    && left.tensor.shape == form.shape
                    && left.tensor.dtype == form.dtype
            };
            match left.iter().position(is_same) {
                Some(at) => {
                    let taken = left.remove(at);
                    program.taken_over.insert(tensor, taken.tensor.id);
                }
                None => existing.push(form),
            }
        }
        let discarded = left.into_iter().map(|left| drop_of(left.tensor)).collect();
        (program, Begin { discarded, existing })
    }

    /// Whether a tensor that exists before the trace was left by an earlier program.
    pub(crate) fn is_taken_over(&self, tensor: TensorIndex) -> bool {
        self.taken_over.contains_key(&tensor)
    }

    fn global(&self, tensor: TensorIndex) -> TensorId {
        let own = || TensorId::new(self.first + u64::from(tensor.0));
        self.taken_over.get(&tensor).copied().unwrap_or_else(own)
    }

    /// A tensor of the trace as it is when it is made.
    pub(crate) fn made(&self, tensor: TensorIndex) -> TensorIr {
        let info = self.trace.tensor(tensor);
        let dtype = self.types.translate(info.dtype);
        TensorIr::uninit(self.global(tensor), info.shape.clone(), dtype)
    }

    /// Splits what is alive before step `at` of the trace into what a later program may use and
    /// instructions that free the rest.
    pub(crate) fn end(self, at: OpIndex) -> End {
        let (mut tensors, mut freed) = (Vec::new(), Vec::new());
        for tensor in self.trace.alive_before(at) {
            let label = self.trace.tensor(tensor).label.as_deref().filter(|label| {
                matches!(label.category, Category::Parameter | Category::OptimizerState)
            });
            match label {
                Some(label) => {
                    tensors.push(Left { label: label.clone(), tensor: self.made(tensor) });
                }
                None => freed.push(self.free(tensor)),
            }
        }
        End { freed, left: Leftovers { tensors, next: self.next } }
    }

    /// The instructions of a step of the trace. Must be called once for each step, in order.
    pub(crate) fn step(&mut self, step: &Step) -> Vec<Instruction> {
        match step {
            Step::Call(call) => self.call(call),
            Step::Upload { output, .. } => {
                vec![Instruction::Upload(self.made(*output))]
            }
            Step::Free(tensor) => vec![self.free(*tensor)],
            Step::Read(read) => {
                let mut tensor = self.made(read.tensor);
                tensor.status = status(read.last);
                vec![Instruction::Read(tensor)]
            }
            Step::Mark(Mark::Drain) => vec![Instruction::Drain],
            Step::Mark(_) => Vec::new(),
        }
    }

    fn call(&mut self, call: &Call) -> Vec<Instruction> {
        let description = self.trace.description(call);
        if is_unknown(description) {
            return self.stand_in(call);
        }
        let inputs = call.inputs.iter().map(|input| input.tensor).enumerate();
        let inputs = inputs.map(|(number, tensor)| (number as u64, tensor));
        let outputs = description.outputs.iter().copied().zip(call.outputs.iter().copied());
        let numbers = inputs.chain(outputs);
        let mut numbers: HashMap<u64, TensorId> =
            numbers.map(|(local, tensor)| (local, self.global(tensor))).collect();
        let new = || Template::new(&description.operations, self.types);
        let template = self.templates.entry(call.description).or_insert_with(new);
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
        // What the call owns dies with it, whether or not the description uses it.
        let owned = call.inputs.iter().filter(|input| input.last).map(|input| input.tensor);
        let left = owned.filter(|tensor| !consumed.contains(&self.global(*tensor)));
        let left: Vec<TensorIndex> = left.collect();
        instructions.extend(left.into_iter().map(|tensor| self.free(tensor)));
        instructions
    }

    /// Allocates fresh memory for the results of a call that cannot be run, and for its workspace.
    fn stand_in(&mut self, call: &Call) -> Vec<Instruction> {
        let workspace = self.trace.description(call).workspace.filter(|bytes| *bytes > Bytes::ZERO);
        let workspace = workspace.map(|bytes| {
            self.next += 1;
            let words = bytes.get().div_ceil(size_of::<f32>() as u64) as usize;
            TensorIr::uninit(TensorId::new(self.next - 1), [words].into(), DType::F32)
        });
        let results = call.outputs.iter().map(|tensor| self.made(*tensor));
        let made = results.chain(workspace.clone()).map(Instruction::Upload);
        let owned = call.inputs.iter().filter(|input| input.last);
        let freed = owned.map(|input| self.free(input.tensor));
        made.chain(workspace.map(drop_of)).chain(freed).collect()
    }

    fn free(&self, tensor: TensorIndex) -> Instruction {
        drop_of(self.made(tensor))
    }
}

/// The names of the calls of a trace that cannot be run and whose memory nobody has stated, each
/// once.
pub(crate) fn unaccounted(trace: &Trace) -> Vec<String> {
    unaccounted_of(trace, trace.calls().map(|(_, call)| call))
}

/// The same of some calls.
pub(crate) fn unaccounted_of<'a>(
    trace: &Trace,
    calls: impl Iterator<Item = &'a Call>,
) -> Vec<String> {
    let unknown = calls.filter(|call| {
        let description = trace.description(call);
        is_unknown(description) && description.workspace.is_none()
    });
    let mut names: Vec<String> = Vec::new();
    for call in unknown {
        if !names.iter().any(|name| *name == call.name) {
            names.push(call.name.to_string());
        }
    }
    names
}

fn is_unknown(description: &Description) -> bool {
    description.operations.iter().any(is_unknown_to_the_runner)
}

fn drop_of(mut tensor: TensorIr) -> Instruction {
    tensor.status = TensorStatus::ReadWrite;
    Instruction::Run(Box::new(OperationIr::Drop(tensor)))
}

fn status(last: bool) -> TensorStatus {
    if last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly }
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
