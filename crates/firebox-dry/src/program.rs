//! A trace as a program for burn-router's runner: one list of instructions, with tensor numbers of its own.

use std::collections::HashMap;

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{BaseOperationIr, FloatOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use firebox_trace::{Call, Category, DescriptionIndex, Label, Step, TensorIndex, Trace};

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

/// A trace, ready to be run.
pub(crate) struct Program {
    /// The tensors to make before the first step, each with the loader thread on whose stream it lies. Those that an earlier
    /// program left behind are not among them.
    pub(crate) existing: Vec<(TensorIr, Option<u16>)>,
    /// What an earlier program left behind and this one does not go on with: to be freed before the first step.
    pub(crate) discarded: Vec<Instruction>,
    /// The instructions of each step.
    pub(crate) steps: Vec<Vec<Instruction>>,
    /// What is alive after the last step and is not gone on with: batches, outputs.
    pub(crate) ends: Vec<Instruction>,
    /// What a program that follows can go on with.
    pub(crate) left: Vec<Left>,
    /// The names of the calls that cannot be run, each once.
    pub(crate) unaccounted: Vec<String>,
    /// The first tensor number that is free.
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

impl Program {
    /// Compiles `trace` for a target with these element types, to run behind `earlier`.
    ///
    /// A parameter or a part of the optimizer's state that exists before the trace is what the earlier program has left of
    /// the same name, form and kind.
    ///
    /// # Panics
    ///
    /// If the trace contradicts itself.
    pub(crate) fn new(
        trace: &Trace,
        types: Types,
        templates: &mut Templates,
        earlier: Option<&Self>,
    ) -> Self {
        let mut left: Vec<Left> = earlier.map(|program| program.left.clone()).unwrap_or_default();
        let first = earlier.map_or(0, |program| program.next);
        let mut compiler = Compiler {
            trace,
            types,
            templates,
            first,
            taken_over: HashMap::new(),
            next: first + trace.tensors.len() as u64,
            unaccounted: Vec::new(),
        };
        let mut existing = Vec::new();
        for tensor in trace.existing() {
            let form = compiler.made(tensor);
            let is_same = |left: &Left| {
                trace.tensor(tensor).label.as_ref() == Some(&left.label)
                    && left.tensor.shape == form.shape
                    && left.tensor.dtype == form.dtype
            };
            match left.iter().position(is_same) {
                Some(at) => {
                    let taken = left.remove(at);
                    compiler.taken_over.insert(tensor, taken.tensor.id);
                }
                None => existing.push((form, trace.tensor(tensor).worker)),
            }
        }
        let steps = trace.steps.iter().map(|step| compiler.step(step)).collect();
        let discarded = left.into_iter().map(|left| drop_of(left.tensor)).collect();
        let (left, ends) = compiler.end();
        let Compiler { unaccounted, next, .. } = compiler;
        Self { existing, discarded, steps, ends, left, unaccounted, next }
    }
}

struct Compiler<'a> {
    trace: &'a Trace,
    types: Types,
    templates: &'a mut Templates,
    /// The number of the trace's first tensor.
    first: u64,
    /// The numbers of the tensors that an earlier program has left.
    taken_over: HashMap<TensorIndex, TensorId>,
    /// The next number for a tensor that only a description knows.
    next: u64,
    unaccounted: Vec<String>,
}

impl Compiler<'_> {
    fn global(&self, tensor: TensorIndex) -> TensorId {
        let own = || TensorId::new(self.first + u64::from(tensor.0));
        self.taken_over.get(&tensor).copied().unwrap_or_else(own)
    }

    /// A tensor of the trace as it is when it is made.
    fn made(&self, tensor: TensorIndex) -> TensorIr {
        let info = self.trace.tensor(tensor);
        let dtype = self.types.translate(info.dtype);
        TensorIr::uninit(self.global(tensor), info.shape.clone(), dtype)
    }

    /// What is alive at the end: what a following program may go on with, and the ends of all else.
    fn end(&self) -> (Vec<Left>, Vec<Instruction>) {
        let (mut left, mut ends) = (Vec::new(), Vec::new());
        for tensor in self.trace.survivors() {
            let label = self.trace.tensor(tensor).label.as_ref().filter(|label| {
                matches!(label.category, Category::Parameter | Category::OptimizerState)
            });
            match label {
                Some(label) => {
                    left.push(Left { label: label.clone(), tensor: self.made(tensor) });
                }
                None => ends.push(self.free(tensor)),
            }
        }
        (left, ends)
    }

    fn step(&mut self, step: &Step) -> Vec<Instruction> {
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
            Step::Mark(mark) if mark == Step::DRAIN => vec![Instruction::Drain],
            Step::Mark(_) => Vec::new(),
        }
    }

    fn call(&mut self, call: &Call) -> Vec<Instruction> {
        let description = self.trace.description(call);
        if description.operations.iter().any(is_unknown_to_the_runner) {
            return self.stand_in(call);
        }
        let inputs = call.inputs.iter().map(|input| input.tensor).enumerate();
        let inputs = inputs.map(|(number, tensor)| (number as u64, tensor));
        let outputs = description.outputs.iter().copied().zip(call.outputs.iter().copied());
        let numbers = inputs.chain(outputs);
        let mut numbers: HashMap<u64, TensorId> =
            numbers.map(|(local, tensor)| (local, self.global(tensor))).collect();
        let new = || Template::new(&description.operations, &self.types);
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
        // What the call owns dies with it, whether the description uses it or not.
        let owned = call.inputs.iter().filter(|input| input.last).map(|input| input.tensor);
        let left = owned.filter(|tensor| !consumed.contains(&self.global(*tensor)));
        let left: Vec<TensorIndex> = left.collect();
        instructions.extend(left.into_iter().map(|tensor| self.free(tensor)));
        instructions
    }

    /// Fresh memory for the results of a call that cannot be run.
    fn stand_in(&mut self, call: &Call) -> Vec<Instruction> {
        if !self.unaccounted.iter().any(|name| *name == call.name) {
            self.unaccounted.push(call.name.to_string());
        }
        let results = call.outputs.iter().map(|tensor| self.made(*tensor));
        let owned = call.inputs.iter().filter(|input| input.last);
        let freed = owned.map(|input| self.free(input.tensor));
        results.map(Instruction::Upload).chain(freed).collect()
    }

    fn free(&self, tensor: TensorIndex) -> Instruction {
        drop_of(self.made(tensor))
    }
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
