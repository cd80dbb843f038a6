//! Measures the cost of firebox's own memory pool in a training step on a GPU.
//!
//! The Learner's steps on `firebox::Vulkan` run against those on burn's `Vulkan`, on the same
//! device, in turns. Planning and the first steps do not count.

use burn::backend::{Autodiff, Vulkan};
use firebox::{Lazy, TrainingBackend};
use firebox_testing::bench;
use firebox_testing::bench::paired::measure;
use firebox_testing::bench::turn::{Gray, Steps, turn};
use firebox_testing::full_size::cnn::Cnn;

/// Allowed time of a step relative to one on burn's pools.
const TARGET: f64 = 1.01;
/// Few images, because the pool costs work on the host.
const STEPS: Steps = Steps { warm_up: 10, timed: 40, items: 2 };

fn steps<B>() -> std::time::Duration
where
    B: TrainingBackend,
{
    let device = Default::default();
    turn::<B, _>(Cnn::<B>::new(&device), Gray::new(28), STEPS, &device)
}

fn main() {
    bench::print_machine();
    let Steps { timed, items, .. } = STEPS;
    println!("\na CNN on the first Vulkan device: {timed} steps of the Learner on {items} images");
    println!("  {:>9}  {:>9}  {:>8}  {:>16}  target", "burn's", "ours", "ratio", "quartiles");
    let mut burns = steps::<Autodiff<Lazy<Vulkan>>>;
    let mut ours = steps::<Autodiff<Lazy<firebox::Vulkan>>>;
    let rounds = measure(bench::rounds(9), &mut [&mut burns, &mut ours]);
    let ms = |subject| rounds.seconds(subject).median * 1e3 / timed as f64;
    let ratio = rounds.ratio(1, 0);
    println!(
        "  {:>6.2} ms  {:>6.2} ms  {:>8.3}  {:>7.3} to {:.3}  at most {TARGET}",
        ms(0),
        ms(1),
        ratio.median,
        ratio.low,
        ratio.high
    );
    println!("result: bench=pool_steps images{items}={:.3}", ratio.median);
}
