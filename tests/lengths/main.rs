//! Tests batches of sequences of two lengths on a Vulkan device.
//!
//! The pages of one length are given back when the other comes. Without a device they are ignored.

mod soak;

use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Vulkan};
use burn::tensor::backend::Backend;
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, DeviceMemory, Lazy};
use firebox_testing::lengths::{Trained, trained};

type B = Autodiff<Lazy<Vulkan>>;

const WIDTH: usize = 64;
const ORDER: [usize; 5] = [1000, 1000, 600, 1000, 600];

fn run(lengths: &[usize], budget: Bytes) -> Trained {
    let trained =
        trained::<B>(WIDTH, lengths, budget, CliMetricsRenderer::new(), &Default::default());
    give_back();
    let Trained { predicted, measured, steps } = &trained;
    println!(
        "{lengths:?} in {budget}: predicted {predicted}, reserved {measured}, plans of {steps:?}"
    );
    trained
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn two_lengths() {
    let longest = run(&[1000; 3], Bytes::gib(1));
    // There is no room for the pages of both. Checks the reserved bytes after every batch.
    let budget = longest.predicted.scale(1.05);
    for end in 2..=ORDER.len() {
        let Trained { predicted, measured, steps } = run(&ORDER[..end], budget);
        assert!(steps.iter().all(|steps| *steps == 1), "each fits whole: {steps:?}");
        assert!(measured <= predicted, "{measured} of {predicted}");
        assert!(predicted <= budget, "{predicted} of {budget}");
    }
}

/// Gives pages back for the next run in this process.
///
/// burn's metrics release their last tensors on their own thread, some time after training. An
/// empty page may stay: CubeCL's allocator loses the padding of a gap that is taken twice.
fn give_back() {
    const PATIENCE: Duration = Duration::from_secs(20);
    let (device, started) = (Default::default(), Instant::now());
    loop {
        <Vulkan>::sync(&device).expect("the device does not fail");
        <Vulkan as DeviceMemory>::give_back(&device);
        let usage = <Vulkan as DeviceMemory>::pool_usage(&device);
        let usage = usage.expect("the device has an allocator");
        if usage.in_use == Bytes::ZERO {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{usage} after training");
        std::thread::sleep(Duration::from_millis(10));
    }
}
