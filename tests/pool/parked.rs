//! The optimizer's state is in host memory between steps: the same bits where nothing is fused,
//! nearly the same where it is, and the memory that was predicted.

use std::fmt;

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use burn_cubecl::CubeBackend;
use cubecl::wgpu::WgpuRuntime;
use firebox::pool::Pooled;
use firebox::{Bytes, Lazy, Learner, MemoryUse, Park, TrainingBackend};
use firebox_testing::zoo::{self, Numbered, Zoo};

use crate::{Burns, Ours, SEED, alone, bits, device};

type Unfused = Autodiff<Lazy<CubeBackend<Pooled<WgpuRuntime>, f32, i32, u8>>>;

/// A model trained in micro-batches, with the state parked or on the device, and the memory it
/// took.
fn trained<B, M, V>(device: &B::Device, parks: bool) -> (Vec<u32>, MemoryUse)
where
    B: TrainingBackend,
    M: Zoo<B>
        + TrainStep<Input = <M as Zoo<B>>::Batch>
        + AutodiffModule<B, InnerModule = V>
        + fmt::Display
        + 'static,
    V: Zoo<B::InnerBackend> + InferenceStep<Input = <V as Zoo<B::InnerBackend>>::Batch> + 'static,
{
    B::seed(device, SEED);
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(Numbered::<M>::default());
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Numbered::<V>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(9).build(numbers(18)),
        valid.batch_size(9).build(numbers(9)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).micro_batch(3).quiet();
    let builder = if parks { builder.park_optimizer(Park::Host) } else { builder };
    let learner = builder.build(M::new(device), AdamConfig::new().init(), 1e-2);
    let fitted = learner.fit(training).expect("it fits");
    let report = fitted.report.expect("it was planned");
    assert_eq!(report.parked > Bytes::ZERO, parks, "{report}");
    let memory = fitted.memory.expect("it trained");
    assert!(memory.measured.expect("the pool is measured") <= memory.predicted, "{memory:?}");
    (bits(&fitted.model), memory)
}

macro_rules! parked {
    ($backend:ident, $model:ident) => {{
        let _alone = alone();
        let device = device();
        type Inner = <$backend as AutodiffBackend>::InnerBackend;
        let run = trained::<$backend, zoo::$model<$backend>, zoo::$model<Inner>>;
        let ((usual, before), (parked, after)) = (run(&device, false), run(&device, true));
        println!(
            "{}: {} on the device, parked {}",
            stringify!($model),
            before.predicted,
            after.predicted
        );
        // The pages of a small model have room for the state.
        assert!(after.predicted <= before.predicted, "{after:?} {before:?}");
        (usual, parked, before.predicted - after.predicted)
    }};
}

/// The distance of two models, relative to the first.
fn distance(one: &[u32], other: &[u32]) -> f64 {
    let values = |bits: &[u32]| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect();
    let (one, other): (Vec<f64>, Vec<f64>) = (values(one), values(other));
    let between: f64 = one.iter().zip(&other).map(|(a, b)| (a - b) * (a - b)).sum();
    (between / one.iter().map(|value| value * value).sum::<f64>()).sqrt()
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_gpt_has_the_same_bits_without_fusion() {
    let (usual, parked, _) = parked!(Unfused, Gpt);
    assert!(usual == parked);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_model_with_statistics_has_the_same_bits_without_fusion() {
    let (usual, parked, saved) = parked!(Unfused, Cnn);
    assert!(usual == parked && saved > Bytes::ZERO);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_gpt_is_close_with_fusion() {
    let (usual, parked, _) = parked!(Ours, Gpt);
    let distance = distance(&usual, &parked);
    println!("{distance:e} of the norm of all parameters");
    assert!(distance <= 1e-6, "{distance:e}");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn an_mlp_is_close_on_burns_pools() {
    let (usual, parked, _) = parked!(Burns, Mlp);
    let distance = distance(&usual, &parked);
    println!("{distance:e} of the norm of all parameters");
    assert!(distance <= 1e-6, "{distance:e}");
}
