//! Tests custom operations: the same values recorded and at once, the same gradients whole and
//! split, and a footprint.

use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Distribution, TensorMetadata, TensorPrimitive, Tolerance};
use firebox::dry::{Card, Dry, DryCuda};
use firebox::trace::{Estimate, Heap, MemoryModel, StepRecorder};
use firebox::{Bytes, CustomOp, Lazy};
use firebox_testing::task::random_state;

use crate::op::{Snake, SnakeKernels, snake};

type L = Lazy<Flex>;

fn inputs<B: Snake>(device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 1>) {
    B::seed(device, 12);
    let x = Tensor::random([40, 32], Distribution::Uniform(-2.0, 2.0), device);
    (x, Tensor::random([32], Distribution::Uniform(0.5, 2.0), device))
}

#[test]
fn recorded_and_at_once_it_gives_what_the_backend_gives() {
    let _lock = random_state();
    let device = Default::default();
    let (x, alpha) = inputs::<Flex>(&device);
    let expected = snake(x, alpha).into_data();
    let (x, alpha) = inputs::<L>(&device);
    snake(x.clone(), alpha.clone()).into_data().assert_eq(&expected, true);
    let recording = StepRecorder::new().record::<Flex, _>(|| snake(x, alpha)).expect("not nested");
    let calls: Vec<String> = recording.trace().calls().map(|(_, c)| c.name.to_string()).collect();
    assert_eq!(calls, ["snake"]);
    recording.run().into_data().assert_eq(&expected, true);
}

#[test]
fn its_gradients_are_those_of_burn_and_add_up_over_parts() {
    let _lock = random_state();
    type B = Autodiff<L>;
    let device = Default::default();
    let (x, alpha) = inputs::<B>(&device);
    let (x, alpha) = (x.require_grad(), alpha.require_grad());
    let composed = {
        let wide = alpha.clone().unsqueeze::<2>();
        x.clone() + (x.clone() * wide.clone()).sin().powi_scalar(2) / wide
    };
    let of = |loss: Tensor<B, 1>| {
        let grads = loss.backward();
        let x = x.grad(&grads).expect("x is used").into_data();
        (x, alpha.grad(&grads).expect("alpha is used"))
    };
    let (composed_x, composed_alpha) = of(composed.powi_scalar(2).sum());
    let ours = |x: Tensor<B, 2>| snake(x, alpha.clone()).powi_scalar(2).sum();
    let (whole_x, whole_alpha) = of(ours(x.clone()));
    let tolerance = Tolerance::<f32>::relative(1e-4).set_absolute(1e-4);
    whole_x.assert_approx_eq(&composed_x, tolerance);
    whole_alpha.to_data().assert_approx_eq(&composed_alpha.into_data(), tolerance);
    let part = |rows| of(ours(x.clone().slice([rows]))).1;
    let parts = part(0..13) + part(13..40);
    parts.into_data().assert_approx_eq(&whole_alpha.into_data(), tolerance);
}

#[test]
fn its_memory_is_what_its_author_says() {
    let _lock = random_state();
    let device = Default::default();
    let x = Tensor::<L, 2>::zeros([256, 1024], &device);
    let record = |workspace: Option<Bytes>| {
        let x = x.clone().into_primitive().tensor();
        let recording = StepRecorder::new().record::<Flex, _>(|| {
            let form = (x.shape(), x.dtype());
            let op = CustomOp::new("copy");
            let op = workspace.map_or(op.clone(), |bytes| op.workspace(bytes));
            let out: FloatTensor<L> = op.call(x, form, |x: FloatTensor<Flex>| x);
            out
        });
        recording.expect("not nested").discard().trace
    };
    let (none, some, unsaid) =
        (record(Some(Bytes::ZERO)), record(Some(Bytes::mib(3))), record(None));
    let peak = |trace| Heap::flex().footprint(trace).peak;
    assert_eq!(peak(&none), Bytes::mib(2), "the input and the result");
    assert_eq!(peak(&some), Bytes::mib(5));
    assert_ne!(none.structural_hash(), some.structural_hash());
    assert_eq!(Heap::flex().footprint(&some).estimate, Estimate::Exact);
    let guessed = Heap::flex().footprint(&unsaid);
    assert_eq!((guessed.estimate, guessed.unaccounted), (Estimate::Heuristic, vec!["copy".into()]));

    let card = Card::named("T4").expect("in the table");
    let dry = Dry::<DryCuda>::new(card.properties());
    let much = record(Some(Bytes::mib(300)));
    let (none, much) = (dry.footprint(&none), dry.footprint(&much));
    assert!(none.unaccounted.is_empty(), "{:?}", none.unaccounted);
    assert!(none.peak < Bytes::mib(100), "{}", none.peak);
    assert!(much.peak >= Bytes::mib(302), "{}", much.peak);
    assert_eq!(dry.footprint(&unsaid).unaccounted, ["copy"]);
}

#[test]
fn several_results_and_inputs_that_may_be_missing() {
    let _lock = random_state();
    let device = Default::default();
    let split =
        |x: FloatTensor<L>, bias: Option<FloatTensor<L>>| -> (FloatTensor<L>, FloatTensor<L>) {
            let form = (Shape::new([2]), x.dtype());
            let forms = (form.clone(), form);
            CustomOp::new("halves").parameter(2).call((x, bias), forms, |(x, bias)| {
                let of = |x| Tensor::<Flex, 1>::from_primitive(TensorPrimitive::Float(x));
                let x = bias.map_or(of(x.clone()), |bias| of(x) + of(bias));
                let half = |from: usize| x.clone().narrow(0, from, 2).into_primitive().tensor();
                (half(0), half(2))
            })
        };
    let x = Tensor::<L, 1>::from_floats([1.0, 2.0, 3.0, 4.0], &device).into_primitive().tensor();
    let values = |x| Tensor::<L, 1>::from_primitive(TensorPrimitive::Float(x)).into_data();
    let record = |bias: Option<FloatTensor<L>>| {
        let x = x.clone();
        StepRecorder::new().record::<Flex, _>(|| split(x, bias)).expect("not nested").run()
    };
    let (first, second) = record(None);
    values(first).assert_eq(&TensorData::from([1.0f32, 2.0]), true);
    values(second).assert_eq(&TensorData::from([3.0f32, 4.0]), true);
    let (first, _) = record(Some(x.clone()));
    values(first).assert_eq(&TensorData::from([2.0f32, 4.0]), true);
}

#[test]
#[should_panic = "custom operation `wrong` was said to give [3] F32, and gave [4] F32"]
fn a_result_of_another_shape_is_found() {
    let x = Tensor::<L, 1>::from_floats([1.0, 2.0, 3.0, 4.0], &Default::default());
    let x: FloatTensor<L> = x.into_primitive().tensor();
    let form = (Shape::new([3]), x.dtype());
    let _wrong: FloatTensor<L> = CustomOp::new("wrong").call(x, form, |x: FloatTensor<Flex>| x);
}

#[test]
fn kernels_run_on_the_backend_without_a_decorator() {
    let _lock = random_state();
    let (x, alpha) = inputs::<Flex>(&Default::default());
    let (x, alpha) = (x.into_primitive().tensor(), alpha.into_primitive().tensor());
    assert_eq!(Flex::snake(x, alpha).shape().as_slice(), [40, 32]);
}
