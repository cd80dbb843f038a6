//! Training in 16 bit on a device that may not have the type.

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use burn_backend::DTypeUsage;
use firebox::{DeviceMemory, Half, Lazy, Learner, TrainError};
use firebox_testing::zoo::{Gpt, Numbered, Zoo as _};

use crate::{alone, device};

type B = Autodiff<Half<Lazy<firebox::Vulkan>>>;

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_device_without_the_type_is_an_error_before_training() {
    let _alone = alone();
    let device = device();
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::new(Numbered::<Gpt<B>>::default());
    let valid = DataLoaderBuilder::new(Numbered::<Gpt<Half<Lazy<firebox::Vulkan>>>>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(6).build(numbers(12)),
        valid.batch_size(6).build(numbers(6)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(firebox::Bytes::gib(1)).quiet();
    let learner = builder.build(Gpt::<B>::new(&device), AdamConfig::new().init(), 1e-3);
    let usage = <firebox::Vulkan as Backend>::dtype_usage(&device, DType::BF16);
    println!("{device:?}: {usage:?}");
    match (usage.contains(DTypeUsage::Arithmetic), learner.fit(training)) {
        (true, Ok(fitted)) => {
            let memory = fitted.memory.expect("it trained");
            assert!(memory.measured.is_some_and(|measured| measured <= memory.predicted));
        }
        (false, Err(error)) => {
            let (error, _) = error.into_parts();
            assert!(matches!(error, TrainError::NoNarrowType { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("does not compute in BF16: train without `Half`"), "{text}");
        }
        (has_type, result) => panic!("{has_type}: {:?}", result.map(|fitted| fitted.memory).err()),
    }
    // Nothing has trained, so the pages of the model are still there.
    <firebox::Vulkan as Backend>::sync(&device).expect("the device is healthy");
    <firebox::Vulkan as DeviceMemory>::give_back(&device);
}
