//! Measures the cost of firebox's own memory pool in a training step on a GPU.
//!
//! The Learner's steps on `firebox::Vulkan` run against those on burn's `Vulkan`, on the same
//! device, in turns. Planning and the first steps do not count.

#[allow(dead_code, reason = "it makes its images itself")]
#[path = "models/cnn.rs"]
mod cnn;
#[allow(dead_code, reason = "it has one part")]
#[path = "harness/machine.rs"]
mod machine;
#[allow(dead_code, reason = "it times what happens between steps")]
#[path = "harness/paired.rs"]
mod paired;

#[path = "harness/turn.rs"]
mod turn;

use burn::backend::{Autodiff, Vulkan};
use burn::tensor::backend::AutodiffBackend;
use firebox::{DeviceMemory, Lazy, LazyBackend};

use crate::cnn::Cnn;
use crate::paired::measure;
use crate::turn::{Gray, Steps, turn};

/// Allowed time of a step relative to one on burn's pools.
const TARGET: f64 = 1.01;
/// Few images, because the pool costs work on the host.
const STEPS: Steps = Steps { warm_up: 10, timed: 40, items: 2 };

fn steps<B>() -> std::time::Duration
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
{
    let device = Default::default();
    turn::<B, _>(Cnn::<B>::new(&device), Gray::new(28), STEPS, &device)
}

fn main() {
    machine::print();
    let Steps { timed, items, .. } = STEPS;
    println!("\na CNN on the first Vulkan device: {timed} steps of the Learner on {items} images");
    println!("  {:>9}  {:>9}  {:>8}  {:>16}  target", "burn's", "ours", "ratio", "quartiles");
    let mut burns = steps::<Autodiff<Lazy<Vulkan>>>;
    let mut ours = steps::<Autodiff<Lazy<firebox::Vulkan>>>;
    let rounds = measure(machine::rounds(9), &mut [&mut burns, &mut ours]);
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
