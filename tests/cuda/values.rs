//! Compares values computed on an NVIDIA device with and without firebox. Not run without one,
//! because the blank driver computes nothing.

use burn::backend::cuda::CudaDevice;
use burn::backend::{Autodiff, Flex};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining};
use firebox::trace::StepRecorder;
use firebox::{Bytes, DeviceMemory, Half, Lazy, LazyBackend, Learner, Park};
use firebox_testing::machine::has_nvidia;
use firebox_testing::task::{Net, PointBatcher, loader, points, random_state, weights};
use libtest_mimic::{Failed, Trial};

/// A test on the device.
type Test = fn(&CudaDevice);

/// burn's backend.
type Burns = burn::backend::Cuda;
/// burn's backend on firebox's pool.
type Ours = firebox::Cuda;

/// A backend on CUDA.
trait OnCuda: Backend<Device = CudaDevice> + DeviceMemory {}

impl OnCuda for Burns {}
impl OnCuda for Ours {}

/// The tests. They are ignored without an NVIDIA device: the blank driver computes no values.
pub fn tests() -> Vec<Trial> {
    [of::<Burns>("burns"), of::<Ours>("ours")].into_iter().flatten().collect()
}

/// The tests on one pool.
fn of<B: OnCuda>(pool: &'static str) -> Vec<Trial> {
    let tests: [(&str, Test); 6] = [
        ("a_step_is_that_of_the_backend", a_step_is_that_of_the_backend::<B>),
        ("a_step_is_that_of_the_cpu", a_step_is_that_of_the_cpu::<B>),
        ("a_recording_runs_on_the_device", a_recording_runs_on_the_device::<B>),
        ("a_split_batch_trains_like_the_whole_one", a_split_batch_trains_like_the_whole_one::<B>),
        (
            "parked_state_trains_like_state_on_the_device",
            parked_state_trains_like_state_on_the_device::<B>,
        ),
        ("sixteen_bit_trains_like_32", sixteen_bit_trains_like_32::<B>),
    ];
    let is_there = has_nvidia();
    let trial = |(name, test): (&'static str, Test)| {
        let trial = Trial::test(format!("values_{pool}_{name}"), move || {
            test(&CudaDevice::new(0));
            Ok::<(), Failed>(())
        });
        match is_there {
            true => trial,
            false => trial.with_kind("no NVIDIA device").with_ignored_flag(true),
        }
    };
    tests.into_iter().map(trial).collect()
}

/// Loss of a model with the given seed on 24 points, and the gradient of its first weight.
fn loss_and_gradient<B: AutodiffBackend>(device: &B::Device) -> (Vec<f32>, Vec<f32>) {
    use burn::data::dataloader::batcher::Batcher;

    B::seed(device, 7);
    let model = Net::<B>::new(device);
    let batch = Batcher::<B, _, _>::batch(&PointBatcher, points(24), device);
    let loss = InferenceStep::step(&model, batch).loss;
    let gradients = loss.backward();
    let gradient = model.first_weight().grad(&gradients).expect("the weight has a gradient");
    let values = |data: TensorData| data.to_vec::<f32>().expect("32-bit floats");
    (values(loss.into_data()), values(gradient.into_data()))
}

fn a_step_is_that_of_the_backend<B: OnCuda>(device: &CudaDevice) {
    let _lock = random_state();
    let expected = loss_and_gradient::<Autodiff<B>>(device);
    assert_eq!(loss_and_gradient::<Autodiff<Lazy<B>>>(device), expected, "outside a recording");
}

/// A step of a model without dropout, from the same parameters.
fn a_step_is_that_of_the_cpu<B: OnCuda>(device: &CudaDevice) {
    let _lock = random_state();
    let on_cpu = step_of_a_layer::<Autodiff<Flex>>(&Default::default());
    let on_device = step_of_a_layer::<Autodiff<Lazy<B>>>(device);
    close(&on_cpu, &on_device, 2e-3);
}

/// Gradients of a layer's weight and input, from values that depend on no generator.
fn step_of_a_layer<B: AutodiffBackend>(device: &B::Device) -> Vec<f32> {
    let wave = |rows: usize, columns: usize, by: f32| {
        let values = (0..rows * columns).map(|at| (at as f32 * by).sin()).collect::<Vec<f32>>();
        Tensor::<B, 2>::from_data(TensorData::new(values, [rows, columns]), device).require_grad()
    };
    let (input, weight) = (wave(96, 64, 0.37), wave(64, 48, 0.11));
    let output = burn::tensor::activation::gelu(input.clone().matmul(weight.clone()));
    let gradients = output.powf_scalar(2.0).mean().backward();
    let gradient = |tensor: &Tensor<B, 2>| {
        let gradient = tensor.grad(&gradients).expect("it has a gradient");
        gradient.into_data().to_vec::<f32>().expect("32-bit floats")
    };
    [gradient(&weight), gradient(&input)].concat()
}

fn a_recording_runs_on_the_device<B: OnCuda>(device: &CudaDevice) {
    let x = Tensor::<Lazy<B>, 2>::ones([64, 32], device);
    let recording = StepRecorder::new()
        .record::<B, _>(|| x.clone().matmul(x.clone().transpose()).sum())
        .expect("nothing else is recorded");
    let sum: f32 = recording.run().into_scalar().elem();
    assert_eq!(sum, (64 * 64 * 32) as f32);
}

/// The weights of a model after four steps of Adam.
fn trained<B>(device: &CudaDevice, micro_batch: usize, park: Option<Park>) -> Vec<f32>
where
    B: AutodiffBackend<Device = CudaDevice> + LazyBackend<Base: OnCuda>,
    B::InnerBackend: LazyBackend<Base = B::Base>,
{
    B::seed(device, 7);
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        loader::<B>(points(48), 24, None),
        loader::<B::InnerBackend>(points(6), 6, None),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet();
    let builder = builder.micro_batch(micro_batch);
    let builder = match park {
        Some(park) => builder.park_optimizer(park),
        None => builder,
    };
    let learner = builder.build(Net::<B>::new(device), AdamConfig::new().init(), 1e-3);
    weights(&learner.fit(training).expect("it fits").model).concat()
}

/// Fails unless two models differ by at most a share of the norm of the first.
fn close(one: &[f32], other: &[f32], share: f64) {
    let distance = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
    let difference = one.iter().zip(other).map(distance).sum::<f64>().sqrt();
    let norm = one.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>().sqrt();
    println!("{difference} of {norm}");
    assert!(difference <= share * norm, "{difference} of {norm}");
}

fn a_split_batch_trains_like_the_whole_one<B: OnCuda>(device: &CudaDevice) {
    let _lock = random_state();
    let train = |micro_batch| trained::<Autodiff<Lazy<B>>>(device, micro_batch, None);
    close(&train(24), &train(5), 1e-3);
}

/// Compiled with fast math, a parked step may come from other kernels.
fn parked_state_trains_like_state_on_the_device<B: OnCuda>(device: &CudaDevice) {
    let _lock = random_state();
    let train = |park| trained::<Autodiff<Lazy<B>>>(device, 5, park);
    close(&train(None), &train(Some(Park::Host)), 1e-5);
}

fn sixteen_bit_trains_like_32<B: OnCuda>(device: &CudaDevice) {
    let _lock = random_state();
    let full = trained::<Autodiff<Lazy<B>>>(device, 5, None);
    close(&full, &trained::<Autodiff<Half<Lazy<B>>>>(device, 5, None), 0.05);
}
