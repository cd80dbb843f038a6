//! Writes down iterations that are rehearsed: what their operations make, use and free, and what
//! tensors are for.
//!
//! burn's fusion tells of operations. What they are part of, [`WeightedGradients`] tells where
//! gradients are added. Tensors are told by an operation on each: its input has the number that the
//! others have.
//!
//! [`WeightedGradients`]: crate::WeightedGradients

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_fusion::observer::BlockOperations;
use burn_ir::{BaseOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use firebox_report::{DeviceReport, Story, html};
use firebox_trace::{
    Bytes, Call, Category, CategoryBytes, Description, DescriptionIndex, Estimate, Footprint,
    Label, Mark, Moment, OpIndex, Origin, Paging, Step, TensorIndex, TensorInfo, TensorType, Trace,
    Use,
};
use serde_json::{Value, json};

use crate::error::TrainError;
use crate::planner::PlanReport;

/// For how many operations a tensor without a name lives that is not kept for something later.
const MOMENT: u32 = 8;

/// Iterations that are being written down.
#[derive(Default)]
pub(crate) struct Recording {
    trace: Trace,
    /// Tensors that only exist within a fused kernel.
    fused: HashSet<TensorIndex>,
    numbers: HashMap<TensorId, TensorIndex>,
    types: HashMap<String, Arc<TensorType>>,
    descriptions: HashMap<String, DescriptionIndex>,
    /// What the next operations are on, which tell which tensors these are.
    told: VecDeque<Label>,
    /// The results of these operations.
    telling: HashSet<TensorId>,
    /// Whether another micro-step begins if anything follows.
    begins: bool,
}

thread_local! {
    /// What is being recorded on this thread.
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

#[derive(Clone)]
struct Current {
    recording: Arc<Mutex<Recording>>,
    device: Device,
}

impl Current {
    fn with(&self, work: impl FnOnce(&mut Recording)) {
        // What was issued before is registered before.
        if let Err(error) = self.device.sync() {
            log::warn!("{:?}: {error}", self.device);
        }
        work(&mut self.recording.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn with_current(work: impl FnOnce(&Current)) {
    if let Some(current) = CURRENT.with_borrow(Clone::clone) {
        work(&current);
    }
}

/// Records the iteration that `iterate` runs on this thread.
pub(crate) fn record<R>(
    recording: &Arc<Mutex<Recording>>,
    device: &Device,
    iterate: impl FnOnce() -> R,
) -> R {
    let current = Current { recording: recording.clone(), device: device.clone() };
    current.with(|recording| recording.begins = true);
    /// Ends it, also where the step panics.
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            CURRENT.set(None);
        }
    }
    CURRENT.set(Some(current.clone()));
    let ends = Ends;
    let result = iterate();
    drop(ends);
    current.with(|recording| recording.mark(Mark::IterationEnd));
    result
}

/// Tells which tensors are the parameters of a model.
pub(crate) fn parameters<M: Module>(model: &M) {
    with_current(|current| {
        model.visit(&mut Telling { current, path: Vec::new(), gradients: None });
        current.with(|_| ());
    });
}

/// Tells the gradients of a micro-step, or their sum.
pub(crate) fn gradients<M: Module>(model: &M, category: Category, gradients: &GradientsParams) {
    with_current(|current| {
        let gradients = Some((category, gradients));
        model.visit(&mut Telling { current, path: Vec::new(), gradients });
        current.with(|_| ());
    });
}

/// Tells that a micro-step ends.
pub(crate) fn micro_step_ends() {
    with_current(|current| {
        current.with(|recording| {
            recording.mark(Mark::MicroStepEnd(0));
            recording.begins = true;
        });
    });
}

/// Tells that the optimizer steps.
pub(crate) fn optimizer_steps() {
    with_current(|current| current.with(|recording| recording.mark(Mark::OptimizerStep)));
}

struct Telling<'a> {
    current: &'a Current,
    path: Vec<String>,
    gradients: Option<(Category, &'a GradientsParams)>,
}

impl ModuleVisitor for Telling<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (category, tensor) = match self.gradients {
            Some((category, gradients)) => (category, gradients.get::<D>(param.id)),
            None => (Category::Parameter, Some(param.val().inner())),
        };
        let Some(tensor) = tensor.filter(|tensor| tensor.shape().num_elements() > 0) else {
            return;
        };
        let label = Label { category, name: self.path.join(".") };
        self.current.with(|recording| recording.told.push_back(label));
        drop(tensor.slice([(); D].map(|()| 0..1)));
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

impl Recording {
    /// Takes down an operation.
    pub(crate) fn operation(&mut self, operation: &OperationIr) {
        if self.is_telling(operation) {
            return;
        }
        if std::mem::take(&mut self.begins) {
            self.trace.steps.push(Step::Mark(Mark::MicroStep));
        }
        let at = OpIndex(self.trace.steps.len() as u32);
        match operation {
            OperationIr::Drop(tensor) => {
                let tensor = self.tensor(tensor, Origin::Existing);
                self.trace.steps.push(Step::Free(tensor));
            }
            OperationIr::Init(init) => {
                let host = bytes_of(&init.out);
                let output = self.tensor(&init.out, Origin::Made(at));
                self.trace.steps.push(Step::Upload { output, host });
            }
            _ => {
                let used = |tensor: &TensorIr| tensor.status == TensorStatus::ReadWrite;
                let mut inputs: Vec<Use> = Vec::new();
                for input in operation.inputs() {
                    let tensor = self.tensor(input, Origin::Existing);
                    // The last of two uses in one operation ends it.
                    inputs
                        .iter_mut()
                        .filter(|it| it.tensor == tensor)
                        .for_each(|it| it.last = false);
                    inputs.push(Use { tensor, last: used(input) });
                }
                let outputs = operation.outputs().map(|it| self.tensor(it, Origin::Made(at)));
                let outputs = outputs.collect();
                let (name, description) = self.described(operation);
                let inputs = inputs.into_iter().collect();
                let call = Call { name: name.into(), inputs, outputs, description };
                self.trace.steps.push(Step::Call(Box::new(call)));
            }
        }
    }

    /// Whether an operation only tells which tensor is which.
    fn is_telling(&mut self, operation: &OperationIr) -> bool {
        if operation.inputs().any(|input| self.telling.contains(&input.id)) {
            return true;
        }
        let OperationIr::BaseFloat(BaseOperationIr::Slice(slice)) = operation else { return false };
        let Some(label) = self.told.pop_front() else { return false };
        let tensor = self.tensor(&slice.tensor, Origin::Existing);
        self.trace.tensors[tensor.0 as usize].label = Some(Box::new(label));
        self.telling.insert(slice.out.id);
        true
    }

    /// Takes down the operations of one kernel: what one of them makes and another uses up is
    /// never written.
    pub(crate) fn block(&mut self, block: BlockOperations<'_>) {
        if block.iter().len() < 2 {
            return;
        }
        let made: HashSet<TensorId> =
            block.iter().flat_map(|it| it.outputs()).map(|it| it.id).collect();
        let ended = block.iter().flat_map(|it| it.inputs());
        let ended = ended.filter(|input| input.status == TensorStatus::ReadWrite);
        let within = ended.filter(|input| made.contains(&input.id));
        self.fused.extend(within.filter_map(|input| self.numbers.get(&input.id)));
    }

    fn mark(&mut self, mark: Mark) {
        self.begins = false;
        self.trace.steps.push(Step::Mark(mark));
    }

    fn tensor(&mut self, tensor: &TensorIr, origin: Origin) -> TensorIndex {
        if let Some(number) = self.numbers.get(&tensor.id) {
            return *number;
        }
        let key = format!("{:?} {:?}", tensor.shape, tensor.dtype);
        let ty = self.types.entry(key);
        let ty = ty.or_insert_with(|| Arc::new(type_of(&tensor.shape, tensor.dtype)));
        let number = TensorIndex(self.trace.tensors.len() as u32);
        self.trace.tensors.push(TensorInfo::new(ty.clone(), origin));
        self.numbers.insert(tensor.id, number);
        number
    }

    /// The name of an operation, and what it does in the terms of burn 0.21: traces know these. One
    /// that is new is an operation of the user's there.
    fn described(&mut self, operation: &OperationIr) -> (String, DescriptionIndex) {
        let mut value = serde_json::to_value(operation).expect("operations are data");
        let name = name(&value);
        let mut numbers = HashMap::new();
        let inputs = operation.inputs().count();
        let tensors = operation.inputs().chain(operation.outputs());
        for tensor in tensors {
            let next = numbers.len() as u64;
            numbers.entry(tensor.id.value()).or_insert(next);
        }
        renumber(&mut value, &numbers);
        let outputs: Vec<u64> = operation.outputs().map(|it| numbers[&it.id.value()]).collect();
        let known = self.descriptions.get(&value.to_string());
        if let Some(known) = known {
            return (name, *known);
        }
        let key = value.to_string();
        let custom = |value: &Value| {
            let mut tensors = Vec::new();
            collect_tensors(value, &mut tensors);
            json!({ "Custom": {
                "id": name,
                "inputs": tensors[..inputs.min(tensors.len())],
                "outputs": tensors[inputs.min(tensors.len())..],
            }})
        };
        let operations = serde_json::from_value(json!([value]))
            .or_else(|_| serde_json::from_value(json!([custom(&value)])))
            .unwrap_or_default();
        let index = DescriptionIndex(self.trace.descriptions.len() as u32);
        let description = Description { operations, outputs, workspace: None };
        self.trace.descriptions.push(description.into());
        self.descriptions.insert(key, index);
        (name, index)
    }

    /// What was recorded, with what tensors without a name are for. After each micro-step of an
    /// iteration, `more` that are like it are left out.
    pub(crate) fn finish(mut self, more: &[u32]) -> Recorded {
        let ends = self.trace.steps.iter_mut().filter_map(|step| match step {
            Step::Mark(Mark::MicroStepEnd(count)) => Some(count),
            _ => None,
        });
        ends.zip(more.iter().cycle()).for_each(|(count, more)| *count = *more);
        self.label();
        Recorded { trace: self.trace, fused: self.fused }
    }

    fn label(&mut self) {
        let trace = &mut self.trace;
        // The iteration of each step, and whether it belongs to the update.
        let mut places = Vec::with_capacity(trace.steps.len());
        let (mut iteration, mut updates) = (0, false);
        let (mut first, mut end) = (HashMap::new(), HashMap::new());
        for (at, step) in trace.iter() {
            places.push((iteration, updates));
            match step {
                Step::Mark(Mark::OptimizerStep) => updates = true,
                Step::Mark(Mark::IterationEnd) => (iteration, updates) = (iteration + 1, false),
                _ => {}
            }
            let (ended, _) = step.deaths_and_births();
            end.extend(ended.map(|tensor| (tensor, at.0)));
            if let Step::Call(call) = step {
                for input in &call.inputs {
                    first.entry(input.tensor).or_insert(at.0);
                }
            }
        }
        for number in (0..trace.tensors.len() as u32).map(TensorIndex) {
            let info = &mut trace.tensors[number.0 as usize];
            let category = match info.origin {
                _ if info.label.is_some() => continue,
                // The batch comes before the optimizer.
                Origin::Existing if first.get(&number).is_some_and(|at| places[*at as usize].1) => {
                    Category::OptimizerState
                }
                Origin::Existing => Category::Input,
                Origin::Made(at) => {
                    let (iteration, updates) = places[at.0 as usize];
                    let end = end.get(&number).copied();
                    let ends = end.is_some_and(|end: u32| places[end as usize].0 == iteration);
                    let is_short = end.is_some_and(|end| end - at.0 <= MOMENT);
                    match &trace.steps[at.0 as usize] {
                        Step::Upload { .. } if !updates => Category::Input,
                        _ if updates && !ends => Category::OptimizerState,
                        _ if updates || is_short => Category::Temporary,
                        _ => Category::Activation,
                    }
                }
            };
            info.label = Some(Box::new(Label { category, name: String::new() }));
        }
    }
}

/// What was written down.
pub(crate) struct Recorded {
    pub(crate) trace: Trace,
    fused: HashSet<TensorIndex>,
}

impl Recorded {
    /// Writes a page about where the memory of a plan goes.
    ///
    /// # Errors
    ///
    /// If the recording contradicts itself, or the file cannot be written.
    pub(crate) fn write(self, plan: &PlanReport, path: &Path) -> Result<(), TrainError> {
        let failed = |message: String| TrainError::NoReport { path: path.to_owned(), message };
        if self.trace.calls().next().is_none() {
            return Err(failed("burn's fusion, which says what is computed, is not on".to_owned()));
        }
        self.trace.check().map_err(|error| failed(error.to_string()))?;
        let shown = self.shown(plan);
        let title = format!("a batch of {} on {}", plan.plan.batch(), plan.device);
        let subtitle = "one iteration, as it was rehearsed";
        let page = html(&title, subtitle, &[shown]).map_err(|error| failed(error.to_string()))?;
        std::fs::write(path, page).map_err(|error| failed(error.to_string()))
    }

    fn shown(&self, report: &PlanReport) -> DeviceReport {
        let trace = &self.trace;
        let bytes = |tensor: TensorIndex| match self.fused.contains(&tensor) {
            true => Bytes::ZERO,
            false => trace.tensor(tensor).bytes(),
        };
        let peak = report.plan.peak();
        let mut footprint = Footprint {
            peak,
            timeline: vec![Moment { live: peak, peak }; trace.steps.len()],
            estimate: Estimate::Heuristic,
            ..Footprint::default()
        };
        let story = Story::of(trace, &footprint, bytes);
        let live = story.live.iter().enumerate();
        let (at, in_use) =
            live.max_by_key(|(_, live)| **live).map_or((0, 0), |(at, live)| (at, *live));
        footprint.at = OpIndex(at as u32);
        footprint.op = story.names.get(at).cloned().unwrap_or_default();
        let mut categories = CategoryBytes::default();
        for (name, series) in &story.categories {
            let of = Category::ALL.into_iter().find(|of| of.name() == name);
            categories.add(of.unwrap_or(Category::Temporary), Bytes::new(series[at]));
        }
        categories.add(Category::Unused, peak - Bytes::new(in_use));
        footprint.categories = categories;
        let in_use = Bytes::new(in_use);
        footprint.paging = Some(Paging { reserved: peak, in_use, ..Paging::default() });
        let story = Story::of(trace, &footprint, bytes);
        DeviceReport {
            device: report.device.clone(),
            allocator: "CubeCL's pools".to_owned(),
            budget: report.budget,
            batch: report.plan.batch().get(),
            split: report.plan.split(),
            peak,
            message: None,
            footprint,
            story,
            pages: Vec::new(),
            advice: Vec::new(),
        }
    }
}

/// A shape and an element type in the terms of burn 0.21.
pub(crate) fn type_of(shape: &Shape, dtype: DType) -> TensorType {
    let ty = json!({ "shape": shape, "dtype": dtype });
    serde_json::from_value(ty).expect("shapes and types are those of burn 0.21")
}

fn bytes_of(tensor: &TensorIr) -> Bytes {
    Bytes::new((tensor.shape.num_elements() * tensor.dtype.size()) as u64)
}

/// The name of an operation, as burn's backends call it: `float_add`, `conv2d`.
fn name(operation: &Value) -> String {
    let variant = |value: &Value| match value {
        Value::Object(fields) => {
            fields.iter().next().map(|(name, value)| (name.clone(), value.clone()))
        }
        Value::String(name) => Some((name.clone(), Value::Null)),
        _ => None,
    };
    let Some((kind, inner)) = variant(operation) else { return String::new() };
    if kind == "Custom" {
        return inner["id"].as_str().unwrap_or_default().to_owned();
    }
    // Operations on numbers have their type first.
    let inner = if inner.is_array() { inner[1].clone() } else { inner };
    let method = variant(&inner).map_or(kind.clone(), |(method, _)| method);
    let kinds = [("Float", "float_"), ("Int", "int_"), ("Bool", "bool_")];
    let kind = kinds.into_iter().find(|(end, _)| kind.ends_with(end));
    format!("{}{}", kind.map_or("", |(_, prefix)| prefix), snake_case(&method))
}

fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

/// Whether a value is a tensor of burn's intermediate representation.
fn is_tensor(fields: &serde_json::Map<String, Value>) -> bool {
    ["id", "shape", "status", "dtype"].iter().all(|field| fields.contains_key(*field))
}

/// Gives tensors the numbers of a description, without how they are used.
fn renumber(value: &mut Value, numbers: &HashMap<u64, u64>) {
    match value {
        Value::Object(fields) if is_tensor(fields) => {
            if let Some(id) = fields["id"]["value"].as_u64() {
                fields["id"]["value"] = json!(numbers.get(&id));
            }
            fields["status"] = json!(TensorStatus::ReadOnly);
        }
        Value::Object(fields) => fields.values_mut().for_each(|value| renumber(value, numbers)),
        Value::Array(values) => values.iter_mut().for_each(|value| renumber(value, numbers)),
        _ => {}
    }
}

fn collect_tensors(value: &Value, found: &mut Vec<Value>) {
    match value {
        Value::Object(fields) if is_tensor(fields) => found.push(value.clone()),
        Value::Object(fields) => fields.values().for_each(|value| collect_tensors(value, found)),
        Value::Array(values) => values.iter().for_each(|value| collect_tensors(value, found)),
        _ => {}
    }
}
