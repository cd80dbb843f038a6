//! Tests firebox's own memory pool on a real device.
//!
//! Values must equal those on burn's backend, wherever buffers lie. Without a Vulkan device all are
//! ignored.

mod again;
mod devices;
mod half;
mod moves;
mod parked;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Vulkan};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::AdamConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use cubecl::wgpu::WgpuDevice;
use firebox::{Bytes, Lazy, Learner, TrainingBackend, initialize};
use firebox_testing::zoo::{self, Numbered, Zoo};

type Burns = Autodiff<Lazy<Vulkan>>;
type Ours = Autodiff<Lazy<firebox::Vulkan>>;

const SEED: u64 = 3;

/// All tests share one device and its pool, which allows one training at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first Vulkan device.
fn device() -> WgpuDevice {
    let device = WgpuDevice::default();
    <Burns as Backend>::name(&device);
    <Ours as Backend>::name(&device);
    device
}

/// Bits of all parameters and running statistics of a module.
fn bits<B: Backend, M: Module<B>>(module: &M) -> Vec<u32> {
    struct Bits(Vec<u32>);

    impl<B: Backend> ModuleVisitor<B> for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let values = param.val().into_data().convert::<f32>();
            let values: Vec<f32> = values.to_vec().expect("they are converted");
            self.0.extend(values.into_iter().map(f32::to_bits));
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            let values: Vec<i32> =
                param.val().into_data().convert::<i32>().to_vec().expect("they are");
            self.0.extend(values.into_iter().map(|value| value as u32));
        }
    }

    let mut bits = Bits(Vec::new());
    module.visit(&mut bits);
    bits.0
}

/// Trains a model on a few batches of two sizes, some of them in micro-batches, and validates it.
fn fitted<B, M, V>(
    device: &B::Device,
    micro_batch: Option<usize>,
    batches: impl Batcher<B, usize, <M as Zoo<B>>::Batch> + Clone + 'static,
) -> V
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
    let train = DataLoaderBuilder::<B, _, _>::new(batches).batch_size(6).build(numbers(16));
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Numbered::<V>::default())
        .batch_size(6)
        .build(numbers(8));
    let training = SupervisedTraining::new(folder.path(), train, valid).num_epochs(2).summary();
    let mut builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).quiet();
    if let Some(items) = micro_batch {
        builder = builder.micro_batch(items);
    }
    let learner = builder.build(M::new(device), AdamConfig::new().init(), 1e-2);
    learner.fit(training).expect("it fits").model
}

/// Bits of a model of the zoo, trained on one of the two backends.
macro_rules! trained {
    ($backend:ident, $model:ident, $micro_batch:expr) => {{
        let batches = Numbered::<zoo::$model<$backend>>::default();
        let model = fitted::<$backend, zoo::$model<$backend>, _>(
            &Default::default(),
            $micro_batch,
            batches,
        );
        bits::<<$backend as AutodiffBackend>::InnerBackend, _>(&model)
    }};
}

macro_rules! models {
    ($($(#[$attribute:meta])* $test:ident: $model:ident;)*) => {
        $(#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
        $(#[$attribute])*
        fn $test() {
            let _alone = alone();
            device();
            let burns = trained!(Burns, $model, None);
            let ours = trained!(Ours, $model, None);
            assert!(!burns.is_empty() && burns == ours, "the values differ from burn's");
        })*
    };
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn in_micro_batches() {
    let _alone = alone();
    device();
    let burns = trained!(Burns, Mlp, Some(4));
    let ours = trained!(Ours, Mlp, Some(4));
    assert!(!burns.is_empty() && burns == ours, "the values differ from burn's");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn planning_draws_no_random_numbers() {
    fn drawn<B>(plans: bool) -> Vec<f32>
    where
        B: TrainingBackend,
    {
        let device = Default::default();
        // A model with dropout.
        let model = zoo::Mlp::<B>::new(&device);
        initialize(&model);
        let batch = zoo::Mlp::<B>::batch(&[0, 1, 2], &device);
        let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).quiet();
        let learner = builder.build(model, AdamConfig::new().init(), 1e-2);
        B::sync(&device).expect("the device is healthy");
        B::seed(&device, SEED);
        if plans {
            learner.plan(&batch).expect("it fits");
        }
        let numbers = Tensor::<B, 1>::random([8], Distribution::Default, &device);
        numbers.into_data().to_vec().expect("they are floats")
    }
    let _alone = alone();
    device();
    assert_eq!(drawn::<Burns>(true), drawn::<Burns>(false));
    assert_eq!(drawn::<Ours>(true), drawn::<Ours>(false));
}

models! {
    mlp: Mlp;
    cnn: Cnn;
    gpt: Gpt;
    reader: Reader;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    resnet: ResNet;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    unet: UNet;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    encoder: Encoder;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    recurrent: Recurrent;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    autoencoder: Autoencoder;
    #[ignore = "takes a minute on a GPU in software: `-- --ignored`"]
    siamese: Siamese;
}
