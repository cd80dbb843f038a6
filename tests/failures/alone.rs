//! Shows what plain burn does with a failed allocation: a plausible loss, and a `sync` without an
//! error. This is why the Learner checks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::TrainStep;
use cubecl::wgpu::WgpuDevice;
use firebox_testing::task::{Net, batch};

/// Prints the losses of training steps on a batch that fits, one that does not and one that fits
/// again, and whether `sync` succeeded.
pub fn losses<B: AutodiffBackend<Device = WgpuDevice>>(device: &WgpuDevice) {
    let model = Net::<B>::new(device);
    for items in [8, 100, 8] {
        let step = || TrainStep::step(&model, batch(items)).item.loss.into_scalar().elem::<f32>();
        let loss = catch_unwind(AssertUnwindSafe(step)).unwrap_or(f32::NAN);
        let synced = catch_unwind(AssertUnwindSafe(|| B::sync(device)));
        println!("answer: {items} {loss} {}", matches!(synced, Ok(Ok(()))));
    }
}

/// Checks that the failed step looks like the others.
#[track_caller]
pub fn check(said: String) {
    let answers: Vec<Vec<&str>> = said
        .lines()
        .filter_map(|line| line.split("answer: ").nth(1))
        .map(|answer| answer.split(' ').collect())
        .collect();
    assert_eq!(answers.len(), 3, "{said}");
    for answer in &answers {
        let loss: f32 = answer[1].parse().expect("a number");
        assert!((0.5..2.0).contains(&loss) && answer[2] == "true", "burn noticed: {said}");
    }
    assert_eq!(answers[0], answers[2], "what fits is computed as before");
}
