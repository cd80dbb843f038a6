//! Walks through traces that are hard: ends that come late, and long chains.

use std::sync::Arc;

use burn_std::Shape;
use firebox_trace::{Description, DescriptionIndex, Origin, TensorInfo, TensorType, Trace, Use};

use super::*;
use crate::{apply, check, select};

/// A trace of calls that each make one tensor of some KiB from others, and of ends of tensors.
/// The first tensors exist.
fn trace(existing: &[usize], steps: &[(&[u32], usize)]) -> Trace {
    let info = |size: usize, origin| {
        let ty = TensorType { shape: Shape::new([size * 1024]), dtype: DType::U8 };
        TensorInfo::new(Arc::new(ty), origin)
    };
    let mut tensors: Vec<TensorInfo> =
        existing.iter().map(|size| info(*size, Origin::Existing)).collect();
    let mut trace = Trace::default();
    for (at, (inputs, size)) in steps.iter().enumerate() {
        if *size == 0 {
            trace.steps.push(Step::Free(TensorIndex(inputs[0])));
            continue;
        }
        let uses = inputs.iter().map(|of| Use { tensor: TensorIndex(*of), last: false });
        let output = TensorIndex(tensors.len() as u32);
        tensors.push(info(*size, Origin::Made(OpIndex(at as u32))));
        trace.steps.push(Step::Call(Box::new(Call {
            name: "float_add".into(),
            inputs: uses.collect(),
            outputs: [output].into_iter().collect(),
            description: DescriptionIndex(0),
        })));
    }
    trace.tensors = tensors;
    trace.descriptions = vec![Description { outputs: vec![0], ..Description::default() }.into()];
    trace.check().expect("it is a trace");
    trace
}

fn within(trace: &Trace, kib: u64) -> Selected {
    let demand = Demand::of(vec![1.0; trace.steps.len()]);
    let selected = select(trace, Bytes::kib(kib), &demand).expect("it is not too much");
    let rewritten = apply(trace, &selected.recipe).expect("it is a recipe for this trace");
    check(trace, &rewritten).expect("values stay what they are");
    selected
}

/// Tensor 2 is made of 0, is used a last time before 0 ends, and tensor 3 is made of it.
#[test]
fn what_others_are_made_of_stays_when_it_cannot_be_made_again() {
    let steps: &[(&[u32], usize)] = &[
        (&[0], 8),  // 2
        (&[2], 8),  // 3
        (&[1], 32), // 4, for which there is no room
        (&[4], 1),  // 5
        (&[4], 0),
        (&[2], 1), // 6
        (&[0], 0),
        (&[3], 1), // 7
        (&[2], 0),
        (&[3], 0),
    ];
    let trace = trace(&[1, 1], steps);
    let selected = within(&trace, 36);
    assert!(selected.peak <= Bytes::kib(36), "{selected:?}");
    assert_eq!(selected.cost, 2.0, "both are made once more");
}

#[test]
fn a_long_chain_is_made_again_without_recursion() {
    const LENGTH: u32 = 60_000;
    let mut steps: Vec<(Vec<u32>, usize)> = Vec::new();
    // Each is made of the one before it, all are kept, and are used again from the last one on.
    for at in 0..LENGTH {
        steps.push((vec![at], 1));
    }
    for at in (1..LENGTH).rev() {
        steps.push((vec![at], 0));
    }
    steps.push((vec![LENGTH], 1));
    let steps: Vec<(&[u32], usize)> =
        steps.iter().map(|(inputs, size)| (inputs.as_slice(), *size)).collect();
    let trace = trace(&[1], &steps);
    let demand = Demand::of(vec![1.0; trace.steps.len()]);
    let lives = Lives::of(&trace, None);
    let clock: Vec<f64> = (0..trace.steps.len()).map(|at| at as f64).collect();
    let keeps = vec![false; trace.tensors.len()];
    let mut walk = Walk::new(&lives, u64::MAX, &demand, &clock, (1.0, 1.0, 1.0), &keeps);
    (0..LENGTH as usize).for_each(|at| walk.step(at));
    (1..=LENGTH).for_each(|root| walk.drop_buffer(LENGTH as usize, root as usize));
    walk.need(TensorIndex(LENGTH), LENGTH as usize);
    assert_eq!(walk.spent, f64::from(LENGTH));
}
