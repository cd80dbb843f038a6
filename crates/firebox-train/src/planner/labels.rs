//! Labels the tensors of a rehearsed step by purpose: parameters and gradients by their `ParamId`,
//! the optimizer's state by its lifetime. The footprint is broken down by these labels.

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};
use firebox_lazy::{LazyBackend, label, label_of};
use firebox_trace::{Category, Label, Mark, Origin, Step, TensorIndex, TensorInfo, Trace};
use rustc_hash::{FxHashMap, FxHashSet};

/// Labels the tensors of a module as parameters, each with its path. Does nothing outside of a
/// recording.
pub fn label_parameters<B: LazyBackend, M: Module<B>>(module: &M) {
    module.visit(&mut Parameters { path: Vec::new() });
}

struct Parameters {
    path: Vec<String>,
}

impl Parameters {
    fn label(&self) -> Label {
        Label { category: Category::Parameter, name: self.path.join(".") }
    }
}

impl<B: LazyBackend> ModuleVisitor<B> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let TensorPrimitive::Float(tensor) = param.val().into_primitive() {
            label(&B::lazy_float(&tensor), self.label());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        label(&B::lazy_int(&param.val().into_primitive()), self.label());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        label(&B::lazy_bool(&param.val().into_primitive()), self.label());
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Labels the gradients of a module's parameters, each with the path of its parameter. The module
/// may be a part of the one whose parameters were labelled.
pub(crate) fn label_gradients<B, M>(module: &M, grads: &GradientsParams, category: Category)
where
    B: AutodiffBackend + LazyBackend,
    B::InnerBackend: LazyBackend,
    M: AutodiffModule<B>,
{
    module.visit(&mut Gradients { grads, category, path: Vec::new() });
}

struct Gradients<'a> {
    grads: &'a GradientsParams,
    category: Category,
    path: Vec<String>,
}

impl<B> ModuleVisitor<B> for Gradients<'_>
where
    B: AutodiffBackend + LazyBackend,
    B::InnerBackend: LazyBackend,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = self.grads.get::<B::InnerBackend, D>(param.id);
        if let Some(TensorPrimitive::Float(grad)) = grad.map(Tensor::into_primitive) {
            let parameter = label_of(&B::lazy_float(&param.val().into_primitive().tensor()));
            let parameter = parameter.filter(|label| label.category == Category::Parameter);
            let name = parameter.map_or_else(|| self.path.join("."), |label| label.name);
            let grad = <B::InnerBackend as LazyBackend>::lazy_float(&grad);
            label(&grad, Label { category: self.category, name });
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Labels tensors by their lifetimes. Optimizer state is any tensor, except parameters, that an
/// optimizer step makes or takes over and that is still alive after it. (The first velocity of SGD
/// is the first gradient.) It is also any existing tensor whose first use is in an optimizer step.
/// All other existing tensors count as inputs, as the tensors of a batch do.
pub(crate) fn label_by_lifetime(trace: &mut Trace) {
    let state = optimizer_state(trace);
    for index in 0..trace.tensors.len() as u32 {
        let index = TensorIndex(index);
        let tensor = &mut trace.tensors[index.0 as usize];
        let given = tensor.label.as_ref().map(|label| label.category);
        let category = match given {
            Some(Category::Parameter) => continue,
            _ if state.contains(&index) => Category::OptimizerState,
            Some(_) => continue,
            None if tensor.origin == Origin::Existing => Category::Input,
            None => continue,
        };
        tensor.label = Some(Label { category, name: String::new() }.into());
    }
}

/// Ends existing parameters and optimizer state where an optimizer step replaces them.
///
/// In a rehearsal the learner itself still holds them. In training the optimizer takes its state
/// apart tensor by tensor, while the learner keeps the whole old model until it has the new one.
pub(crate) fn retire_what_is_replaced(trace: &mut Trace) {
    let mut last_uses: FxHashMap<TensorIndex, LastUse> = FxHashMap::default();
    let mut optimizer_step = None;
    for (at, step) in trace.steps.iter().enumerate() {
        match step {
            Step::Mark(mark) => optimizer_step = (*mark == Mark::OptimizerStep).then_some(at),
            Step::Call(call) => {
                for (i, input) in call.inputs.iter().enumerate() {
                    let tensor = trace.tensor(input.tensor);
                    let label = tensor.label.as_ref().map(|label| label.category);
                    let Some(category @ (Category::Parameter | Category::OptimizerState)) = label
                    else {
                        continue;
                    };
                    if !existed(trace, tensor, category) {
                        continue;
                    }
                    match optimizer_step {
                        Some(begin) => {
                            let last = LastUse { category, begin, at, input: i };
                            last_uses.insert(input.tensor, last);
                        }
                        None => _ = last_uses.remove(&input.tensor),
                    }
                }
            }
            _ => {}
        }
    }
    // Keyed by the mark at which the optimizer step begins.
    let mut old_models: FxHashMap<usize, Vec<TensorIndex>> = FxHashMap::default();
    for (tensor, last) in last_uses {
        if last.category == Category::Parameter {
            old_models.entry(last.begin).or_default().push(tensor);
        } else if let Step::Call(call) = &mut trace.steps[last.at] {
            call.inputs[last.input].last = true;
        }
    }
    if old_models.is_empty() {
        return;
    }
    let mut replaced = Vec::new();
    let mut steps = Vec::with_capacity(trace.steps.len());
    for (at, step) in std::mem::take(&mut trace.steps).into_iter().enumerate() {
        if matches!(step, Step::Mark(_)) {
            steps.extend(replaced.drain(..).map(Step::Free));
            if let Some(mut old) = old_models.remove(&at) {
                old.sort_unstable();
                replaced = old;
            }
        }
        steps.push(step);
    }
    steps.extend(replaced.into_iter().map(Step::Free));
    trace.steps = steps;
    trace.renumber_origins();
}

/// Whether a tensor existed before the rehearsal. State that was parked then is uploaded in it.
fn existed(trace: &Trace, tensor: &TensorInfo, category: Category) -> bool {
    match tensor.origin {
        Origin::Existing => true,
        Origin::Made(made) => {
            let is_upload = matches!(trace.steps[made.0 as usize], Step::Upload { .. });
            is_upload && category == Category::OptimizerState
        }
    }
}

/// The last use of a tensor in an optimizer step.
struct LastUse {
    category: Category,
    /// The mark at which the optimizer step begins.
    begin: usize,
    /// The call, and the index of the input.
    at: usize,
    input: usize,
}

fn optimizer_state(trace: &Trace) -> FxHashSet<TensorIndex> {
    let mut state = FxHashSet::default();
    let mut seen = FxHashSet::default();
    // Outputs of optimizer steps, and gradients given to them, that are still alive.
    let mut theirs: FxHashSet<TensorIndex> = FxHashSet::default();
    let mut in_optimizer = false;
    let is_gradient = |tensor: TensorIndex| {
        let label = trace.tensor(tensor).label.as_ref().map(|label| label.category);
        matches!(label, Some(Category::Gradient | Category::AccumulatedGradient))
    };
    for step in &trace.steps {
        match step {
            Step::Mark(mark) if *mark == Mark::OptimizerStep => in_optimizer = true,
            Step::Mark(mark) if *mark == Mark::IterationEnd => {
                in_optimizer = false;
                state.extend(theirs.drain());
            }
            Step::Call(call) => {
                for input in &call.inputs {
                    let existing = trace.tensor(input.tensor).origin == Origin::Existing;
                    if seen.insert(input.tensor) && existing && in_optimizer {
                        state.insert(input.tensor);
                    }
                    if in_optimizer && is_gradient(input.tensor) {
                        theirs.insert(input.tensor);
                    }
                    if input.last {
                        theirs.remove(&input.tensor);
                    }
                }
                seen.extend(&call.outputs);
                if in_optimizer {
                    theirs.extend(&call.outputs);
                }
            }
            Step::Free(tensor) => {
                theirs.remove(tensor);
            }
            Step::Upload { .. } | Step::Read(_) | Step::Mark(_) => {}
        }
    }
    state
}
