//! A trace without its numbers: the steps and tensors of all splits of one form.
//!
//! Traces of one form are merged into a [`Skeleton`], which makes the trace of any split of the
//! form.

use std::borrow::Cow;
use std::hash::Hash;
use std::sync::Arc;

use burn_std::{DType, Shape};
use firebox_trace::{
    Bytes, Call, Description, DescriptionIndex, Label, Mark, OpIndex, Origin, Step, TensorIndex,
    TensorInfo, TensorType, Trace, Use,
};
use indexmap::IndexSet;
use rustc_hash::{FxBuildHasher, FxHashMap};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::description::{generalize, specialize};
use crate::error::{InstantiateError, Irregular};
use crate::rule::Sizes;
use crate::rules::{Number, Rules};

/// The most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 16;

/// The most bytes of a tensor.
const MOST_BYTES: u64 = 1 << 48;

/// Values that traces of a file have in common, each once.
type Table<T> = IndexSet<T, FxBuildHasher>;

/// The position of `value`, which is added if it is new.
fn add<T: Eq + Hash>(table: &mut Table<T>, value: T) -> u32 {
    table.insert_full(value).0 as u32
}

/// What traces of all forms refer to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Shared {
    rules: Rules,
    names: Table<String>,
    labels: Table<Label>,
    types: Table<Typed>,
    descriptions: Table<Described>,
    marks: Table<Mark>,
}

/// The type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Typed {
    shape: Vec<Number>,
    dtype: DType,
}

/// What a call does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Described {
    operations: Vec<u8>,
    outputs: Vec<u64>,
    workspace: Option<Number>,
}

/// A tensor, by positions in the tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Tensor {
    ty: u32,
    label: Option<u32>,
    is_existing: bool,
    is_prepared: bool,
}

/// A step, by positions in the tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Stem {
    Call {
        name: u32,
        description: u32,
        inputs: Vec<(Place, bool)>,
        outputs: Vec<Place>,
    },
    Upload {
        output: Place,
        host: Number,
    },
    Free(Place),
    Read(Place, bool),
    Mark(u32),
    /// The end of a micro-step, which so many follow.
    MicroStepEnd(Number),
}

/// A tensor, in a way that parts which repeat have in common: what existed before by its number,
/// what was made by how many tensors it lies before the next one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Place {
    Existing(u32),
    Back(u32),
    Ahead(u32),
}

/// The trace of all splits of one form, but for its numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Skeleton {
    tensors: Vec<Tensor>,
    steps: Vec<Stem>,
}

/// Where recordings of one form differ.
pub(crate) struct Difference {
    pub(crate) what: String,
    pub(crate) why: Irregular,
}

/// Traces of one form, side by side.
struct Samples<'a> {
    traces: &'a [Trace],
    steps: Vec<Vec<&'a Step>>,
    sizes: &'a [Sizes],
    /// Types and descriptions that were compared, by their places in each trace.
    types: FxHashMap<Vec<*const TensorType>, u32>,
    descriptions: FxHashMap<Vec<DescriptionIndex>, u32>,
}

impl Skeleton {
    /// Merges traces of one form, which were recorded for these sizes.
    pub(crate) fn of(
        traces: &[Trace],
        sizes: &[Sizes],
        shared: &mut Shared,
    ) -> Result<Self, Difference> {
        let steps: Vec<Vec<&Step>> = traces.iter().map(in_order).collect();
        let mut samples = Samples {
            traces,
            steps,
            sizes,
            types: FxHashMap::default(),
            descriptions: FxHashMap::default(),
        };
        let (tensors, steps) = (traces[0].tensors.len(), samples.steps[0].len());
        if traces.iter().any(|trace| trace.tensors.len() != tensors) {
            return Err(other("the number of tensors"));
        }
        if samples.steps.iter().any(|other| other.len() != steps) {
            return Err(other("the number of operations"));
        }
        let tensors =
            (0..tensors).map(|at| samples.tensor(at, shared)).collect::<Result<_, _>>()?;
        let mut next = 0;
        let stem = |at| samples.step(at, &mut next, shared);
        let steps = (0..steps).map(stem).collect::<Result<_, _>>()?;
        Ok(Self { tensors, steps })
    }

    /// The trace for these sizes.
    pub(crate) fn trace(&self, sizes: &Sizes, shared: &Shared) -> Result<Trace, InstantiateError> {
        let types = shared.types.iter().map(|ty| ty.at(sizes, &shared.rules));
        let types: Vec<Option<Arc<TensorType>>> = types.map(|ty| ty.map(Arc::new)).collect();
        let mut maker =
            Maker { shared, sizes, descriptions: Vec::new(), known: FxHashMap::default(), next: 0 };
        let tensor = |tensor: &Tensor| {
            let ty =
                types.get(tensor.ty as usize).ok_or_else(|| contradiction("a tensor's type"))?;
            let ty = ty.clone().ok_or_else(|| contradiction("a tensor's shape"))?;
            let label = tensor.label.map(|label| {
                let label = shared.labels.get_index(label as usize).cloned();
                label.map(Box::new).ok_or_else(|| contradiction("a tensor's label"))
            });
            let mut info = TensorInfo::new(ty, Origin::Existing);
            (info.label, info.prepared) = (label.transpose()?, tensor.is_prepared);
            Ok::<_, InstantiateError>(info)
        };
        let mut tensors: Vec<TensorInfo> =
            self.tensors.iter().map(tensor).collect::<Result<_, _>>()?;
        let mut is_made = vec![false; tensors.len()];
        let mut steps = Vec::with_capacity(self.steps.len());
        for (at, stem) in self.steps.iter().enumerate() {
            let step = maker.step(stem)?;
            for output in step.deaths_and_births().1 {
                let output = output.0 as usize;
                let tensor = tensors.get_mut(output).ok_or_else(|| contradiction("a result"))?;
                tensor.origin = Origin::Made(OpIndex(at as u32));
                is_made[output] = true;
            }
            steps.push(step);
        }
        if self.tensors.iter().zip(&is_made).any(|(tensor, made)| tensor.is_existing == *made) {
            return Err(contradiction("where tensors come from"));
        }
        let trace = Trace { tensors, steps, descriptions: maker.descriptions };
        trace.check()?;
        Ok(trace)
    }
}

/// Makes the steps of a trace.
struct Maker<'a> {
    shared: &'a Shared,
    sizes: &'a Sizes,
    descriptions: Vec<Arc<Description>>,
    known: FxHashMap<u32, DescriptionIndex>,
    /// One more than the largest number of a tensor so far.
    next: u32,
}

impl Maker<'_> {
    fn step(&mut self, stem: &Stem) -> Result<Step, InstantiateError> {
        Ok(match stem {
            Stem::Call { name, description, inputs, outputs } => {
                let name = self
                    .shared
                    .names
                    .get_index(*name as usize)
                    .ok_or_else(|| contradiction("a name"))?;
                let inputs = inputs
                    .iter()
                    .map(|(place, last)| Ok(Use { tensor: self.tensor(*place)?, last: *last }));
                let inputs = inputs.collect::<Result<SmallVec<_>, InstantiateError>>()?;
                let outputs = outputs.iter().map(|place| self.tensor(*place));
                let outputs = outputs.collect::<Result<SmallVec<_>, _>>()?;
                let description = self.description(*description)?;
                let name = Cow::Owned(name.clone());
                Step::Call(Box::new(Call { name, inputs, outputs, description }))
            }
            Stem::Upload { output, host } => {
                let host = self.shared.rules.value(*host, self.sizes);
                let host = Bytes::new(host.ok_or_else(|| contradiction("an upload"))?);
                Step::Upload { output: self.tensor(*output)?, host }
            }
            Stem::Free(place) => Step::Free(self.tensor(*place)?),
            Stem::Read(place, last) => {
                Step::Read(Use { tensor: self.tensor(*place)?, last: *last })
            }
            Stem::Mark(mark) => {
                let mark = self
                    .shared
                    .marks
                    .get_index(*mark as usize)
                    .ok_or_else(|| contradiction("a mark"))?;
                Step::Mark(mark.clone())
            }
            Stem::MicroStepEnd(more) => {
                let more = self.shared.rules.value(*more, self.sizes);
                let more = more.and_then(|more| u32::try_from(more).ok());
                Step::Mark(Mark::MicroStepEnd(more.ok_or_else(|| contradiction("a mark"))?))
            }
        })
    }

    fn tensor(&mut self, place: Place) -> Result<TensorIndex, InstantiateError> {
        let tensor = match place {
            Place::Existing(tensor) => Some(tensor),
            Place::Back(by) => self.next.checked_sub(by),
            Place::Ahead(by) => self.next.checked_add(by),
        };
        let tensor = tensor.filter(|tensor| *tensor < u32::MAX);
        let tensor = tensor.ok_or_else(|| contradiction("a tensor's number"))?;
        self.next = self.next.max(tensor + 1);
        Ok(TensorIndex(tensor))
    }

    fn description(&mut self, at: u32) -> Result<DescriptionIndex, InstantiateError> {
        if let Some(known) = self.known.get(&at) {
            return Ok(*known);
        }
        let described = self.shared.descriptions.get_index(at as usize);
        let described = described.and_then(|described| described.at(self.sizes, self.shared));
        let index = DescriptionIndex(self.descriptions.len() as u32);
        let described = described.ok_or_else(|| contradiction("a description"))?;
        self.descriptions.push(Arc::new(described));
        self.known.insert(at, index);
        Ok(index)
    }
}

impl Typed {
    /// The type for these sizes. `None` if no tensor has it.
    fn at(&self, sizes: &Sizes, rules: &Rules) -> Option<TensorType> {
        let dims = self.shape.iter().map(|number| rules.value(*number, sizes));
        let dims: Vec<u64> = dims.collect::<Option<_>>()?;
        // Elements of burn's types have at most 8 bytes.
        let bytes = dims.iter().try_fold(8_u64, |bytes, dim| bytes.checked_mul(*dim));
        (dims.len() <= MOST_DIMENSIONS && bytes? <= MOST_BYTES).then(|| TensorType {
            shape: Shape::from(dims.iter().map(|dim| *dim as usize).collect::<Vec<_>>()),
            dtype: self.dtype,
        })
    }
}

impl Described {
    fn at(&self, sizes: &Sizes, shared: &Shared) -> Option<Description> {
        let workspace = match self.workspace {
            Some(number) => Some(Bytes::new(shared.rules.value(number, sizes)?)),
            None => None,
        };
        let operations = specialize(&self.operations, sizes, &shared.rules)?;
        Some(Description { operations, outputs: self.outputs.clone(), workspace })
    }
}

impl Samples<'_> {
    fn tensor(&mut self, at: usize, shared: &mut Shared) -> Result<Tensor, Difference> {
        let tensors: Vec<&TensorInfo> = self.traces.iter().map(|t| &t.tensors[at]).collect();
        let first = tensors[0];
        let is_same = |tensor: &&TensorInfo| {
            tensor.label == first.label
                && (tensor.origin == Origin::Existing) == (first.origin == Origin::Existing)
        };
        if !tensors.iter().all(is_same) {
            return Err(other("what a tensor is for"));
        }
        let key: Vec<*const TensorType> = tensors.iter().map(|t| Arc::as_ptr(&t.ty)).collect();
        let ty = match self.types.get(&key) {
            Some(known) => *known,
            None => {
                let ty = self.typed(&tensors, shared)?;
                let ty = add(&mut shared.types, ty);
                self.types.insert(key, ty);
                ty
            }
        };
        Ok(Tensor {
            ty,
            label: first.label.as_deref().map(|label| add(&mut shared.labels, label.clone())),
            is_existing: first.origin == Origin::Existing,
            is_prepared: tensors.iter().any(|tensor| tensor.prepared),
        })
    }

    fn typed(&self, tensors: &[&TensorInfo], shared: &mut Shared) -> Result<Typed, Difference> {
        let first = tensors[0];
        let rank = first.shape.len();
        let is_alike =
            |tensor: &&TensorInfo| tensor.shape.len() == rank && tensor.dtype == first.dtype;
        if !tensors.iter().all(is_alike) {
            return Err(other("the element type or rank of a tensor"));
        }
        let dims = (0..rank).map(|dim| {
            let values: Vec<u64> = tensors.iter().map(|tensor| tensor.shape[dim] as u64).collect();
            let number = shared.rules.number(&values, self.sizes);
            number.map_err(|why| Difference { what: describe_tensor(self.traces, first), why })
        });
        Ok(Typed { shape: dims.collect::<Result<_, _>>()?, dtype: first.dtype })
    }

    fn step(&mut self, at: usize, next: &mut u32, shared: &mut Shared) -> Result<Stem, Difference> {
        let steps: Vec<&Step> = self.steps.iter().map(|steps| steps[at]).collect();
        let traces = self.traces;
        let mut place = |tensor: TensorIndex| place(&traces[0], tensor, next);
        let is_same = steps.iter().all(|step| step.name() == steps[0].name());
        let differs = || Err(other(&format!("`{}`, operation {at},", steps[0].name())));
        if !is_same {
            return differs();
        }
        let number = |values: Option<Vec<u64>>, shared: &mut Shared| {
            let what = || format!("`{}`, operation {at},", steps[0].name());
            let values = values.ok_or_else(|| other(&what()))?;
            let number = shared.rules.number(&values, self.sizes);
            number.map_err(|why| Difference { what: what(), why })
        };
        Ok(match steps[0] {
            Step::Call(call) => {
                let calls = steps.iter().map(|step| match step {
                    Step::Call(call) => Some(&**call),
                    _ => None,
                });
                let Some(calls) = calls.collect::<Option<Vec<&Call>>>() else { return differs() };
                let is_same =
                    |other: &&Call| other.inputs == call.inputs && other.outputs == call.outputs;
                if !calls.iter().all(is_same) {
                    return differs();
                }
                let inputs = call.inputs.iter().map(|input| (place(input.tensor), input.last));
                let inputs = inputs.collect();
                let outputs = call.outputs.iter().map(|output| place(*output)).collect();
                let name = add(&mut shared.names, call.name.to_string());
                let description = self.description(&calls, shared)?;
                Stem::Call { name, description, inputs, outputs }
            }
            Step::Upload { output, .. } => {
                let bytes = |step: &&Step| match step {
                    Step::Upload { output: own, host } if own == output => Some(host.get()),
                    _ => None,
                };
                let host = number(steps.iter().map(bytes).collect(), shared)?;
                Stem::Upload { output: place(*output), host }
            }
            Step::Mark(Mark::MicroStepEnd(_)) => {
                let more = |step: &&Step| match step {
                    Step::Mark(Mark::MicroStepEnd(more)) => Some(u64::from(*more)),
                    _ => None,
                };
                Stem::MicroStepEnd(number(steps.iter().map(more).collect(), shared)?)
            }
            first if steps.iter().any(|step| *step != first) => return differs(),
            Step::Free(tensor) => Stem::Free(place(*tensor)),
            Step::Read(read) => Stem::Read(place(read.tensor), read.last),
            Step::Mark(mark) => Stem::Mark(add(&mut shared.marks, mark.clone())),
        })
    }

    fn description(&mut self, calls: &[&Call], shared: &mut Shared) -> Result<u32, Difference> {
        let key: Vec<DescriptionIndex> = calls.iter().map(|call| call.description).collect();
        if let Some(known) = self.descriptions.get(&key) {
            return Ok(*known);
        }
        let with = |why| Difference { what: format!("`{}`", calls[0].name), why };
        let described = self.traces.iter().zip(calls);
        let described: Vec<&Description> =
            described.map(|(trace, call)| trace.description(call)).collect();
        let outputs = &described[0].outputs;
        if described.iter().any(|other| other.outputs != *outputs) {
            return Err(with(Irregular::Structure));
        }
        let workspaces = described.iter().map(|one| one.workspace.map(Bytes::get));
        let workspace = match workspaces.clone().collect::<Option<Vec<u64>>>() {
            Some(bytes) => Some(shared.rules.number(&bytes, self.sizes).map_err(with)?),
            None if workspaces.clone().all(|bytes| bytes.is_none()) => None,
            None => return Err(with(Irregular::Structure)),
        };
        let operations: Vec<&[_]> = described.iter().map(|one| &one.operations[..]).collect();
        let operations = generalize(&operations, self.sizes, &mut shared.rules).map_err(with)?;
        let described = Described { operations, outputs: outputs.clone(), workspace };
        let at = add(&mut shared.descriptions, described);
        self.descriptions.insert(key, at);
        Ok(at)
    }
}

/// The steps of a trace, with tensors that are freed one after the other in the order of their
/// numbers. burn keeps gradients in hash maps and frees them in any order.
fn in_order(trace: &Trace) -> Vec<&Step> {
    let mut steps: Vec<&Step> = trace.steps.iter().collect();
    let freed = |step: &Step| match step {
        Step::Free(tensor) => Some(*tensor),
        _ => None,
    };
    for run in steps.chunk_by_mut(|one, other| freed(one).is_some() && freed(other).is_some()) {
        run.sort_by_key(|step| freed(step));
    }
    steps
}

fn place(trace: &Trace, tensor: TensorIndex, next: &mut u32) -> Place {
    let place = match trace.tensor(tensor).origin {
        Origin::Existing => Place::Existing(tensor.0),
        Origin::Made(_) if tensor.0 < *next => Place::Back(*next - tensor.0),
        Origin::Made(_) => Place::Ahead(tensor.0 - *next),
    };
    *next = (*next).max(tensor.0 + 1);
    place
}

fn describe_tensor(traces: &[Trace], tensor: &TensorInfo) -> String {
    let made = match tensor.origin {
        Origin::Existing => None,
        Origin::Made(at) => traces[0].steps.get(at.0 as usize).map(Step::name),
    };
    let label = tensor.label.as_deref().filter(|label| !label.name.is_empty());
    match (label, made) {
        (Some(Label { category, name }), _) => format!("the shape of {name} ({category})"),
        (None, Some(made)) => format!("the shape of a result of `{made}`"),
        (None, None) => "the shape of an input".to_owned(),
    }
}

fn other(what: &str) -> Difference {
    Difference { what: what.to_owned(), why: Irregular::Structure }
}

fn contradiction(what: &str) -> InstantiateError {
    InstantiateError::Contradiction(format!("{what} is missing or out of range"))
}
