//! Tests the lifetimes in a trace, and that thousands of recordings leave nothing behind.

use burn::backend::Flex;
use burn::prelude::*;
use firebox::Lazy;
use firebox::trace::{Arrival, Step, StepRecorder};

type L = Lazy<Flex>;

/// Steps of a program on one tensor of two elements, one per line.
fn steps(program: impl FnOnce(Tensor<L, 1>) -> Option<Tensor<L, 1>>) -> Vec<String> {
    let x = Tensor::<L, 1>::ones([2], &Default::default());
    let recording = StepRecorder::new().record::<Flex, _>(|| program(x.clone())).expect("records");
    let trace = recording.trace();
    assert_eq!(trace.check(), Ok(()));
    let lines = trace.steps.iter().map(|step| match step {
        Step::Call(call) => {
            let inputs = call
                .inputs
                .iter()
                .map(|input| format!(" {}{}", input.tensor, if input.last { "!" } else { "" }));
            let outputs = call.outputs.iter().map(|output| format!(" {output}"));
            format!("{}{} ->{}", call.name, inputs.collect::<String>(), outputs.collect::<String>())
        }
        Step::Free(tensor) => format!("free {tensor}"),
        Step::Upload { output, .. } => format!("upload -> {output}"),
        Step::Read(read) => format!("read {}", read.tensor),
        Step::Mark(mark) => format!("mark {mark:?}"),
    });
    lines.collect()
}

#[test]
fn a_last_use_owns_its_tensor() {
    assert_eq!(
        steps(|x| Some(x.exp().log())),
        ["float_exp %0 -> %1", "float_log %1! -> %2"],
        "the caller still holds %0"
    );
}

#[test]
fn a_dropped_tensor_is_freed_where_it_is_dropped() {
    let program = |x: Tensor<L, 1>| {
        let y = x.clone().exp();
        let z = y.clone().log();
        drop(y);
        Some(z.sqrt())
    };
    assert_eq!(
        steps(program),
        ["float_exp %0 -> %1", "float_log %1 -> %2", "free %1", "float_sqrt %2! -> %3"]
    );
}

#[test]
fn tensors_that_are_dropped_together_are_freed_in_the_order_of_making() {
    let program = |x: Tensor<L, 1>| {
        let [first, second] = [x.clone().exp(), x.clone().log()];
        let [third, fourth] = [x.clone().sqrt(), x.clone().abs()];
        // Drops in arbitrary order, as burn does with its map of gradients.
        drop((fourth, first, third));
        let sum = x.sum();
        drop(second);
        Some(sum)
    };
    let calls = ["float_exp %0 -> %1", "float_log %0 -> %2", "float_sqrt %0 -> %3"];
    let ends = ["free %1", "free %3", "free %4", "float_sum %0 -> %5", "free %2"];
    assert_eq!(steps(program), [&calls[..], &["float_abs %0 -> %4"], &ends].concat());
}

#[test]
fn each_arriving_batch_is_its_own_and_ends_with_its_last_owner() {
    let program = |x: Tensor<L, 1>| {
        let first = Arrival::new();
        // What metrics hold of a batch outlives it.
        let held = first.cut(|| x.clone());
        let part = first.cut(|| x.clone().exp());
        drop((first, part));
        let second = Arrival::new();
        let sum = second.cut(|| x.clone()).sum();
        drop(held);
        drop(second);
        Some(sum)
    };
    let lines = [
        "upload -> %0",
        "float_exp %0 -> %1",
        "free %1",
        "upload -> %2",
        "float_sum %2 -> %3",
        "free %0",
        "free %2",
    ];
    assert_eq!(steps(program), lines);
}

#[test]
fn a_batch_that_arrives_has_the_values_of_the_one_that_exists() {
    let device = Default::default();
    let x = Tensor::<L, 1>::from_floats([1.0, 2.0], &device);
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        let copy = Arrival::new().cut(|| x.clone());
        // A read runs what comes before it.
        let read: f32 = copy.clone().sum().into_scalar();
        (copy, read, x.clone() + 1.0)
    });
    let (copy, read, sum) = recording.expect("records").run();
    assert_eq!(read, 3.0);
    copy.into_data().assert_eq(&x.into_data(), true);
    assert_eq!(sum.into_data().to_vec::<f32>().expect("floats"), [2.0, 3.0]);
}

#[test]
fn a_whole_operation_hides_its_decomposition() {
    let lines = steps(|x| Some(burn::tensor::activation::gelu(x)));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("gelu %0 -> %"), "{lines:?}");
}

#[test]
fn equal_programs_have_equal_structures() {
    let device = Default::default();
    let structure = |items: usize, scale: f32, log: bool| {
        let x = Tensor::<L, 2>::ones([items, 3], &device);
        let recording = StepRecorder::new().record::<Flex, _>(|| {
            let y = x.clone().mul_scalar(scale);
            if log { y.log() } else { y.exp() }
        });
        recording.expect("records").trace().structural_hash()
    };
    assert_eq!(structure(4, 1.0, true), structure(4, 2.5, true), "values do not count");
    assert_ne!(structure(4, 1.0, true), structure(5, 1.0, true), "shapes do");
    assert_ne!(structure(4, 1.0, true), structure(4, 1.0, false), "operations do");
}

#[test]
fn where_a_slice_begins_is_structure_only_as_far_as_it_is_aligned() {
    let device = Default::default();
    let images = Tensor::<L, 4>::ones([2, 3, 40, 40], &device);
    let crop = |y: usize, x: usize, size: usize| {
        let recording = StepRecorder::new().record::<Flex, _>(|| {
            let crop = images.clone().slice([0..2, 0..3, y..y + size, x..x + size]);
            images.clone().slice_assign([0..2, 0..3, y..y + size, x..x + size], crop.exp())
        });
        recording.expect("records").trace().structural_hash()
    };
    assert_eq!(crop(1, 3, 16), crop(9, 7, 16));
    assert_ne!(crop(1, 3, 16), crop(1, 3, 15), "its size is");
    assert_ne!(crop(1, 3, 16), crop(1, 4, 16), "16 bytes are more aligned than 12");
    let all: Vec<_> = (0..24).flat_map(|y| (0..24).map(move |x| crop(y, x, 16))).collect();
    let different: std::collections::HashSet<_> = all.iter().collect();
    assert!(different.len() < all.len() / 8, "{} of {}", different.len(), all.len());
}

#[test]
fn a_thousand_discards_leave_a_tensor_unshared() {
    let device = Default::default();
    let x = Tensor::<L, 1>::ones([8], &device);
    for _ in 0..1000 {
        let recording = StepRecorder::new().record::<Flex, _>(|| (x.clone() + 1.0).exp().sum());
        recording.expect("records").discard();
    }
    let primitive = x.into_primitive().tensor().into_inner();
    assert!(primitive.is_unique(), "a recording still holds the tensor");
}

#[test]
fn a_trace_survives_serialization() {
    let x = Tensor::<L, 2>::ones([2, 3], &Default::default());
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        burn::tensor::activation::softmax(x.clone(), 1).matmul(x.transpose())
    });
    let trace = recording.expect("records").trace().clone();
    let text = serde_json::to_string(&trace).expect("a trace is plain data");
    let back: firebox::trace::Trace = serde_json::from_str(&text).expect("it reads what it wrote");
    assert_eq!(back, trace);
    assert_eq!(back.structural_hash(), trace.structural_hash());
}
