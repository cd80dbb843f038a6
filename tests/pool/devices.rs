//! Tests several devices and several runs in one process.

use std::thread;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use firebox::{Bytes, Learner};
use firebox_pool::Control;
use firebox_testing::zoo::{Mlp, Numbered, Zoo};

use crate::{Ours, alone, bits, device, fitted};

type B = firebox::Vulkan;
type Valid = firebox::Lazy<B>;

/// Two devices, which may be the same hardware; each has its own server and pool.
fn two_devices() -> [WgpuDevice; 2] {
    [device(), WgpuDevice::Cpu]
}

/// A small model trained on a device.
fn model_of(
    device: &WgpuDevice,
    micro_batch: Option<usize>,
    batches: impl Batcher<Ours, usize, <Mlp<Ours> as Zoo<Ours>>::Batch> + Clone + 'static,
) -> Mlp<Valid> {
    fitted::<Ours, Mlp<Ours>, _>(device, micro_batch, batches)
}

fn trained_on(device: &WgpuDevice) -> Vec<u32> {
    bits::<Valid, _>(&model_of(device, Some(4), Numbered::<Mlp<Ours>>::default()))
}

/// Bytes of the pages of a device.
fn reserved(device: &WgpuDevice) -> u64 {
    Valid::memory_cleanup(device);
    Control::<WgpuRuntime>::of(device).memory().reserved
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn tensors_go_to_another_device_and_back() {
    let _alone = alone();
    let [first, second] = two_devices();
    let numbers = Tensor::<B, 1, Int>::arange(0..6_000, &first).float().reshape([60, 100]);
    let there = numbers.clone().transpose().to_device(&second);
    assert_eq!(there.device(), second);
    let back = there.clone().add_scalar(1.0).to_device(&first).transpose();
    assert_eq!(there.transpose().into_data(), numbers.to_data());
    assert_eq!(back.into_data(), numbers.add_scalar(1.0).into_data());
    // Two threads at the same time, in both directions.
    std::thread::scope(|scope| {
        let (first, second) = (&first, &second);
        let moved = move |number: usize| {
            let [from, to] =
                if number.is_multiple_of(2) { [first, second] } else { [second, first] };
            for round in 0..20 {
                let value = (100 * number + round) as f32;
                let sum = Tensor::<B, 1>::full([1000], value, from).to_device(to).sum();
                assert_eq!(sum.into_scalar(), 1000.0 * value);
            }
        };
        (0..4).for_each(|number| drop(scope.spawn(move || moved(number))));
    });
    let integers = Tensor::<B, 1, Int>::from_data([3, 1, 2], &first).to_device(&second);
    assert_eq!(integers.into_data().to_vec::<i32>().expect("integers"), [3, 1, 2]);
    let truths = Tensor::<B, 1>::from_data([1.0, -1.0, 2.0], &first).greater_elem(0.0);
    let truths = truths.to_device(&second).int().into_data().to_vec::<i32>().expect("integers");
    assert_eq!(truths, [1, 0, 1]);
    // Recorded operations run before the tensor leaves the device.
    let lazy = Tensor::<Valid, 1>::ones([8], &first).mul_scalar(3.0).to_device(&second);
    assert_eq!(lazy.sum().into_scalar(), 24.0);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn training_on_one_device_and_then_on_another() {
    let _alone = alone();
    let [first, second] = two_devices();
    let before = [reserved(&first), reserved(&second)];
    let here = trained_on(&first);
    let there = trained_on(&second);
    assert!(!here.is_empty() && here == there, "the values differ");
    let after = [reserved(&first), reserved(&second)];
    assert!(
        after.iter().zip(before).all(|(after, before)| *after <= before),
        "{after:?} {before:?}"
    );
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn training_on_two_devices_at_once() {
    let _alone = alone();
    let [first, second] = two_devices();
    // CubeCL has one random generator for all devices, so the test only checks that both learn.
    let threads = [first, second].map(|device| thread::spawn(move || trained_on(&device)));
    for thread in threads {
        let bits = thread.join().expect("it trains");
        let is_finite = bits.iter().all(|bits| f32::from_bits(*bits).is_finite());
        assert!(!bits.is_empty() && is_finite);
    }
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_second_learner_beside_the_model_of_the_first() {
    let _alone = alone();
    let device = device();
    let before = reserved(&device);
    let first = model_of(&device, None, Numbered::<Mlp<Ours>>::default());
    let values = bits::<Valid, _>(&first);
    let kept = reserved(&device);
    assert!(kept > before, "the model lies on pages");
    let second = model_of(&device, None, Numbered::<Mlp<Ours>>::default());
    assert!(values == bits::<Valid, _>(&second), "the second run computes something else");
    // The first model was moved to the pages of the second run and must be unchanged.
    assert!(values == bits::<Valid, _>(&first), "the first model has changed");
    drop((first, second));
    assert_eq!(reserved(&device), before, "pages are left");
}

/// Makes batches, and makes the device release its free memory.
#[derive(Clone)]
struct Cleaning;

impl Batcher<Ours, usize, <Mlp<Ours> as Zoo<Ours>>::Batch> for Cleaning {
    fn batch(&self, items: Vec<usize>, device: &WgpuDevice) -> <Mlp<Ours> as Zoo<Ours>>::Batch {
        Ours::memory_cleanup(device);
        B::memory_cleanup(device);
        Mlp::<Ours>::batch(&items, device)
    }
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn memory_is_cleaned_while_one_trains() {
    let _alone = alone();
    let device = device();
    let cleaned = bits::<Valid, _>(&model_of(&device, None, Cleaning));
    let usual = bits::<Valid, _>(&model_of(&device, None, Numbered::<Mlp<Ours>>::default()));
    assert!(!usual.is_empty() && cleaned == usual, "the values differ");
}

/// A step that needs more than one page may hold on this device.
#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_plan_of_several_pages_is_what_is_reserved() {
    let _alone = alone();
    let device = device();
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let batches = Numbered::<Mlp<Ours>>::default();
    let train =
        DataLoaderBuilder::<Ours, _, _>::new(batches).batch_size(4_000).build(numbers(12_000));
    let valid = DataLoaderBuilder::<Valid, _, _>::new(Numbered::<Mlp<Valid>>::default())
        .batch_size(10)
        .build(numbers(0));
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let learner = Learner::builder().auto_batch().memory(Bytes::gib(4)).quiet();
    let learner = learner.build(Mlp::<Ours>::new(&device), AdamConfig::new().init(), 1e-2);
    let memory = learner.fit(training).expect("it fits").memory.expect("it was planned");
    let largest_page = Control::<WgpuRuntime>::of(&device).properties().memory.max_page_size;
    println!("{memory:?}, pages of at most {largest_page} bytes");
    assert!(memory.predicted > Bytes::mib(200));
    assert_eq!(memory.measured, Some(memory.predicted));
}
