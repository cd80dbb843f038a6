//! Runs a trace on the simulated heap, step by step.
//!
//! `lib.rs` calls [`run`]; the rules of `flex` and `generic.rs` allocate and free.

use std::collections::VecDeque;
use std::rc::Rc;

use burn_ir::{BaseOperationIr, OperationIr, TensorIr, TensorStatus};
use firebox_trace::{
    Bytes, Call, Description, Estimate, Footprint, Moment, OpIndex, Origin, Step, TensorIndex,
    Trace, Use,
};
use rustc_hash::FxHashMap;

use crate::arena::{Arena, Buffer, Source, Tenancy, View};
use crate::call::{Form, Invocation, Made, NoRule, method_of};
use crate::flex::{self, Model};
use crate::layout::Layout;
use crate::{Backend, Heap, attribution, generic};

/// Runs `trace` and reports the memory that it took.
pub(super) fn run(trace: &Trace, heap: &Heap) -> Footprint {
    let arena = Arena::new(heap.threads, heap.kept_per_thread);
    let mut run = Run::begin(trace, heap.backend, arena);
    let timeline = (0..trace.steps.len()).map(|step| run.step(step)).collect();
    run.report(timeline)
}

/// A run in progress.
struct Run<'a> {
    trace: &'a Trace,
    backend: Backend,
    arena: Arena,
    /// The live tensors, by their number.
    tensors: Vec<Option<Box<View>>>,
    /// The host data of future uploads, in order.
    host: VecDeque<Rc<Buffer>>,
    baseline: Bytes,
    unaccounted: Vec<String>,
}

impl<'a> Run<'a> {
    /// The state before the first step: the tensors that exist, and the host data of the recording.
    fn begin(trace: &'a Trace, backend: Backend, arena: Arena) -> Self {
        let mut run = Self {
            trace,
            backend,
            arena,
            tensors: vec![None; trace.tensors.len()],
            host: VecDeque::new(),
            baseline: Bytes::ZERO,
            unaccounted: Vec::new(),
        };
        for (index, tensor) in trace.tensors.iter().enumerate() {
            if tensor.origin == Origin::Existing {
                let bytes = tensor.bytes();
                run.baseline += bytes;
                let buffer = run.arena.allocate(bytes.get(), Source::Existing);
                let layout = Layout::contiguous(tensor.shape.to_vec());
                let view = View { buffer, layout, dtype: tensor.dtype };
                run.bind(TensorIndex(index as u32), view, 0);
            }
        }
        for step in &trace.steps {
            if let Step::Upload { host, .. } = step {
                run.host.push_back(run.arena.allocate(host.get(), Source::Host));
            }
        }
        run
    }

    /// Runs one step.
    fn step(&mut self, at: usize) -> Moment {
        self.arena.begin(at as u32);
        match &self.trace.steps[at] {
            Step::Call(call) => self.call(call, at as u32),
            Step::Upload { output, .. } => self.upload(*output, at),
            Step::Free(tensor) => drop(self.unbind(*tensor, at as u32)),
            Step::Read(read) => self.read(read, at as u32),
            Step::Mark(_) => {}
        }
        let (live, peak) = self.arena.moment();
        Moment { live, peak }
    }

    /// Host data becomes a tensor. The backend takes the block over, or converts it if the sizes
    /// differ.
    fn upload(&mut self, output: TensorIndex, at: usize) {
        let form = self.form(output);
        let host = self.host.pop_front().expect("every upload has host data");
        let layout = Layout::contiguous(form.shape.clone());
        let view = View { buffer: host, layout, dtype: form.dtype };
        let view =
            if view.covers_buffer() { view } else { self.arena.tensor(form.shape, form.dtype) };
        self.bind(output, view, at as u32);
    }

    /// Passes the values to the program. No copy is made if the tensor is the only one on its
    /// buffer and covers it. A contiguous tensor that must be copied is copied twice, to align it.
    fn read(&mut self, read: &Use, at: u32) {
        let view = self.argument(*read, at);
        if !view.layout.is_contiguous_from_start() {
            drop(view.to_contiguous(&self.arena));
        } else if !(view.is_unique() && view.covers_buffer()) {
            drop(self.arena.tensor_from_bytes(view.shape(), view.dtype));
        }
    }

    fn call(&mut self, call: &Call, at: u32) {
        let inputs = self.arguments(&call.inputs, at);
        let outputs: Vec<Form> = call.outputs.iter().map(|output| self.form(*output)).collect();
        let description = self.trace.description(call);
        let ir = &description.operations;
        let invocation = Invocation { method: &call.name, inputs, outputs, ir };
        let made = match self.backend {
            _ if description.workspace.is_some() => self.custom(description, invocation),
            Backend::Simple => generic::simple(&self.arena, invocation),
            Backend::Flex => self.flex(call, invocation),
        };
        for (output, view) in call.outputs.iter().zip(made) {
            self.bind(*output, view, at);
        }
    }

    /// Applies the rule of the call, or the conservative guess if there is none.
    fn flex(&mut self, call: &Call, invocation: Invocation<'_>) -> Vec<View> {
        let guess = generic::Guess::new(&self.arena, &invocation);
        let made = match flex::model(invocation.method) {
            Some(Model::Whole(rule)) => rule(&self.arena, invocation),
            Some(Model::Decomposed) => {
                decomposed(&self.arena, self.trace.description(call), invocation)
            }
            None => Err(NoRule),
        };
        match made {
            Ok(made) if made.len() == call.outputs.len() => made,
            _ => {
                if !self.unaccounted.iter().any(|name| *name == call.name) {
                    self.unaccounted.push(call.name.to_string());
                }
                let outputs: Vec<Form> = call.outputs.iter().map(|out| self.form(*out)).collect();
                guess.outputs(&self.arena, &outputs)
            }
        }
    }

    /// A user-defined call. Its results are fresh memory, and its inputs stay alive until it is
    /// done.
    fn custom(&self, description: &Description, invocation: Invocation<'_>) -> Vec<View> {
        let made = generic::fresh(&self.arena, &invocation.outputs);
        drop(self.arena.workspace(description.workspace.unwrap_or_default().get()));
        made
    }

    fn form(&self, tensor: TensorIndex) -> Form {
        let info = self.trace.tensor(tensor);
        Form { shape: info.shape.to_vec(), dtype: info.dtype }
    }

    /// The handles that a call gets: its own for a last use, clones otherwise. A tensor that is
    /// passed twice is passed as two handles.
    fn arguments(&mut self, inputs: &[Use], at: u32) -> Vec<View> {
        let mut arguments = Vec::with_capacity(inputs.len());
        for (i, input) in inputs.iter().enumerate() {
            let same = |other: &&Use| other.tensor == input.tensor;
            let last = inputs.iter().filter(same).any(|other| other.last)
                && !inputs[i + 1..].iter().any(|other| same(&other));
            arguments.push(self.argument(Use { last, ..*input }, at));
        }
        arguments
    }

    fn argument(&mut self, input: Use, at: u32) -> View {
        let tensor = input.tensor;
        let view = self.tensors[tensor.0 as usize]
            .as_deref()
            .cloned()
            .expect("a tensor is alive when it is used");
        self.tenancy(&view, tensor, |tenancy| tenancy.used = at);
        if input.last {
            drop(self.unbind(tensor, at));
        }
        view
    }

    /// Updates the record of the tensor's stay on its buffer.
    fn tenancy(&self, view: &View, tensor: TensorIndex, note: impl FnOnce(&mut Tenancy)) {
        self.arena.with_state(|state| {
            let tenancies = &mut state.buffer(view.buffer.id).tensors;
            tenancies.iter_mut().rfind(|tenancy| tenancy.tensor == tensor).map(note);
        });
    }

    fn bind(&mut self, tensor: TensorIndex, view: View, at: u32) {
        let tenancy = Tenancy { tensor, from: at, to: None, used: at };
        self.arena.with_state(|state| state.buffer(view.buffer.id).tensors.push(tenancy));
        self.tensors[tensor.0 as usize] = Some(Box::new(view));
    }

    fn unbind(&mut self, tensor: TensorIndex, at: u32) -> View {
        let view = self.tensors[tensor.0 as usize].take().expect("a tensor is alive until it ends");
        self.tenancy(&view, tensor, |tenancy| tenancy.to = Some(at));
        *view
    }

    fn report(self, timeline: Vec<Moment>) -> Footprint {
        let at = self.arena.with_state(|state| state.peak_step);
        let estimate = match self.arena.with_state(|state| state.bounded) {
            _ if self.backend == Backend::Simple || !self.unaccounted.is_empty() => {
                Estimate::Heuristic
            }
            true => Estimate::UpperBound,
            false => Estimate::Exact,
        };
        Footprint {
            peak: self.arena.with_state(|state| Bytes::new(state.peak)),
            at: OpIndex(at),
            op: self
                .trace
                .steps
                .get(at as usize)
                .map_or(String::new(), |step| step.name().to_owned()),
            baseline: self.baseline,
            kept: self.arena.with_state(|state| Bytes::new(state.peak - state.peak_beside_kept)),
            stays: self.arena.with_state(|state| Bytes::new(state.kept)),
            categories: attribution::at_peak(self.trace, &self.arena),
            timeline,
            estimate,
            unaccounted: self.unaccounted,
            paging: None,
        }
    }
}

/// Runs the decomposition of a call, as does a backend that has only the method's default
/// implementation.
fn decomposed(arena: &Arena, description: &Description, invocation: Invocation<'_>) -> Made {
    let mut locals: FxHashMap<u64, View> = (0..).zip(invocation.inputs).collect();
    for op in &description.operations {
        if let OperationIr::Drop(tensor) = op {
            locals.remove(&tensor.id.value());
            continue;
        }
        let inputs = op.inputs().map(|input| take(&mut locals, input).ok_or(NoRule));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs: Vec<&TensorIr> = op.outputs().collect();
        let made = if is_alias(op) { inputs } else { part(arena, op, inputs, &outputs)? };
        for (output, view) in outputs.iter().zip(made) {
            locals.insert(output.id.value(), view);
        }
    }
    let output = |output: &u64| locals.get(output).cloned().ok_or(NoRule);
    description.outputs.iter().map(output).collect()
}

/// One operation of a decomposition.
fn part(arena: &Arena, op: &OperationIr, inputs: Vec<View>, outputs: &[&TensorIr]) -> Made {
    let method = method_of(op);
    let Some(Model::Whole(rule)) = flex::model(&method) else { return Err(NoRule) };
    let outputs =
        outputs.iter().map(|out| Form { shape: out.shape.to_vec(), dtype: out.dtype }).collect();
    rule(arena, Invocation { method: &method, inputs, outputs, ir: std::slice::from_ref(op) })
}

/// The handle of an input of a decomposition: moved at its last use, cloned at earlier uses.
fn take(locals: &mut FxHashMap<u64, View>, input: &TensorIr) -> Option<View> {
    match input.status {
        TensorStatus::ReadWrite => locals.remove(&input.id.value()),
        _ => locals.get(&input.id.value()).cloned(),
    }
}

/// Whether an operation only gives its input another number. That is how a description says that a
/// method returns its argument unchanged.
fn is_alias(op: &OperationIr) -> bool {
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op
    else {
        return false;
    };
    matches!(op, BaseOperationIr::Reshape(op) if op.input.shape == op.out.shape)
}
