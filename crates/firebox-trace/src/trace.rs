//! The trace: what one recording wrote down, in program order, with exact lifetimes.
//!
//! A trace is plain data. The recorder makes it and memory models read it. It can be saved and
//! loaded with `serde`.

use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use burn_ir::OperationIr;
use burn_std::{DType, Shape};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{Bytes, Mark, OpIndex};

/// A tensor of a trace: its position in [`Trace::tensors`].
///
/// Tensors are numbered in the order in which the recording first met them, so the same program
/// gives the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TensorIndex(pub u32);

impl fmt::Display for TensorIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// What a tensor is for, in the terms of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// A weight or a running statistic of the model.
    Parameter,
    /// A gradient of the micro-batch that was just run.
    Gradient,
    /// The sum of the gradients of the micro-batches so far.
    AccumulatedGradient,
    /// What the optimizer keeps between steps.
    OptimizerState,
    /// What the forward pass keeps for the backward pass.
    Activation,
    /// The batch.
    Input,
    /// Everything short-lived.
    Temporary,
    /// What of the allocator's pages nothing lies on.
    Unused,
}

impl Category {
    /// Every category, in the order in which tables list them.
    pub const ALL: [Self; 8] = [
        Self::Parameter,
        Self::Gradient,
        Self::AccumulatedGradient,
        Self::OptimizerState,
        Self::Activation,
        Self::Input,
        Self::Temporary,
        Self::Unused,
    ];

    /// The name in tables and messages, in the plural.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameters",
            Self::Gradient => "gradients",
            Self::AccumulatedGradient => "accumulated gradients",
            Self::OptimizerState => "optimizer state",
            Self::Activation => "activations",
            Self::Input => "inputs",
            Self::Temporary => "temporaries",
            Self::Unused => "unused parts of pages",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is known about a tensor apart from its shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Label {
    /// What the tensor is for.
    pub category: Category,
    /// Its name, such as the path of a parameter in its module. May be empty.
    pub name: String,
}

impl Label {
    /// The name of tensors from which a checkpoint is being written.
    pub const BEING_SAVED: &str = "being saved";
}

/// Where a tensor comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It existed before the recording.
    Existing,
    /// An operation of the trace makes it.
    Made(OpIndex),
}

/// The dimensions and the element type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// Its dimensions.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
}

/// A tensor of a trace. Dereferences to its shape and element type. Tensors share these, because a
/// trace has many tensors of few types.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Its dimensions and its element type.
    pub ty: Arc<TensorType>,
    /// Where it comes from.
    pub origin: Origin,
    /// What it is for, if the recorder was told.
    pub label: Option<Box<Label>>,
    /// Whether the tensor existed before and was requested by a loader thread, which makes it part
    /// of a batch.
    #[serde(default)]
    pub prepared: bool,
}

impl Deref for TensorInfo {
    type Target = TensorType;

    fn deref(&self) -> &TensorType {
        &self.ty
    }
}

impl TensorInfo {
    /// A tensor without a label, not requested by a loader thread.
    pub fn new(ty: Arc<TensorType>, origin: Origin) -> Self {
        Self { ty, origin, label: None, prepared: false }
    }

    /// The size of its elements. Excludes what an allocator adds.
    pub fn bytes(&self) -> Bytes {
        Bytes::of_elements(&self.shape, self.dtype)
    }
}

impl Bytes {
    /// The size of a tensor's elements. Excludes what an allocator adds.
    ///
    /// ```
    /// use burn_std::{DType, Shape};
    /// use firebox_trace::Bytes;
    /// assert_eq!(Bytes::of_elements(&Shape::new([256, 1024]), DType::F32), Bytes::mib(1));
    /// ```
    pub fn of_elements(shape: &Shape, dtype: DType) -> Self {
        let elements = shape.num_elements() as u64;
        match dtype {
            DType::QFloat(scheme) => {
                Self::new((elements * scheme.size_bits_stored() as u64).div_ceil(8))
            }
            dtype => Self::new(elements * dtype.size() as u64),
        }
    }
}

/// A use of a tensor by a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Use {
    /// The tensor.
    pub tensor: TensorIndex,
    /// Whether the call owns the tensor. If so, nobody else holds it: its memory may be reused in
    /// place, and is free after the call.
    pub last: bool,
}

/// One call of a backend's method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// The method of burn's backend traits that was called, such as `float_matmul` or `softmax`.
    pub name: Cow<'static, str>,
    /// The tensors it takes, in the order of its arguments.
    pub inputs: SmallVec<[Use; 2]>,
    /// The tensors it makes, in the order of its results.
    pub outputs: SmallVec<[TensorIndex; 2]>,
    /// What it does, in burn's intermediate representation.
    pub description: DescriptionIndex,
}

impl Call {
    /// Whether the call gives another view of its input's buffer, as far as the backend's layouts
    /// can express it; a backend may copy instead.
    pub fn is_view(&self) -> bool {
        let method = self.name.split_once('_').map_or("", |(_, method)| method);
        VIEWS.contains(&method)
    }
}

/// Methods of views, without their kind (`float_`, `int_`, `bool_`).
const VIEWS: [&str; 9] = [
    "reshape",
    "expand",
    "transpose",
    "swap_dims",
    "permute",
    "slice",
    "unfold",
    "detach",
    "set_require_grad",
];

/// A description of a trace: its position in [`Trace::descriptions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DescriptionIndex(pub u32);

/// What a call does, in burn's intermediate representation. It has one operation, or several if
/// burn-ir has no single one (`softmax`, `gelu`, …), with `Drop`s where temporaries die.
///
/// A backend that implements the call as a whole runs the call. Other backends run this
/// decomposition.
///
/// The description has its own tensor numbers: input `i` of the call is
/// [`TensorId`](burn_ir::TensorId) `i`, and the outputs are [`outputs`](Self::outputs). Calls that
/// do the same on the same shapes share a description.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// The operations, in order.
    pub operations: Vec<OperationIr>,
    /// The numbers of the call's results, in the order of [`Call::outputs`].
    pub outputs: Vec<u64>,
    /// What a call that burn does not know allocates while it runs, if its author has stated it.
    /// Excludes its results. `None` for burn's own methods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<Bytes>,
}

/// One step of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// A method of the backend is called.
    Call(Box<Call>),
    /// Host data becomes a tensor of the device.
    Upload {
        /// The tensor that is made.
        output: TensorIndex,
        /// The bytes on the host.
        host: Bytes,
    },
    /// The last owner of a tensor drops it.
    Free(TensorIndex),
    /// The program reads the values of a tensor. All earlier steps must be run first.
    Read(Use),
    /// A mark that the recording program set, such as the end of an iteration.
    Mark(Mark),
}

impl Step {
    /// The name of the step for messages: the method of a call, otherwise `upload`, `free`, `read`
    /// or `mark`.
    pub fn name(&self) -> &str {
        match self {
            Self::Call(call) => &call.name,
            Self::Upload { .. } => "upload",
            Self::Free(_) => "free",
            Self::Read(_) => "read",
            Self::Mark(_) => "mark",
        }
    }

    /// The tensors that the step makes.
    pub fn outputs(&self) -> &[TensorIndex] {
        match self {
            Self::Call(call) => &call.outputs,
            Self::Upload { output, .. } => std::slice::from_ref(output),
            Self::Free(_) | Self::Read(_) | Self::Mark(_) => &[],
        }
    }

    /// The tensors that the step takes as arguments or reads.
    pub fn inputs(&self) -> &[Use] {
        match self {
            Self::Call(call) => &call.inputs,
            Self::Read(read) => std::slice::from_ref(read),
            Self::Upload { .. } | Self::Free(_) | Self::Mark(_) => &[],
        }
    }

    /// Whether the step is this mark.
    pub fn is_mark(&self, mark: &Mark) -> bool {
        matches!(self, Self::Mark(own) if own == mark)
    }
}

/// What a recording wrote down.
///
/// Invariants, which [`check`](Trace::check) verifies: a tensor is made before it is used; nothing
/// uses it after its last use or its [`Step::Free`]; it is made once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The tensors, indexed by [`TensorIndex`].
    pub tensors: Vec<TensorInfo>,
    /// The steps, indexed by [`OpIndex`].
    pub steps: Vec<Step>,
    /// The descriptions of calls, indexed by [`DescriptionIndex`], each once. Recordings share
    /// them.
    pub descriptions: Vec<Arc<Description>>,
}

/// How a trace contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A step names a tensor that the trace does not have.
    #[error("step {at} names tensor {tensor}, which the trace does not have")]
    Unknown {
        /// The step.
        at: OpIndex,
        /// The tensor.
        tensor: TensorIndex,
    },
    /// A call names a description that the trace does not have, or one that makes a different
    /// number of tensors.
    #[error("step {at} has no description, or one of another call")]
    Undescribed {
        /// The step.
        at: OpIndex,
    },
    /// A step uses a tensor that is not alive.
    #[error("step {at} uses tensor {tensor}, which is not alive there")]
    NotAlive {
        /// The step.
        at: OpIndex,
        /// The tensor.
        tensor: TensorIndex,
    },
    /// A step makes a tensor a second time.
    #[error("step {at} makes tensor {tensor} a second time")]
    MadeTwice {
        /// The step.
        at: OpIndex,
        /// The tensor.
        tensor: TensorIndex,
    },
}

impl Trace {
    /// The tensor at `index`.
    ///
    /// # Panics
    ///
    /// If the trace has no such tensor.
    pub fn tensor(&self, index: TensorIndex) -> &TensorInfo {
        &self.tensors[index.0 as usize]
    }

    /// The steps with their positions.
    pub fn iter(&self) -> impl Iterator<Item = (OpIndex, &Step)> {
        self.steps.iter().enumerate().map(|(at, step)| (OpIndex(at as u32), step))
    }

    /// The calls with their positions.
    pub fn calls(&self) -> impl Iterator<Item = (OpIndex, &Call)> {
        self.iter().filter_map(|(at, step)| match step {
            Step::Call(call) => Some((at, &**call)),
            _ => None,
        })
    }

    /// What `call` does.
    ///
    /// # Panics
    ///
    /// If the trace does not have the description that `call` names.
    pub fn description(&self, call: &Call) -> &Description {
        &self.descriptions[call.description.0 as usize]
    }

    /// The operations of burn's intermediate representation, in order. Tensors have the numbers of
    /// their [`Description`].
    pub fn operations(&self) -> impl Iterator<Item = &OperationIr> {
        self.calls().flat_map(|(_, call)| &self.description(call).operations)
    }

    /// The positions at which the program reads values.
    pub fn reads(&self) -> impl Iterator<Item = OpIndex> {
        self.iter().filter(|(_, step)| matches!(step, Step::Read(_))).map(|(at, _)| at)
    }

    /// Corrects where tensors come from, after steps were added or taken out.
    pub fn renumber_origins(&mut self) {
        for (at, step) in (0..).map(OpIndex).zip(&self.steps) {
            for made in step.deaths_and_births().1 {
                self.tensors[made.0 as usize].origin = Origin::Made(at);
            }
        }
    }

    /// The last of these steps that uses or makes a tensor. The end of a tensor is no use.
    ///
    /// # Panics
    ///
    /// If the trace does not have all of the steps.
    pub fn last_uses(&self, steps: Range<usize>) -> FxHashMap<TensorIndex, OpIndex> {
        let mut last = FxHashMap::default();
        for (at, step) in (steps.start as u32..).map(OpIndex).zip(&self.steps[steps]) {
            if !matches!(step, Step::Free(_)) {
                let made = step.deaths_and_births().1;
                last.extend(step.uses().chain(made).map(|tensor| (tensor, at)));
            }
        }
        last
    }

    /// The tensors that existed before the recording.
    pub fn existing(&self) -> impl Iterator<Item = TensorIndex> {
        (0..self.tensors.len() as u32)
            .map(TensorIndex)
            .filter(|index| self.tensor(*index).origin == Origin::Existing)
    }

    /// The tensors that are alive after the last step.
    pub fn survivors(&self) -> Vec<TensorIndex> {
        self.alive_before(OpIndex(self.steps.len() as u32))
    }

    /// The tensors that are alive before step `at`.
    pub fn alive_before(&self, at: OpIndex) -> Vec<TensorIndex> {
        let mut alive: Vec<bool> =
            self.tensors.iter().map(|tensor| tensor.origin == Origin::Existing).collect();
        for step in self.steps.iter().take(at.0 as usize) {
            let (freed, made) = step.deaths_and_births();
            made.for_each(|tensor| alive[tensor.0 as usize] = true);
            freed.for_each(|tensor| alive[tensor.0 as usize] = false);
        }
        (0..self.tensors.len() as u32).map(TensorIndex).filter(|t| alive[t.0 as usize]).collect()
    }

    /// Verifies that every tensor is made once, before it is used, and not used after its end, and
    /// that every call has a description.
    ///
    /// # Errors
    ///
    /// The first contradiction.
    pub fn check(&self) -> Result<(), TraceError> {
        let mut alive: Vec<bool> =
            self.tensors.iter().map(|tensor| tensor.origin == Origin::Existing).collect();
        for (at, step) in self.iter() {
            if let Step::Call(call) = step {
                let description = self.descriptions.get(call.description.0 as usize);
                if description.is_none_or(|made| made.outputs.len() != call.outputs.len()) {
                    return Err(TraceError::Undescribed { at });
                }
            }
            for tensor in step.uses() {
                match alive.get(tensor.0 as usize) {
                    None => return Err(TraceError::Unknown { at, tensor }),
                    Some(false) => return Err(TraceError::NotAlive { at, tensor }),
                    Some(true) => {}
                }
            }
            let (freed, made) = step.deaths_and_births();
            freed.for_each(|tensor| alive[tensor.0 as usize] = false);
            for tensor in made {
                match alive.get_mut(tensor.0 as usize) {
                    None => return Err(TraceError::Unknown { at, tensor }),
                    Some(true) => return Err(TraceError::MadeTwice { at, tensor }),
                    Some(alive) => *alive = true,
                }
            }
        }
        Ok(())
    }
}

impl Step {
    /// The tensors that the step uses.
    fn uses(&self) -> impl Iterator<Item = TensorIndex> {
        let (inputs, single): (&[Use], Option<TensorIndex>) = match self {
            Step::Call(call) => (&call.inputs, None),
            Step::Read(read) => (std::slice::from_ref(read), None),
            Step::Free(tensor) => (&[], Some(*tensor)),
            Step::Upload { .. } | Step::Mark(_) => (&[], None),
        };
        inputs.iter().map(|input| input.tensor).chain(single)
    }

    /// The tensors that end with the step, and those that begin with it.
    pub fn deaths_and_births(
        &self,
    ) -> (impl Iterator<Item = TensorIndex>, impl Iterator<Item = TensorIndex>) {
        let (inputs, freed, outputs, made): (&[Use], _, &[TensorIndex], _) = match self {
            Step::Call(call) => (&call.inputs, None, &call.outputs, None),
            Step::Read(read) => (std::slice::from_ref(read), None, &[], None),
            Step::Free(tensor) => (&[], Some(*tensor), &[], None),
            Step::Upload { output, .. } => (&[], None, &[], Some(*output)),
            Step::Mark(_) => (&[], None, &[], None),
        };
        let consumed = inputs.iter().filter(|input| input.last).map(|input| input.tensor);
        (consumed.chain(freed), outputs.iter().copied().chain(made))
    }
}
