//! Applies a recipe to a trace.

use std::collections::HashMap;
use std::sync::Arc;

use burn_std::DType;
use firebox_trace::{
    Call, Description, DescriptionIndex, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo,
    TensorType, Trace, Use,
};

use crate::masks::{PACK, UNPACK, makes_mask, packs, unpacks};
use crate::recipe::{Anchor, Anchors, Edit, Recipe, Rewritten, StepOrigin};

/// Why a recipe does not fit a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// An edit names a step that the trace does not have, or that is no call, or comes too late.
    #[error("edit {0} does not fit the trace")]
    Misplaced(usize),
    /// The trace contradicts itself.
    #[error("step {0} ends a tensor that is not there")]
    Contradiction(OpIndex),
    /// A call needs a tensor that was dropped.
    #[error("step {at} needs tensor {tensor}, which was dropped")]
    Dropped {
        /// The recorded step.
        at: OpIndex,
        /// The recorded tensor.
        tensor: TensorIndex,
    },
}

/// Where a recorded tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Unborn,
    /// Alive, as this tensor of the rewritten trace.
    Is(TensorIndex),
    /// A mask that this tensor holds in bytes.
    Packed(TensorIndex),
    /// A recipe dropped it, or used up a repeat.
    Dropped,
    /// It has ended where it was recorded to.
    Ended,
}

/// The trace that a recipe makes of a recorded one.
///
/// # Errors
///
/// If the recipe is one for another trace.
pub fn apply(trace: &Trace, recipe: &Recipe) -> Result<Rewritten, ApplyError> {
    let mut rewriting = Rewriting::new(trace, recipe.drains);
    rewriting.run(&recipe.edits)?;
    Ok(rewriting.finish())
}

/// The tensors of each buffer that has views or was made, by its owner.
fn members(trace: &Trace) -> HashMap<TensorIndex, Vec<TensorIndex>> {
    let mut members: HashMap<TensorIndex, Vec<TensorIndex>> = HashMap::new();
    for (tensor, root) in trace.buffers().into_iter().enumerate() {
        members.entry(root).or_default().push(TensorIndex(tensor as u32));
    }
    members
}

/// A trace that is being rewritten.
struct Rewriting<'a> {
    trace: &'a Trace,
    anchors: Anchors,
    /// The tensors of each buffer, by its owner.
    members: HashMap<TensorIndex, Vec<TensorIndex>>,
    versions: Vec<Version>,
    tensors: Vec<TensorInfo>,
    steps: Vec<Step>,
    origins: Vec<StepOrigin>,
    /// Descriptions that the recorded trace does not have.
    more: Vec<Description>,
    drains: bool,
    /// Whether there are repeats in the queue.
    undrained: bool,
}

impl<'a> Rewriting<'a> {
    fn new(trace: &'a Trace, drains: bool) -> Self {
        let existing = |tensor: &TensorInfo, index: usize| match tensor.origin {
            Origin::Existing => Version::Is(TensorIndex(index as u32)),
            Origin::Made(_) => Version::Unborn,
        };
        Self {
            trace,
            anchors: Anchors::of(trace),
            members: members(trace),
            versions: trace.tensors.iter().enumerate().map(|(at, of)| existing(of, at)).collect(),
            tensors: trace.tensors.clone(),
            steps: Vec::with_capacity(trace.steps.len()),
            origins: Vec::with_capacity(trace.steps.len()),
            more: Vec::new(),
            drains,
            undrained: false,
        }
    }

    /// Rewrites the recorded steps.
    fn run(&mut self, edits: &[Edit]) -> Result<(), ApplyError> {
        let mut edits = edits.iter().copied().enumerate().peekable();
        let mut anchor = Anchor::default();
        for at in 0..=self.trace.steps.len() {
            let step = self.trace.steps.get(at);
            let at = OpIndex(at as u32);
            if !matches!(step, Some(Step::Free(_))) {
                while let Some((number, edit)) = edits.next_if(|(_, edit)| edit.before() == anchor)
                {
                    self.edit(at, number, edit)?;
                }
                anchor.0 += 1;
            }
            if step.is_some() {
                self.record(at)?;
            }
        }
        // One that comes after an edit of a later step is left over as well.
        edits.next().map_or(Ok(()), |(number, _)| Err(ApplyError::Misplaced(number)))
    }

    fn finish(self) -> Rewritten {
        let Self { trace, tensors, steps, origins, more, .. } = self;
        let more = more.into_iter().map(Arc::new);
        let descriptions = trace.descriptions.iter().cloned().chain(more).collect();
        Rewritten { trace: Trace { tensors, steps, descriptions }, origins }
    }

    fn push(&mut self, step: Step, origin: StepOrigin) {
        debug_assert!(!self.undrained || origin.is_new(), "the queue was drained");
        self.undrained |= self.drains && origin.is_new();
        self.steps.push(step);
        self.origins.push(origin);
    }

    fn version(&mut self, tensor: TensorIndex) -> &mut Version {
        &mut self.versions[tensor.0 as usize]
    }

    fn edit(&mut self, at: OpIndex, number: usize, edit: Edit) -> Result<(), ApplyError> {
        let misplaced = ApplyError::Misplaced(number);
        match edit {
            Edit::Drop { buffer, .. } => {
                let root = Rewritten::made(self.trace, &self.anchors, buffer).ok_or(misplaced)?;
                self.drop_buffer(root);
                Ok(())
            }
            Edit::Pack { mask, dtype, .. } => {
                let step = self.anchors.step(mask.by).map(|at| &self.trace.steps[at.0 as usize]);
                let Some(Step::Call(call)) = step else { return Err(misplaced) };
                let mask = call.outputs.get(mask.result as usize).copied();
                let mask = mask.filter(|_| makes_mask(self.trace, call));
                mask.and_then(|mask| self.pack(mask, dtype)).ok_or(misplaced)
            }
            Edit::Unpack { mask, .. } => {
                let mask = Rewritten::made(self.trace, &self.anchors, mask);
                mask.and_then(|mask| self.unpack(mask)).ok_or(misplaced)
            }
            Edit::Redo { call, .. } => {
                let call = self.anchors.step(call).filter(|call| *call < at);
                self.redo(call.ok_or(misplaced.clone())?, misplaced)
            }
        }
    }

    /// None if the tensor is not there.
    fn pack(&mut self, mask: TensorIndex, dtype: DType) -> Option<()> {
        let trace = self.trace;
        let Version::Is(is) = *self.version(mask) else { return None };
        let shape = trace.tensor(mask).shape.clone();
        let ty = TensorType { shape, dtype }.into();
        let does = packs(trace, mask, dtype);
        let packed = self.convert(PACK, is, ty, does, StepOrigin::Packed);
        *self.version(mask) = Version::Packed(packed);
        Some(())
    }

    /// None if the tensor is not packed.
    fn unpack(&mut self, mask: TensorIndex) -> Option<()> {
        let trace = self.trace;
        let Version::Packed(packed) = *self.version(mask) else { return None };
        let ty = trace.tensor(mask).ty.clone();
        let does = unpacks(trace, mask, self.tensors[packed.0 as usize].dtype);
        let new = self.convert(UNPACK, packed, ty, does, StepOrigin::Unpacked);
        *self.version(mask) = Version::Is(new);
        Some(())
    }

    /// Adds a call that uses up a tensor and makes another one of it.
    fn convert(
        &mut self,
        name: &'static str,
        from: TensorIndex,
        ty: Arc<TensorType>,
        does: Description,
        origin: StepOrigin,
    ) -> TensorIndex {
        let known = self.more.iter().position(|known| *known == does);
        let more = known.unwrap_or_else(|| {
            self.more.push(does);
            self.more.len() - 1
        });
        let made = Origin::Made(OpIndex(self.steps.len() as u32));
        let new = TensorIndex(self.tensors.len() as u32);
        let mut info = TensorInfo::new(ty, made);
        info.label = self.tensors[from.0 as usize].label.clone();
        self.tensors.push(info);
        let call = Call {
            name: name.into(),
            inputs: [Use { tensor: from, last: true }].into_iter().collect(),
            outputs: [new].into_iter().collect(),
            description: DescriptionIndex((self.trace.descriptions.len() + more) as u32),
        };
        self.push(Step::Call(Box::new(call)), origin);
        new
    }

    fn drop_buffer(&mut self, root: TensorIndex) {
        self.drain();
        let members = self.members.get(&root).cloned();
        for tensor in members.unwrap_or_else(|| vec![root]) {
            if let Version::Is(is) = *self.version(tensor) {
                *self.version(tensor) = Version::Dropped;
                self.push(Step::Free(is), StepOrigin::Dropped);
            }
        }
    }

    /// The inputs of a call as they are now. Those that it uses up are `after` it.
    fn inputs(&mut self, at: OpIndex, call: &Call, after: Version) -> Result<Vec<Use>, ApplyError> {
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for input in &call.inputs {
            let tensor = input.tensor;
            let Version::Is(is) = *self.version(tensor) else {
                return Err(ApplyError::Dropped { at, tensor });
            };
            inputs.push(Use { tensor: is, last: input.last });
        }
        for input in call.inputs.iter().filter(|input| input.last) {
            *self.version(input.tensor) = after;
        }
        Ok(inputs)
    }

    fn redo(&mut self, of: OpIndex, misplaced: ApplyError) -> Result<(), ApplyError> {
        let trace = self.trace;
        let Step::Call(call) = &trace.steps[of.0 as usize] else { return Err(misplaced) };
        let inputs = self.inputs(of, call, Version::Dropped)?;
        let at = OpIndex(self.steps.len() as u32);
        let mut outputs = Vec::with_capacity(call.outputs.len());
        let mut twice = Vec::new();
        for output in &call.outputs {
            let new = TensorIndex(self.tensors.len() as u32);
            let info = trace.tensor(*output).clone();
            self.tensors.push(TensorInfo { origin: Origin::Made(at), ..info });
            outputs.push(new);
            match self.version(*output) {
                Version::Is(_) => twice.push(new),
                version => *version = Version::Is(new),
            }
        }
        let repeat = Call {
            inputs: inputs.into(),
            outputs: outputs.into(),
            name: call.name.clone(),
            description: call.description,
        };
        self.push(Step::Call(Box::new(repeat)), StepOrigin::Repeated(of));
        if !twice.is_empty() {
            self.drain();
        }
        twice.into_iter().for_each(|new| self.push(Step::Free(new), StepOrigin::Dropped));
        Ok(())
    }

    /// Empties the queue if there are repeats in it.
    fn drain(&mut self) {
        if std::mem::take(&mut self.undrained) {
            self.push(Step::Mark(Mark::Drain), StepOrigin::Drained);
        }
    }

    fn record(&mut self, at: OpIndex) -> Result<(), ApplyError> {
        self.drain();
        let trace = self.trace;
        let now = OpIndex(self.steps.len() as u32);
        let step = match &trace.steps[at.0 as usize] {
            Step::Call(call) => {
                let inputs = self.inputs(at, call, Version::Ended)?;
                for output in &call.outputs {
                    *self.version(*output) = Version::Is(*output);
                    self.tensors[output.0 as usize].origin = Origin::Made(now);
                }
                Step::Call(Box::new(Call { inputs: inputs.into(), ..(**call).clone() }))
            }
            Step::Upload { output, host } => {
                *self.version(*output) = Version::Is(*output);
                self.tensors[output.0 as usize].origin = Origin::Made(now);
                Step::Upload { output: *output, host: *host }
            }
            Step::Free(tensor) => match *self.version(*tensor) {
                Version::Is(is) | Version::Packed(is) => {
                    *self.version(*tensor) = Version::Ended;
                    Step::Free(is)
                }
                // It has ended before.
                Version::Dropped => return Ok(()),
                Version::Unborn | Version::Ended => return Err(ApplyError::Contradiction(at)),
            },
            Step::Read(read) => {
                let tensor = read.tensor;
                let Version::Is(is) = *self.version(tensor) else {
                    return Err(ApplyError::Dropped { at, tensor });
                };
                if read.last {
                    *self.version(tensor) = Version::Ended;
                }
                Step::Read(Use { tensor: is, last: read.last })
            }
            Step::Mark(mark) => Step::Mark(mark.clone()),
        };
        self.push(step, StepOrigin::Recorded(at));
        Ok(())
    }
}
