//! Parks the optimizer's state in a rehearsed iteration, as `park.rs` does when it runs.

use firebox_trace::{
    Bytes, Category, Mark, OpIndex, Origin, Step, TensorIndex, TensorInfo, Trace, Use,
};
use rustc_hash::{FxHashMap, FxHashSet};

/// Whether the optimizer's state is outside of the device between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Parks {
    /// It is not, and could not be.
    #[default]
    Never,
    /// It could be. What does not fit otherwise is told what it would need then.
    Could,
    Does,
}

/// Parks state behind its last use in each optimizer step, and uploads it before its next. Returns
/// what is parked at the end of the last one.
pub(crate) fn park_state(trace: &mut Trace) -> Vec<TensorInfo> {
    let mut leaving = leaving(trace);
    let (mut state, mut parked) = (Moved::default(), Vec::new());
    let mut steps = Vec::with_capacity(trace.steps.len());
    for (at, step) in std::mem::take(&mut trace.steps).into_iter().enumerate() {
        // A micro-step brings back for itself what it uses.
        let is_end_of_part = matches!(step, Step::Mark(Mark::MicroStepEnd(_)));
        if is_end_of_part || step.is_mark(&Mark::IterationEnd) {
            steps.extend(state.end().map(Step::Free));
            parked = state.now.keys().map(|tensor| trace.tensor(*tensor).clone()).collect();
        }
        let Some(step) = state.before(step, trace, &mut steps) else { continue };
        steps.push(step);
        for tensor in leaving.remove(&at).unwrap_or_default() {
            steps.push(Step::Read(Use { tensor, last: true }));
            state.now.insert(tensor, Now::Parked);
        }
    }
    trace.steps = steps;
    trace.renumber_origins();
    parked
}

/// The state that each optimizer step makes and leaves, or takes over from gradients, by the step
/// that uses it last.
fn leaving(trace: &Trace) -> FxHashMap<usize, Vec<TensorIndex>> {
    let mut leaving: FxHashMap<usize, Vec<TensorIndex>> = FxHashMap::default();
    let (mut known, mut begin) = (FxHashSet::default(), None);
    for (at, step) in trace.steps.iter().enumerate() {
        if step.is_mark(&Mark::OptimizerStep) {
            begin = Some(at);
        } else if step.is_mark(&Mark::IterationEnd)
            && let Some(begin) = begin.take()
        {
            let last = trace.last_uses(begin..at);
            // What a read runs is parked once the whole step is known, behind the last read.
            let reads = trace.reads().filter(|read| (begin..at).contains(&(read.0 as usize)));
            let last_read = reads.last();
            for tensor in trace.alive_before(OpIndex(at as u32)) {
                let Some(last) = last.get(&tensor) else { continue };
                let made = is_made_by_call(trace, tensor, begin);
                let may = is_state(trace.tensor(tensor)) && made;
                // What an earlier step has parked is brought back, and need not be read again.
                if may && known.insert(tensor) {
                    let last = last_read.map_or(*last, |read| read.max(*last));
                    leaving.entry(last.0 as usize).or_default().push(tensor);
                }
            }
        }
    }
    leaving
}

/// Whether a call of an optimizer step has made a tensor.
fn is_made_by_call(trace: &Trace, tensor: TensorIndex, begin: usize) -> bool {
    match trace.tensor(tensor).origin {
        Origin::Made(OpIndex(at)) if at as usize > begin => {
            matches!(trace.steps[at as usize], Step::Call(_))
        }
        _ => false,
    }
}

fn is_state(tensor: &TensorInfo) -> bool {
    tensor.label.as_ref().is_some_and(|label| label.category == Category::OptimizerState)
}

/// Where a tensor is that was parked once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Now {
    Parked,
    /// On the device, under this number.
    Here(TensorIndex),
}

#[derive(Default)]
struct Moved {
    now: FxHashMap<TensorIndex, Now>,
}

impl Moved {
    /// Uploads what a step uses, and renames it. `None` for a step that has nothing left to do.
    fn before(&mut self, mut step: Step, trace: &mut Trace, steps: &mut Vec<Step>) -> Option<Step> {
        match &mut step {
            Step::Call(call) => {
                for input in &mut call.inputs {
                    self.bring(input, trace, steps);
                }
            }
            Step::Read(read) => self.bring(read, trace, steps),
            Step::Free(tensor) => match self.now.remove(tensor) {
                Some(Now::Parked) => return None,
                Some(Now::Here(here)) => *tensor = here,
                None => {}
            },
            // Parked by an earlier optimizer step of the process.
            Step::Upload { output, .. } if is_state(trace.tensor(*output)) => {
                self.now.insert(*output, Now::Here(*output));
            }
            Step::Upload { .. } | Step::Mark(_) => {}
        }
        Some(step)
    }

    fn bring(&mut self, used: &mut Use, trace: &mut Trace, steps: &mut Vec<Step>) {
        let tensor = used.tensor;
        let here = match self.now.get(&tensor) {
            None => return,
            Some(Now::Here(here)) => *here,
            Some(Now::Parked) => {
                let output = TensorIndex(trace.tensors.len() as u32);
                trace.tensors.push(trace.tensor(tensor).clone());
                steps.push(Step::Upload { output, host: Bytes::ZERO });
                output
            }
        };
        used.tensor = here;
        match used.last {
            true => drop(self.now.remove(&tensor)),
            false => drop(self.now.insert(tensor, Now::Here(here))),
        }
    }

    /// What was brought back and is parked all the same, once an optimizer step ends.
    fn end(&mut self) -> impl Iterator<Item = TensorIndex> + use<> {
        let mut left = Vec::new();
        for now in self.now.values_mut() {
            if let Now::Here(here) = std::mem::replace(now, Now::Parked) {
                left.push(here);
            }
        }
        left.sort_unstable();
        left.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::Tensor;
    use firebox_lazy::{Lazy, StepRecorder, mark};

    use super::*;
    use crate::planner::labels::{label_by_lifetime, retire_what_is_replaced};

    type T = Tensor<Lazy<Flex>, 1>;

    /// Two optimizer steps with momentum, of which one may not replace its state.
    fn rehearsed(replaces: bool) -> Trace {
        let gradient = T::ones([4], &Default::default());
        let recording = StepRecorder::new().record::<Flex, _>(|| {
            let mut state: Option<T> = None;
            for step in 0..3 {
                mark::<Flex>(Mark::OptimizerStep);
                let update = gradient.clone() * 0.1;
                let update = match state.take() {
                    None => update,
                    Some(before) if step == 1 && !replaces => {
                        state = Some(before.clone());
                        before + update
                    }
                    Some(before) => before * 0.9 + update,
                };
                let parameter = update.clone().exp();
                state.get_or_insert(update);
                drop(parameter);
                mark::<Flex>(Mark::IterationEnd);
            }
            state
        });
        let mut trace = recording.expect("nothing else is recorded").discard().trace;
        label_by_lifetime(&mut trace);
        retire_what_is_replaced(&mut trace);
        trace
    }

    fn steps(trace: &Trace) -> String {
        let name = |step: &Step| match step {
            Step::Mark(Mark::IterationEnd) => "|".to_owned(),
            Step::Mark(_) => String::new(),
            step => step.name().trim_start_matches("float_").to_owned(),
        };
        let names: Vec<String> = trace.steps.iter().map(name).filter(|n| !n.is_empty()).collect();
        names.join(" ")
    }

    #[test]
    fn state_leaves_behind_its_last_use_and_comes_back_before_the_next() {
        let mut trace = rehearsed(true);
        let calls = |trace: &Trace| trace.calls().map(|(_, call)| call.name.clone()).collect();
        let before: Vec<_> = calls(&trace);
        let parked = park_state(&mut trace);
        assert_eq!(trace.check(), Ok(()));
        assert_eq!(
            steps(&trace),
            "mul_scalar exp read free | \
             mul_scalar upload mul_scalar add exp read free | \
             mul_scalar upload mul_scalar add exp read free |"
        );
        assert_eq!(calls(&trace), before);
        assert_eq!(parked.len(), 1);
        let alive = trace.survivors();
        assert!(alive.iter().all(|tensor| trace.tensor(*tensor).origin == Origin::Existing));
    }

    #[test]
    fn state_that_is_not_replaced_stays_where_it_is() {
        let mut trace = rehearsed(false);
        park_state(&mut trace);
        assert_eq!(trace.check(), Ok(()));
        assert_eq!(
            steps(&trace),
            "mul_scalar exp read free | \
             mul_scalar upload add exp free free free | \
             mul_scalar upload mul_scalar add exp read free |"
        );
    }

    #[test]
    fn nothing_happens_without_an_optimizer() {
        let record = || T::ones([4], &Default::default()) + 1.0;
        let recording = StepRecorder::new().record::<Flex, _>(record).expect("it is recorded");
        let mut trace = recording.discard().trace;
        let before = trace.clone();
        assert!(park_state(&mut trace).is_empty());
        assert_eq!(trace, before);
    }
}
