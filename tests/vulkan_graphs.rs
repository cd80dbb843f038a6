//! Random programs on a Vulkan device, real or software, and on its twin without memory. Bytes in
//! use at their end are equal to the byte.
//!
//! One process runs them all: unlike pages, buffers are free once their tensors are gone.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, activation};
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use firebox_dry::Dry;
use firebox_lazy::{Lazy, StepRecorder, mark};
use firebox_trace::Bytes;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestError, TestRunner};

type Vulkan = Fusion<CubeBackend<WgpuRuntime, f32, i32, u8>>;
type B = Lazy<Vulkan>;

/// How many programs run.
const PROGRAMS: u32 = 64;
/// The features of every tensor, so that any two fit together.
const FEATURES: usize = 96;

/// One step of a program. Numbers select among the existing tensors.
#[derive(Clone, Debug)]
enum Op {
    /// Host data of this many rows.
    Upload(usize),
    /// A constant of this many rows.
    Fill(usize),
    /// Elementwise, on one tensor.
    Map(usize, u8),
    /// Elementwise, on two tensors; the second is repeated or cut to the rows of the first.
    Zip(usize, usize, u8),
    /// The product with another tensor's transpose times itself.
    Matmul(usize, usize),
    /// Subtracts the mean of the rows from each row.
    Center(usize),
    /// Softmax over the features.
    Softmax(usize),
    /// The first half of the rows.
    Half(usize),
    /// Two tensors, one above the other.
    Stack(usize, usize),
    /// Rows selected by the largest feature of another tensor.
    Pick(usize, usize),
    /// Another tensor's values where this one is positive.
    Choose(usize, usize),
    /// A convolution of each row with the first numbers of another tensor.
    Convolve(usize, usize),
    /// Drops the tensor.
    Drop(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let one = any::<usize>;
    let rows = || prop_oneof![1usize..40, 500usize..3000];
    prop_oneof![
        2 => rows().prop_map(Op::Upload),
        1 => rows().prop_map(Op::Fill),
        4 => (one(), 0u8..4).prop_map(|(a, how)| Op::Map(a, how)),
        4 => (one(), one(), 0u8..3).prop_map(|(a, b, how)| Op::Zip(a, b, how)),
        2 => (one(), one()).prop_map(|(a, b)| Op::Matmul(a, b)),
        1 => one().prop_map(Op::Center),
        1 => one().prop_map(Op::Softmax),
        1 => one().prop_map(Op::Half),
        1 => (one(), one()).prop_map(|(a, b)| Op::Stack(a, b)),
        1 => (one(), one()).prop_map(|(a, b)| Op::Pick(a, b)),
        1 => (one(), one()).prop_map(|(a, b)| Op::Choose(a, b)),
        1 => (one(), one()).prop_map(|(a, b)| Op::Convolve(a, b)),
        2 => one().prop_map(Op::Drop),
    ]
}

type Rows = Tensor<B, 2>;

/// The maximum number of rows that a program keeps in one tensor.
const MOST_ROWS: usize = 6000;

fn upload(rows: usize, device: &WgpuDevice) -> Rows {
    let values = (0..rows * FEATURES).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(values, [rows, FEATURES]), device)
}

/// Runs a program on existing tensors, and returns the tensors that are left.
fn run(ops: &[Op], existing: Vec<Rows>, device: &WgpuDevice) -> Vec<Rows> {
    // A trace contains only tensors that it uses.
    let mut tensors: Vec<Rows> = existing.iter().map(|rows| rows.clone() + 1.0).collect();
    tensors.extend(existing);
    for op in ops {
        let pick = |index: &usize| tensors[index % tensors.len()].clone();
        let made = match op {
            Op::Upload(rows) => upload(*rows, device),
            Op::Fill(rows) => Tensor::full([*rows, FEATURES], 0.25, device),
            Op::Map(a, how) => map(pick(a), *how),
            Op::Zip(a, b, how) => {
                let a = pick(a);
                let b = with_rows(pick(b), a.dims()[0]);
                match how {
                    0 => a + b,
                    1 => a * b,
                    _ => a.clone() - b * a,
                }
            }
            Op::Matmul(a, b) => {
                let b = pick(b);
                pick(a).matmul(b.clone().transpose().matmul(b))
            }
            Op::Center(a) => {
                let a = pick(a);
                a.clone() - a.mean_dim(0)
            }
            Op::Softmax(a) => activation::softmax(pick(a), 1),
            Op::Half(a) => {
                let a = pick(a);
                let rows = a.dims()[0].div_ceil(2);
                a.narrow(0, 0, rows)
            }
            Op::Stack(a, b) => Tensor::cat(vec![pick(a), pick(b)], 0),
            Op::Pick(a, b) => {
                let (a, b) = (pick(a), pick(b));
                let rows = a.dims()[0].min(FEATURES);
                let chosen: Tensor<B, 1, Int> = b.narrow(1, 0, rows).argmax(1).flatten(0, 1);
                a.select(0, chosen)
            }
            Op::Choose(a, b) => {
                let a = pick(a);
                let b = with_rows(pick(b), a.dims()[0]);
                a.clone().mask_where(a.greater_elem(0.0), b)
            }
            Op::Convolve(a, b) => {
                let a = pick(a);
                let kernel = pick(b).narrow(0, 0, 1).narrow(1, 0, 9).reshape([1, 1, 3, 3]);
                let rows = a.dims()[0];
                let images = a.reshape([rows, 1, 8, FEATURES / 8]);
                let options = burn::tensor::ops::ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
                burn::tensor::module::conv2d(images, kernel, None, options)
                    .reshape([rows, FEATURES])
            }
            Op::Drop(a) => {
                if tensors.len() > 1 {
                    tensors.remove(a % tensors.len());
                }
                continue;
            }
        };
        if made.dims()[0] <= MOST_ROWS {
            tensors.push(made);
        }
    }
    tensors
}

fn map(a: Rows, how: u8) -> Rows {
    match how {
        0 => activation::relu(a),
        1 => activation::gelu(a) + 1.0,
        2 => a.abs().sqrt(),
        _ => (a * 0.5).exp(),
    }
}

/// The first `rows` rows, or the first row repeated if there are fewer.
fn with_rows(a: Rows, rows: usize) -> Rows {
    if a.dims()[0] >= rows {
        a.narrow(0, 0, rows)
    } else {
        a.narrow(0, 0, 1).expand([rows, FEATURES])
    }
}

fn in_use(device: &WgpuDevice) -> Bytes {
    Vulkan::sync(device).expect("the device is healthy");
    let usage = WgpuRuntime::client(device).memory_usage().expect("the device is healthy");
    Bytes::new(usage.bytes_in_use)
}

/// What a program leaves in use, as predicted and as measured.
fn compare(ops: &[Op], dry: &Dry<Vulkan>, device: &WgpuDevice) -> (Bytes, Bytes) {
    let before = in_use(device);
    let existing = vec![upload(7, device), upload(900, device)];
    let recording = StepRecorder::new().record::<Vulkan, _>(|| {
        mark::<Vulkan>("begin");
        run(ops, existing, device)
    });
    let recording = recording.expect("this thread records nothing else");
    let footprint = dry.replay(recording.trace()).expect("the trace runs");
    assert_eq!(footprint.unaccounted, Vec::<String>::new());
    let predicted = footprint.timeline.last().expect("there is a mark").live;
    let left = recording.run();
    let measured = in_use(device) - before;
    drop(left);
    assert_eq!(in_use(device), before, "what is left when all tensors are gone");
    (predicted, measured)
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn random_programs_leave_in_use_what_was_predicted() {
    let device = WgpuDevice::default();
    let client = WgpuRuntime::client(&device);
    let dry = Dry::<Vulkan>::new(client.properties().clone());
    let config = Config { cases: PROGRAMS, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let result = runner.run(&prop::collection::vec(op(), 1..24), |ops| {
        let (predicted, measured) = compare(&ops, &dry, &device);
        prop_assert_eq!(predicted, measured);
        Ok(())
    });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, ops)) => panic!("{reason}: {ops:?}"),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}
