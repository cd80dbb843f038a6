//! Verifies a rewritten trace against the recorded one. Shares no code with what made it.

use std::collections::{HashMap, HashSet};

use burn_backend::Distribution;
use burn_ir::{
    BoolOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr, ScalarIr,
};
use firebox_trace::{Call, Mark, OpIndex, Origin, Step, TensorIndex, Trace, TraceError, Use};

use crate::cost::is_redoable;
use crate::recipe::{Rewritten, StepOrigin};

/// How a rewritten trace differs from the recorded one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The trace contradicts itself.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace has another number of steps than of origins.
    #[error("origins are not those of the steps")]
    Origins,
    /// A recorded step is missing, comes twice or in another order.
    #[error("recorded step {0} is missing, comes twice or in another order")]
    Order(OpIndex),
    /// A step is not the recorded one that it says it is.
    #[error("step {at} is not the recorded step {of}")]
    Other {
        /// The step of the rewritten trace.
        at: OpIndex,
        /// The recorded step.
        of: OpIndex,
    },
    /// A call is repeated that must not be.
    #[error("step {0} must not be repeated")]
    Repeated(OpIndex),
    /// A step says that it packs or unpacks a mask, and does not.
    #[error("step {0} packs or unpacks no mask")]
    Mask(OpIndex),
    /// Other tensors are alive at the end.
    #[error("other tensors are alive at the end")]
    Survivors,
}

/// Verifies that `rewritten` computes what `trace` does: every recorded step once and in order, but
/// for the end of tensors, which may come earlier; repeats of calls that may be repeated, with the
/// recorded descriptions and flags, on versions of the recorded inputs; the recorded survivors,
/// made by recorded steps.
///
/// # Errors
///
/// The first difference.
pub fn check(trace: &Trace, rewritten: &Rewritten) -> Result<(), CheckError> {
    let Rewritten { trace: new, origins } = rewritten;
    new.check()?;
    let has_its_own = new.descriptions.starts_with(&trace.descriptions);
    if new.steps.len() != origins.len() || !has_its_own {
        return Err(CheckError::Origins);
    }
    let mut checker =
        Checker { trace, new, of: HashMap::new(), draws: HashSet::new(), packed: HashMap::new() };
    for (index, tensor) in trace.tensors.iter().enumerate() {
        if tensor.origin == Origin::Existing {
            checker.of.insert(TensorIndex(index as u32), TensorIndex(index as u32));
        }
    }
    let mut next = 0;
    for (at, (step, origin)) in new.steps.iter().zip(origins).enumerate() {
        let at = OpIndex(at as u32);
        match *origin {
            StepOrigin::Recorded(of) => {
                next = checker.skip_ends(next, of)?;
                checker.same(at, step, of)?;
                next += 1;
            }
            StepOrigin::Repeated(of) => checker.repeat(at, step, of)?,
            StepOrigin::Packed => checker.packed(step).ok_or(CheckError::Mask(at))?,
            StepOrigin::Unpacked => checker.unpacked(step).ok_or(CheckError::Mask(at))?,
            StepOrigin::Drained if step.is_mark(&Mark::Drain) => {}
            StepOrigin::Drained => return Err(CheckError::Origins),
            StepOrigin::Dropped if matches!(step, Step::Free(_)) => {}
            StepOrigin::Dropped => return Err(CheckError::Origins),
        }
    }
    checker.skip_ends(next, OpIndex(trace.steps.len() as u32))?;
    checker.survivors(origins)
}

struct Checker<'a> {
    trace: &'a Trace,
    new: &'a Trace,
    /// Of which recorded tensor each tensor is a version.
    of: HashMap<TensorIndex, TensorIndex>,
    /// Recorded tensors that were drawn from zero and one.
    draws: HashSet<TensorIndex>,
    /// Of which recorded mask each tensor holds the bytes.
    packed: HashMap<TensorIndex, TensorIndex>,
}

impl Checker<'_> {
    /// Steps from `next` up to `of`, which may only be ends of tensors.
    fn skip_ends(&self, next: usize, of: OpIndex) -> Result<usize, CheckError> {
        let until = of.0 as usize;
        if until < next || until > self.trace.steps.len() {
            return Err(CheckError::Order(of));
        }
        let missing = (next..until).find(|at| !matches!(self.trace.steps[*at], Step::Free(_)));
        missing.map_or(Ok(until), |at| Err(CheckError::Order(OpIndex(at as u32))))
    }

    fn is_version(&self, new: TensorIndex, recorded: TensorIndex) -> bool {
        self.of.get(&new) == Some(&recorded)
            && self.new.tensor(new).ty == self.trace.tensor(recorded).ty
    }

    fn same_inputs(&self, new: &[Use], recorded: &[Use]) -> bool {
        new.len() == recorded.len()
            && new.iter().zip(recorded).all(|(new, recorded)| {
                new.last == recorded.last && self.is_version(new.tensor, recorded.tensor)
            })
    }

    /// Verifies a call and notes of what its results are versions.
    fn same_call(&mut self, new: &Call, recorded: &Call) -> bool {
        let is_same = new.name == recorded.name
            && new.description == recorded.description
            && new.outputs.len() == recorded.outputs.len()
            && self.same_inputs(&new.inputs, &recorded.inputs);
        let made = new.outputs.iter().copied().zip(recorded.outputs.iter().copied());
        self.of.extend(made);
        is_same
    }

    fn note_draw(&mut self, recorded: &Call) {
        let operations = &self.trace.description(recorded).operations;
        let draws = |operation: &OperationIr| {
            matches!(
                operation,
                OperationIr::Float(
                    _,
                    FloatOperationIr::Random(RandomOpIr {
                        distribution: Distribution::Bernoulli(_),
                        ..
                    })
                )
            )
        };
        if operations.len() == 1 && operations.iter().all(draws) {
            self.draws.extend(&recorded.outputs);
        }
    }

    fn same(&mut self, at: OpIndex, step: &Step, of: OpIndex) -> Result<(), CheckError> {
        let trace = self.trace;
        let other = CheckError::Other { at, of };
        let is_same = match (step, trace.steps.get(of.0 as usize).ok_or(other.clone())?) {
            (Step::Call(new), Step::Call(recorded)) => {
                self.note_draw(recorded);
                self.same_call(new, recorded)
            }
            (Step::Upload { output, host }, Step::Upload { output: recorded, host: bytes }) => {
                self.of.insert(*output, *recorded);
                host == bytes
            }
            (Step::Free(new), Step::Free(recorded)) => {
                self.is_version(*new, *recorded) || self.packed.get(new) == Some(recorded)
            }
            (Step::Read(new), Step::Read(recorded)) => self.same_inputs(&[*new], &[*recorded]),
            (Step::Mark(new), Step::Mark(recorded)) => new == recorded,
            _ => false,
        };
        if is_same { Ok(()) } else { Err(other) }
    }

    fn repeat(&mut self, at: OpIndex, step: &Step, of: OpIndex) -> Result<(), CheckError> {
        let trace = self.trace;
        let (Step::Call(new), Some(Step::Call(recorded))) = (step, trace.steps.get(of.0 as usize))
        else {
            return Err(CheckError::Other { at, of });
        };
        if !is_redoable(trace, recorded) {
            return Err(CheckError::Repeated(of));
        }
        if self.same_call(new, recorded) { Ok(()) } else { Err(CheckError::Other { at, of }) }
    }

    /// The only input and output of a call that has one operation and uses its input up, and the
    /// operation.
    fn conversion(&self, step: &Step) -> Option<(TensorIndex, TensorIndex, &OperationIr)> {
        let Step::Call(call) = step else { return None };
        let ([input], [output]) = (&call.inputs[..], &call.outputs[..]) else { return None };
        let [operation] = self.new.description(call).operations.as_slice() else { return None };
        input.last.then_some((input.tensor, *output, operation))
    }

    /// Verifies that a step asks of each element of a mask whether it is greater than a half. A
    /// mask has drawn its elements from zero and one.
    fn packed(&mut self, step: &Step) -> Option<()> {
        let (mask, bytes, operation) = self.conversion(step)?;
        let recorded = *self.of.get(&mask)?;
        let OperationIr::NumericFloat(dtype, NumericOperationIr::GreaterElem(does)) = operation
        else {
            return None;
        };
        let (of_mask, of_bytes) = (&self.new.tensor(mask).ty, &self.new.tensor(bytes).ty);
        let is_right = self.draws.contains(&recorded)
            && *dtype == of_mask.dtype
            && does.rhs == ScalarIr::Float(0.5)
            && (&does.lhs.shape, does.lhs.dtype) == (&of_mask.shape, of_mask.dtype)
            && (&does.out.shape, does.out.dtype) == (&of_bytes.shape, of_bytes.dtype)
            && of_bytes.dtype.is_bool();
        self.packed.insert(bytes, recorded);
        is_right.then_some(())
    }

    /// Verifies that a step makes zeros and ones of the bytes of a mask.
    fn unpacked(&mut self, step: &Step) -> Option<()> {
        let (bytes, mask, operation) = self.conversion(step)?;
        let recorded = *self.packed.get(&bytes)?;
        let OperationIr::Bool(BoolOperationIr::IntoFloat(does)) = operation else { return None };
        let (of_bytes, of_mask) = (&self.new.tensor(bytes).ty, &self.trace.tensor(recorded).ty);
        let is_right = (&does.input.shape, does.input.dtype) == (&of_bytes.shape, of_bytes.dtype)
            && (&does.out.shape, does.out.dtype) == (&of_mask.shape, of_mask.dtype);
        self.of.insert(mask, recorded);
        is_right.then_some(())
    }

    fn survivors(&self, origins: &[StepOrigin]) -> Result<(), CheckError> {
        let mut alive = Vec::new();
        for new in self.new.survivors() {
            let is_recorded = match self.new.tensor(new).origin {
                Origin::Existing => true,
                Origin::Made(at) => {
                    matches!(origins[at.0 as usize], StepOrigin::Recorded(_))
                }
            };
            match self.of.get(&new) {
                Some(recorded) if is_recorded => alive.push(*recorded),
                _ => return Err(CheckError::Survivors),
            }
        }
        alive.sort_unstable();
        if alive == self.trace.survivors() { Ok(()) } else { Err(CheckError::Survivors) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::apply::apply;
    use crate::cost::Demand;
    use crate::graphs::{Graph, bytes_at_peak, graphs};
    use crate::select::select;

    /// A rewritten trace that repeats something, and the recorded one.
    fn rewritten(graph: Graph) -> Option<(Trace, Rewritten)> {
        let Graph { trace, costs } = graph;
        let limit = bytes_at_peak(&trace).scale(0.75);
        let selected = select(&trace, limit, &Demand::of(costs))?;
        let rewritten = apply(&trace, &selected.recipe).expect("it is a recipe for this trace");
        (selected.cost > 0.0).then_some((trace, rewritten))
    }

    fn places(rewritten: &Rewritten, is: impl Fn(&StepOrigin, &Step) -> bool) -> Vec<usize> {
        let steps = rewritten.origins.iter().zip(&rewritten.trace.steps);
        let steps = steps.enumerate().filter(|(_, (origin, step))| is(origin, step));
        steps.map(|(at, _)| at).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn mutants_are_rejected(graph in graphs(), of in any::<prop::sample::Index>(), kind in 0..5) {
            let Some((trace, mut mutant)) = rewritten(graph) else { return Ok(()) };
            prop_assert!(check(&trace, &mutant).is_ok());
            let repeats = places(&mutant, |origin, _| matches!(origin, StepOrigin::Repeated(_)));
            let calls = places(&mutant, |_, step| matches!(step, Step::Call(call) if !call.inputs.is_empty()));
            match kind {
                // A repeat is missing.
                0 => {
                    let at = repeats[of.index(repeats.len())];
                    mutant.trace.steps.remove(at);
                    mutant.origins.remove(at);
                }
                // A call uses up what it did not, or leaves what it did.
                1 => {
                    let at = calls[of.index(calls.len())];
                    let Step::Call(call) = &mut mutant.trace.steps[at] else { unreachable!() };
                    call.inputs[0].last ^= true;
                }
                // A random draw is repeated.
                2 => {
                    let draws = trace.calls().filter(|(_, call)| !is_redoable(&trace, call));
                    let Some((draw, _)) = draws.last() else { return Ok(()) };
                    let Step::Call(recorded) = &trace.steps[draw.0 as usize] else { unreachable!() };
                    let new = TensorIndex(mutant.trace.tensors.len() as u32);
                    let made = trace.tensor(recorded.outputs[0]).clone();
                    let end = mutant.trace.steps.len();
                    let origin = Origin::Made(OpIndex(end as u32));
                    mutant.trace.tensors.push(firebox_trace::TensorInfo { origin, ..made });
                    let repeat = Call { outputs: [new].into_iter().collect(), ..(**recorded).clone() };
                    mutant.trace.steps.push(Step::Call(Box::new(repeat)));
                    mutant.trace.steps.push(Step::Free(new));
                    mutant.origins.extend([StepOrigin::Repeated(draw), StepOrigin::Dropped]);
                }
                // Two recorded calls are swapped.
                3 => {
                    let recorded = places(&mutant, |origin, step| {
                        matches!((origin, step), (StepOrigin::Recorded(_), Step::Call(_)))
                    });
                    if recorded.len() < 2 {
                        return Ok(());
                    }
                    let at = of.index(recorded.len() - 1);
                    mutant.trace.steps.swap(recorded[at], recorded[at + 1]);
                    mutant.origins.swap(recorded[at], recorded[at + 1]);
                }
                // A repeat says that it is another call's.
                _ => {
                    let at = repeats[of.index(repeats.len())];
                    let StepOrigin::Repeated(is) = mutant.origins[at] else { unreachable!() };
                    let others = trace.calls().map(|(at, _)| at).filter(|at| *at != is);
                    let others: Vec<OpIndex> = others.collect();
                    mutant.origins[at] = StepOrigin::Repeated(others[of.index(others.len())]);
                }
            }
            prop_assert!(check(&trace, &mutant).is_err(), "mutant {} passes", kind);
        }
    }
}
