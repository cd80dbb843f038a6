//! burn's whole stack on a device without memory: what it reserves, that this repeats, and that
//! nothing is left over.
//!
//! Needs no GPU. The tests share one binary and its dry devices, as the parts of a program do.

use std::fs;
use std::sync::Mutex;
use std::thread;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{Distribution, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::Runtime;
use cubecl::ir::DeviceProperties;
use firebox_dry::{Capability, Card, Cuda, DryRuntime, Lease, Target, Usage, Wgpu};
use firebox_trace::Bytes;

type Dry<T> = Fusion<CubeBackend<DryRuntime<T>, f32, i32, u8>>;
type Training<T> = Autodiff<Dry<T>>;

/// Tests run one at a time: some measure the memory and the threads of the whole process.
static PROCESS: Mutex<()> = Mutex::new(());

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    input: Linear<B>,
    norm: BatchNorm<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Classifier<B> {
    fn new(width: usize, device: &B::Device) -> Self {
        Self {
            input: LinearConfig::new(784, width).init(device),
            norm: BatchNormConfig::new(width).init(device),
            output: LinearConfig::new(width, 10).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, images: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = self.norm.forward(self.input.forward(images));
        self.output.forward(self.relu.forward(hidden))
    }
}

/// A few iterations with Adam. Returns the loss.
fn train<T: Target>(
    device: &<Training<T> as BackendTypes>::Device,
    width: usize,
    items: usize,
    iterations: usize,
) -> f32 {
    let mut model = Classifier::<Training<T>>::new(width, device);
    let mut optimizer = AdamConfig::new().init();
    let mut last = f32::NAN;
    for _ in 0..iterations {
        let images = Tensor::random([items, 784], Distribution::Default, device);
        let targets = Tensor::<Training<T>, 1, Int>::zeros([items], device);
        let loss =
            CrossEntropyLossConfig::new().init(device).forward(model.forward(images), targets);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        last = loss.into_scalar();
    }
    drop((model, optimizer));
    Dry::<T>::sync(device).expect("a dry device does not fail");
    last
}

fn rtx_4090() -> DeviceProperties {
    Card::named("4090").expect("in the table").properties()
}

/// A device like lavapipe: no page above 128 MiB.
fn small_vulkan() -> DeviceProperties {
    let mut properties = Card::new("small", Bytes::mib(512), Capability::new(8, 6), 8).properties();
    properties.memory.alignment = 32;
    properties
}

fn footprint<T: Target>(properties: &DeviceProperties, width: usize, items: usize) -> Usage {
    let mut lease = Lease::<T>::take(properties).expect("a dry device");
    lease.run(|device| train::<T>(device, width, items, 3)).expect("the model trains").1
}

/// A line of `/proc/self/status`, as a number.
fn process(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("a Linux process knows itself");
    let line = status.lines().find(|line| line.starts_with(key)).expect("the line exists");
    line.split_whitespace().nth(1).expect("it has a value").parse().expect("a number")
}

#[test]
fn a_training_step_reserves_gigabytes_and_allocates_none() {
    let _alone = PROCESS.lock();
    footprint::<Cuda>(&rtx_4090(), 64, 32);
    let before = process("VmRSS");
    let usage = footprint::<Cuda>(&rtx_4090(), 2048, 131_072);
    let grown = Bytes::kib(process("VmRSS").saturating_sub(before));
    // One activation alone is 1 GiB.
    assert!(usage.peak > Bytes::gib(3), "{usage:?}");
    assert!(usage.most_in_use <= usage.peak);
    assert!(usage.most_in_use >= Bytes::gib(3), "{usage:?}");
    assert!(usage.largest.get() <= rtx_4090().memory.max_page_size, "{usage:?}");
    assert!(grown < Bytes::mib(128), "the host's memory grew by {grown}");
}

#[test]
fn values_read_back_are_zeros() {
    let _alone = PROCESS.lock();
    let mut lease = Lease::<Cuda>::take(&rtx_4090()).expect("a dry device");
    let (loss, _) = lease.run(|device| train::<Cuda>(device, 8, 4, 1)).expect("the model trains");
    assert_eq!(loss, 0.0);
}

#[test]
fn pages_add_up_to_the_peak() {
    let _alone = PROCESS.lock();
    let usage = footprint::<Wgpu>(&small_vulkan(), 256, 1000);
    let pages: u64 = usage.pages.iter().map(|(size, count)| size.get() * *count as u64).sum();
    assert_eq!(pages, usage.peak.get(), "{usage:?}");
    assert!(usage.pages.len() > 1, "{usage:?}");
}

#[test]
fn the_bytes_are_the_same_on_any_thread_and_in_any_order() {
    let _alone = PROCESS.lock();
    let sizes = [(64, 100), (256, 1000), (64, 101), (512, 4000), (256, 7), (96, 3000)];
    let ask = |(width, items)| footprint::<Wgpu>(&small_vulkan(), width, items).peak;
    let first: Vec<Bytes> = sizes.iter().copied().map(ask).collect();
    let mut backwards: Vec<Bytes> = sizes.iter().rev().copied().map(ask).collect();
    backwards.reverse();
    assert_eq!(first, backwards);

    let parallel: Vec<Vec<Bytes>> = thread::scope(|scope| {
        let asking: Vec<_> = (0..6)
            .map(|turn| {
                scope.spawn(move || {
                    let mut peaks = vec![Bytes::ZERO; sizes.len()];
                    for step in 0..sizes.len() {
                        let index = (step + turn) % sizes.len();
                        peaks[index] = ask(sizes[index]);
                    }
                    peaks
                })
            })
            .collect();
        asking.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for peaks in parallel {
        assert_eq!(first, peaks);
    }
}

#[test]
fn a_thousand_footprints_leave_memory_and_threads_as_they_were() {
    let _alone = PROCESS.lock();
    let ask = |turn: usize| {
        let mut lease = Lease::<Cuda>::take(&rtx_4090()).expect("a dry device");
        let ran = lease.run(|device| {
            let input = Tensor::<Dry<Cuda>, 2>::ones([8 + turn % 5, 64], device);
            let weight = Tensor::ones([64, 16 + turn % 3], device);
            let result = (input.matmul(weight) + 1.0).exp();
            Dry::<Cuda>::sync(device).expect("a dry device does not fail");
            drop(result);
            Dry::<Cuda>::sync(device).expect("a dry device does not fail");
        });
        ran.expect("nothing panics");
    };
    (0..200).for_each(ask);
    let (memory, threads) = (process("VmRSS"), process("Threads"));
    (0..1000).for_each(ask);
    let grown = Bytes::kib(process("VmRSS").saturating_sub(memory));
    assert!(grown < Bytes::mib(8), "the host's memory grew by {grown}");
    assert_eq!(process("Threads"), threads);
}

#[test]
fn a_buffer_above_the_largest_page_is_refused() {
    let _alone = PROCESS.lock();
    let card = Card::named("T4").expect("in the table");
    let mut lease = Lease::<Cuda>::take(&card.properties()).expect("a dry device");
    let (_, usage) = lease
        .run(|device| {
            let large = Tensor::<Dry<Cuda>, 2>::zeros([1 << 20, 1024], device);
            Dry::<Cuda>::sync(device).expect("a dry device does not fail");
            drop(large);
            Dry::<Cuda>::sync(device).expect("a dry device does not fail");
        })
        .expect("nothing panics");
    assert_eq!(usage.largest, Bytes::gib(4));
    assert!(usage.largest > card.largest_buffer(), "4 GiB are more than a quarter of 15");
    assert!(usage.peak < usage.largest, "it is not made");
}

#[test]
fn a_request_is_served_when_it_is_made() {
    let _alone = PROCESS.lock();
    let large_pages = |drops_first: bool| {
        let mut lease = Lease::<Wgpu>::take(&small_vulkan()).expect("few cards were asked for");
        let (_, usage) = lease
            .run(|device| {
                let client = DryRuntime::<Wgpu>::client(device);
                let mut held = vec![client.empty(100 << 20)];
                if drops_first {
                    held.clear();
                }
                held.push(client.empty(100 << 20));
                held.clear();
                Dry::<Wgpu>::sync(device).expect("a dry device does not fail");
            })
            .expect("nothing panics");
        usage.pages.get(&Bytes::mib(128)).copied()
    };
    assert_eq!(large_pages(false), Some(2), "what is dropped later is still there");
    assert_eq!(large_pages(true), Some(1), "the second buffer has the place of the first");
}

#[test]
fn rows_are_padded_on_cuda_only() {
    let _alone = PROCESS.lock();
    fn in_use<T: Target>(properties: &DeviceProperties) -> Bytes {
        let mut lease = Lease::<T>::take(properties).expect("a dry device");
        let run = lease.run(|device| {
            let held = Tensor::<Dry<T>, 2>::zeros([1024, 3], device);
            Dry::<T>::sync(device).expect("a dry device does not fail");
            // Kept until after the measurement.
            held
        });
        let (held, usage) = run.expect("nothing panics");
        drop(held);
        usage.in_use
    }
    assert_eq!(in_use::<Wgpu>(&small_vulkan()), Bytes::new(1024 * 12));
    assert_eq!(in_use::<Cuda>(&rtx_4090()), Bytes::new(1024 * 16));
}

#[test]
fn a_panic_costs_one_device_and_no_more() {
    let _alone = PROCESS.lock();
    let properties = Card::new("broken", Bytes::gib(3), Capability::new(8, 6), 8).properties();
    let mut lease = Lease::<Cuda>::take(&properties).expect("a dry device");
    let broken = lease.device().clone();
    let result = lease.run(|_| panic!("an idea that fails"));
    assert_eq!(result.map(|(never, _): ((), _)| never).unwrap_err().message, "an idea that fails");
    drop(lease);
    let next = Lease::<Cuda>::take(&properties).expect("another dry device");
    assert_ne!(*next.device(), broken);
}
