//! Which module of the model each operation and each tensor of a trace belongs to.
//!
//! A backend sees operations, not modules. Known are the tensors that are parameters and gradients,
//! by their labels. The rest follows from the flow of data:
//!
//! - An operation that takes a parameter, or a view of one, belongs to the parameter's module.
//! - Another operation of the forward pass belongs to the innermost module that contains both what
//!   it takes its data from and what it gives its result to: a softmax between the query and the
//!   output of an attention belongs to the attention. If only the model contains both, it belongs
//!   to where its data comes from, as an activation after a convolution does.
//! - An operation of the backward pass belongs to a module if its results end only in gradients of
//!   that module. Otherwise it belongs to the module of its parameter, or of the activation that it
//!   takes from the forward pass, or of the gradient that it takes.
//! - An operation of the optimizer step, and the state that it reads and makes, belongs to the
//!   module whose parameter it steps.

use std::ops::Range;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::{Bytes, Call, Category, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo, Trace};

/// The memory of one module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleBytes {
    /// The path of the module, such as `layers.3.attention.query`. `None` for what belongs to no
    /// module, such as the batch.
    pub module: Option<String>,
    /// Its bytes.
    pub bytes: Bytes,
}

/// The module of each tensor and of each step of a trace, as far as it is known.
///
/// ```
/// use firebox_trace::{Modules, Trace};
///
/// let trace = Trace::default();
/// let modules = Modules::of(&trace);
/// assert_eq!(modules.step(firebox_trace::OpIndex(0)), None);
/// ```
#[derive(Clone, Debug)]
pub struct Modules {
    paths: Vec<String>,
    tensors: Vec<Option<Id>>,
    steps: Vec<Option<Id>>,
}

/// A module: the position of its path.
type Id = u32;

impl Modules {
    /// Finds the modules of a trace whose parameters and gradients have labels.
    ///
    /// # Panics
    ///
    /// If the trace contradicts itself; [`Trace::check`] says how.
    pub fn of(trace: &Trace) -> Self {
        let mut finder = Finder::new(trace);
        let mut begin = 0;
        let mut optimizes = false;
        for (at, step) in trace.steps.iter().enumerate() {
            let Step::Mark(mark) = step else { continue };
            if matches!(mark, Mark::MicroStep | Mark::OptimizerStep | Mark::IterationEnd) {
                finder.part(begin..at, optimizes);
                (begin, optimizes) = (at, *mark == Mark::OptimizerStep);
            }
        }
        finder.part(begin..trace.steps.len(), optimizes);
        let Finder { paths, tensors, steps, .. } = finder;
        Self { paths, tensors, steps }
    }

    /// The path of the module that a tensor belongs to, such as `layers.3.attention.query`.
    pub fn tensor(&self, tensor: TensorIndex) -> Option<&str> {
        self.tensors.get(tensor.0 as usize).copied().flatten().map(|id| &*self.paths[id as usize])
    }

    /// The path of the module that a step belongs to.
    pub fn step(&self, at: OpIndex) -> Option<&str> {
        self.steps.get(at.0 as usize).copied().flatten().map(|id| &*self.paths[id as usize])
    }

    /// What `total` bytes that are in use in step `at` are for, by module, largest first. A tensor
    /// and its views count once. What no tensor takes counts for the module of the step, whose
    /// operation works with it.
    pub fn held(&self, trace: &Trace, at: OpIndex, total: Bytes) -> Vec<ModuleBytes> {
        let roots = trace.buffers();
        let mut buffers = trace.alive_before(OpIndex(at.0 + 1));
        buffers.iter_mut().for_each(|tensor| *tensor = roots[tensor.0 as usize]);
        buffers.sort_unstable();
        buffers.dedup();
        let mut held: FxHashMap<Option<&str>, Bytes> = FxHashMap::default();
        let mut left = total;
        for buffer in buffers {
            let bytes = trace.tensor(buffer).bytes().min(left);
            *held.entry(self.tensor(buffer)).or_default() += bytes;
            left -= bytes;
        }
        *held.entry(self.step(at)).or_default() += left;
        let of = |(path, bytes): (Option<&str>, Bytes)| ModuleBytes {
            module: path.map(str::to_owned),
            bytes,
        };
        let mut held: Vec<ModuleBytes> =
            held.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO).map(of).collect();
        held.sort_by(|one, other| other.bytes.cmp(&one.bytes).then(one.module.cmp(&other.module)));
        held
    }
}

impl Trace {
    /// The tensor that owns the buffer of each tensor: itself, or what it is a view of.
    pub fn buffers(&self) -> Vec<TensorIndex> {
        let mut roots: Vec<TensorIndex> = (0..self.tensors.len() as u32).map(TensorIndex).collect();
        for (_, call) in self.calls().filter(|(_, call)| call.is_view()) {
            if let [input, ..] = &call.inputs[..] {
                for output in &call.outputs {
                    roots[output.0 as usize] = roots[input.tensor.0 as usize];
                }
            }
        }
        roots
    }
}

/// What the results of an operation end in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// In gradients of one module.
    In(Id),
    /// In gradients of several modules.
    Apart,
}

/// Whether a tensor is part of the optimizer's state.
fn is_state(tensor: &TensorInfo) -> bool {
    tensor.label.as_deref().is_some_and(|label| label.category == Category::OptimizerState)
}

struct Finder<'a> {
    trace: &'a Trace,
    paths: Vec<String>,
    ids: FxHashMap<String, Id>,
    /// The innermost modules that contain two others, as far as they were looked up.
    common: FxHashMap<(Id, Id), Option<Id>>,
    tensors: Vec<Option<Id>>,
    steps: Vec<Option<Id>>,
    /// Whether a tensor is a parameter or computed from parameters alone.
    is_parameter: Vec<bool>,
}

impl<'a> Finder<'a> {
    fn new(trace: &'a Trace) -> Self {
        let count = trace.tensors.len();
        let mut finder = Self {
            trace,
            paths: Vec::new(),
            ids: FxHashMap::default(),
            common: FxHashMap::default(),
            tensors: vec![None; count],
            steps: vec![None; trace.steps.len()],
            is_parameter: vec![false; count],
        };
        for (tensor, info) in trace.tensors.iter().enumerate() {
            let Some(label) = info.label.as_deref() else { continue };
            if label.name.is_empty() || label.name == crate::Label::BEING_SAVED {
                continue;
            }
            // A parameter of the model itself is its own module.
            let path = label.name.rsplit_once('.').map_or(&*label.name, |(module, _)| module);
            finder.tensors[tensor] = Some(finder.id(path));
            finder.is_parameter[tensor] = label.category == Category::Parameter;
        }
        finder
    }

    fn id(&mut self, path: &str) -> Id {
        if let Some(id) = self.ids.get(path) {
            return *id;
        }
        let id = self.paths.len() as Id;
        self.paths.push(path.to_owned());
        self.ids.insert(path.to_owned(), id);
        id
    }

    fn calls(
        &self,
        range: Range<usize>,
    ) -> impl DoubleEndedIterator<Item = (usize, &'a Call)> + use<'a> {
        let trace = self.trace;
        range.filter_map(|at| match &trace.steps[at] {
            Step::Call(call) => Some((at, &**call)),
            _ => None,
        })
    }

    fn set(&mut self, at: usize, call: &Call, module: Option<Id>) {
        self.steps[at] = module;
        for output in &call.outputs {
            let known = &mut self.tensors[output.0 as usize];
            *known = known.or(module);
        }
    }

    fn part(&mut self, range: Range<usize>, optimizes: bool) {
        if optimizes {
            return self.optimizer_step(range);
        }
        for (_, call) in self.calls(range.clone()) {
            let mut inputs = call.inputs.iter().map(|input| input.tensor.0 as usize);
            if !call.inputs.is_empty() && inputs.all(|input| self.is_parameter[input]) {
                let module = self.own(call);
                for output in &call.outputs {
                    self.is_parameter[output.0 as usize] = true;
                    self.tensors[output.0 as usize] = module;
                }
            }
        }
        let seed = self.trace.seed_of_backward(range.start, range.end);
        let middle = seed.unwrap_or(range.end);
        self.forward(range.start..middle);
        self.backward(middle..range.end);
    }

    /// The module of the parameters that a call takes.
    fn own(&mut self, call: &Call) -> Option<Id> {
        let mut found = None;
        for input in &call.inputs {
            let tensor = input.tensor.0 as usize;
            let Some(module) = self.tensors[tensor].filter(|_| self.is_parameter[tensor]) else {
                continue;
            };
            found = match found {
                Some(first) => self.containing(first, module).or(found),
                None => Some(module),
            };
        }
        found
    }

    /// The innermost module that contains both, other than the model.
    fn containing(&mut self, one: Id, other: Id) -> Option<Id> {
        if one == other {
            return Some(one);
        }
        let pair = (one, other);
        if let Some(known) = self.common.get(&pair) {
            return *known;
        }
        let [one, other] = [one, other].map(|id| self.paths[id as usize].split('.'));
        let common: Vec<&str> =
            one.zip(other).take_while(|(one, other)| one == other).map(|(one, _)| one).collect();
        let path = common.join(".");
        let found = (!path.is_empty()).then(|| self.id(&path));
        self.common.insert(pair, found);
        found
    }

    fn forward(&mut self, range: Range<usize>) {
        let count = self.trace.tensors.len();
        // The modules of the closest operations with parameters, up and down the flow of data.
        let (mut above, mut below) = (vec![None; count], vec![None; count]);
        let mut owners: FxHashMap<usize, Id> = FxHashMap::default();
        for (at, call) in self.calls(range.clone()) {
            let own = self.own(call);
            owners.extend(own.map(|own| (at, own)));
            let latest = call.inputs.iter().map(|input| input.tensor);
            let latest = latest.filter(|tensor| above[tensor.0 as usize].is_some()).max();
            let module = own.or(latest.and_then(|tensor| above[tensor.0 as usize]));
            call.outputs.iter().for_each(|output| above[output.0 as usize] = module);
        }
        for (at, call) in self.calls(range.clone()).rev() {
            let later = call.outputs.iter().find_map(|output| below[output.0 as usize]);
            if let Some(module) = owners.get(&at).copied().or(later) {
                call.inputs.iter().for_each(|input| below[input.tensor.0 as usize] = Some(module));
            }
        }
        for (at, call) in self.calls(range) {
            let [up, down] = [&above, &below]
                .map(|modules| call.outputs.iter().find_map(|output| modules[output.0 as usize]));
            let around = match (up, down) {
                (Some(up), Some(down)) => self.containing(up, down),
                _ => None,
            };
            let module = owners.get(&at).copied().or(around).or(up).or(down);
            self.set(at, call, module);
        }
    }

    fn backward(&mut self, range: Range<usize>) {
        let mut ends: Vec<Option<Ends>> = vec![None; self.trace.tensors.len()];
        let merge = |one: Option<Ends>, other: Option<Ends>| match (one, other) {
            (Some(one), Some(other)) if one != other => Some(Ends::Apart),
            (one, other) => one.or(other),
        };
        let mut of_calls: FxHashMap<usize, Ends> = FxHashMap::default();
        for (at, call) in self.calls(range.clone()).rev() {
            let mut of_call = None;
            for output in &call.outputs {
                let label = self.trace.tensor(*output).label.as_deref();
                let gradient = label.filter(|label| label.category == Category::Gradient);
                let named = gradient.and(self.tensors[output.0 as usize]).map(Ends::In);
                of_call = merge(of_call, merge(named, ends[output.0 as usize]));
            }
            for input in &call.inputs {
                let end = &mut ends[input.tensor.0 as usize];
                *end = merge(*end, of_call);
            }
            of_calls.extend(of_call.map(|ends| (at, ends)));
        }
        let is_before = |tensor: TensorIndex| match self.trace.tensor(tensor).origin {
            Origin::Existing => true,
            Origin::Made(at) => (at.0 as usize) < range.start,
        };
        let is_before: Vec<bool> =
            (0..ends.len() as u32).map(|tensor| is_before(TensorIndex(tensor))).collect();
        for (at, call) in self.calls(range.clone()) {
            let ends_in = match of_calls.get(&at) {
                Some(Ends::In(module)) => Some(*module),
                _ => None,
            };
            let known = call.inputs.iter().map(|input| input.tensor);
            let known = known.filter(|tensor| self.tensors[tensor.0 as usize].is_some());
            let latest = known.max_by_key(|tensor| (is_before[tensor.0 as usize], tensor.0));
            let latest = latest.and_then(|tensor| self.tensors[tensor.0 as usize]);
            let module = ends_in.or_else(|| self.own(call)).or(latest);
            self.set(at, call, module);
        }
        self.pass_back(range);
    }

    /// Gives operations that belong to no module yet, such as the first of a backward pass, to the
    /// module of those that take their results.
    fn pass_back(&mut self, range: Range<usize>) {
        for (at, call) in self.calls(range).rev() {
            let later = call.outputs.iter().find_map(|output| self.tensors[output.0 as usize]);
            let Some(module) = self.steps[at].or(later) else { continue };
            self.steps[at] = Some(module);
            for input in &call.inputs {
                let info = self.trace.tensor(input.tensor);
                // The batch belongs to no module.
                let is_input = info.origin == Origin::Existing && !is_state(info);
                if !is_input {
                    self.tensors[input.tensor.0 as usize].get_or_insert(module);
                }
            }
        }
    }

    fn optimizer_step(&mut self, range: Range<usize>) {
        for (at, call) in self.calls(range.clone()) {
            let module = call.inputs.iter().find_map(|input| self.tensors[input.tensor.0 as usize]);
            self.set(at, call, module);
        }
        self.pass_back(range);
    }
}
