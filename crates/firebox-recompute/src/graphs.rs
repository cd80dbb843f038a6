//! Small random traces, and the cheapest recipe for each, found by trying all.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use burn_std::{DType, Shape};
use firebox_trace::{
    Bytes, Call, Description, DescriptionIndex, OpIndex, Origin, Step, TensorIndex, TensorInfo,
    TensorType, Trace, Use,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::cost::is_redoable;

#[derive(Debug)]
pub struct Graph {
    pub trace: Trace,
    pub costs: Vec<f64>,
}

/// What is drawn for a call: its inputs among all tensors before it, the size of its result, its
/// cost, how its result ends, and whether it draws random numbers.
type Drawn = (Vec<prop::sample::Index>, usize, u32, u8, u8);

/// Traces of up to nine calls.
pub fn graphs() -> impl Strategy<Value = Graph> {
    let inputs = vec(any::<prop::sample::Index>(), 1..3);
    let drawn = (inputs, 1_usize..9, 1_u32..9, 0_u8..8, 0_u8..10);
    (vec(drawn, 3..10), 1_usize..5).prop_map(|(calls, existing)| graph(&calls, existing))
}

fn graph(calls: &[Drawn], existing: usize) -> Graph {
    let info = |size: usize, origin| {
        let ty = TensorType { shape: Shape::new([size * 1024]), dtype: DType::U8 };
        TensorInfo::new(Arc::new(ty), origin)
    };
    let mut tensors = vec![info(existing, Origin::Existing)];
    let chosen: Vec<Vec<usize>> = calls
        .iter()
        .enumerate()
        .map(|(at, drawn)| {
            let mut chosen: Vec<usize> = drawn.0.iter().map(|index| index.index(at + 1)).collect();
            chosen.sort_unstable();
            chosen.dedup();
            if drawn.4 == 0 { Vec::new() } else { chosen }
        })
        .collect();
    let last_use = |tensor: usize| chosen.iter().rposition(|inputs| inputs.contains(&tensor));
    let (mut steps, mut costs, mut late) = (Vec::new(), Vec::new(), Vec::new());
    for (at, (_, size, cost, _, random)) in calls.iter().enumerate() {
        let made = tensors.len();
        // Tensor zero exists before and stays. Of the others some are used up by their last use,
        // some are freed after it or two calls later, and a few stay.
        let ends = |tensor: usize| (tensor > 0).then(|| calls[tensor - 1].3);
        let is_last = |tensor: usize| last_use(tensor) == Some(at);
        let uses = chosen[at].iter().map(|tensor| Use {
            tensor: TensorIndex(*tensor as u32),
            last: is_last(*tensor) && ends(*tensor).is_some_and(|ends| ends < 3),
        });
        tensors.push(info(*size, Origin::Made(OpIndex(steps.len() as u32))));
        let name = if *random == 0 { "float_random" } else { "float_add" };
        let call = Call {
            name: name.into(),
            inputs: uses.collect(),
            outputs: [TensorIndex(made as u32)].into_iter().collect(),
            description: DescriptionIndex(0),
        };
        steps.push(Step::Call(Box::new(call)));
        costs.push(f64::from(*cost));
        let freed = chosen[at].iter().copied().chain((last_use(made).is_none()).then_some(made));
        let freed = freed
            .filter(|tensor| *tensor == made || is_last(*tensor))
            .filter(|tensor| ends(*tensor).is_some_and(|ends| (3..7).contains(&ends)));
        // Some are held for two more calls.
        late.extend(freed.map(|tensor| (at + 2 * usize::from(ends(tensor) == Some(6)), tensor)));
        let is_end = at + 1 == calls.len();
        for (_, tensor) in late.extract_if(.., |(until, _)| *until <= at || is_end) {
            steps.push(Step::Free(TensorIndex(tensor as u32)));
            costs.push(0.0);
        }
    }
    let outputs = vec![9];
    let descriptions = vec![Description { outputs, ..Description::default() }.into()];
    let trace = Trace { tensors, steps, descriptions };
    trace.check().expect("it is a trace");
    Graph { trace, costs }
}

/// The most bytes of tensors that are alive at once.
pub fn bytes_at_peak(trace: &Trace) -> Bytes {
    let bytes = |tensor: TensorIndex| trace.tensor(tensor).bytes().get();
    let mut live: u64 = trace.existing().map(bytes).sum();
    let mut peak = live;
    for step in &trace.steps {
        let (ends, begins) = step.deaths_and_births();
        live += begins.map(bytes).sum::<u64>();
        peak = peak.max(live);
        live -= ends.map(bytes).sum::<u64>();
    }
    Bytes::new(peak)
}

/// The least cost of a recipe within `limit`, by Dijkstra's algorithm over what is alive before
/// each step. None if there is none.
pub fn cheapest(trace: &Trace, limit: Bytes, costs: &[f64]) -> Option<f64> {
    let bit = |tensor: TensorIndex| 1_u32 << tensor.0;
    let bytes = |alive: u32| -> u64 {
        let there = (0..trace.tensors.len() as u32).filter(|tensor| alive & (1 << tensor) != 0);
        there.map(|tensor| trace.tensor(TensorIndex(tensor)).bytes().get()).sum()
    };
    let fits = |alive: u32| bytes(alive) <= limit.get();
    let survivors: u32 = trace.survivors().into_iter().map(bit).sum();
    let droppable: u32 = trace
        .calls()
        .filter(|(_, call)| is_redoable(trace, call))
        .map(|(_, call)| bit(call.outputs[0]))
        .sum::<u32>()
        & !survivors;
    let begin: u32 = trace.existing().map(bit).sum();
    // What is alive after a call, if it can run.
    let run = |alive: u32, call: &Call| {
        let inputs: u32 = call.inputs.iter().map(|input| bit(input.tensor)).sum();
        let used: u32 = call.inputs.iter().filter(|of| of.last).map(|of| bit(of.tensor)).sum();
        let with = alive | bit(call.outputs[0]);
        (alive & inputs == inputs && fits(with)).then_some(with & !used)
    };
    let mut best: HashMap<(usize, u32), u64> = HashMap::new();
    let mut queue = BinaryHeap::from([Reverse((0_u64, 0_usize, begin))]);
    if !fits(begin) {
        return None;
    }
    while let Some(Reverse((cost, at, alive))) = queue.pop() {
        if at == trace.steps.len() {
            return Some(cost as f64);
        }
        if best.get(&(at, alive)).is_some_and(|known| *known <= cost) {
            continue;
        }
        best.insert((at, alive), cost);
        for tensor in (0..trace.tensors.len()).filter(|of| alive & droppable & (1 << of) != 0) {
            queue.push(Reverse((cost, at, alive & !(1 << tensor))));
        }
        for (of, call) in trace.calls().filter(|(of, _)| (of.0 as usize) < at) {
            let is_missing = alive & bit(call.outputs[0]) == 0;
            if is_missing
                && is_redoable(trace, call)
                && let Some(next) = run(alive, call)
            {
                queue.push(Reverse((cost + costs[of.0 as usize] as u64, at, next)));
            }
        }
        let next = match &trace.steps[at] {
            Step::Call(call) => run(alive, call),
            Step::Free(tensor) => Some(alive & !bit(*tensor)),
            _ => Some(alive),
        };
        if let Some(next) = next {
            queue.push(Reverse((cost, at + 1, next)));
        }
    }
    None
}
