//! Measures the cost of checking the device before and after an optimizer step, compared with
//! waiting for it.

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::train::TrainStep;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_fusion::client::GlobalFusionClient;
use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use firebox_testing::task::{Net, batch};

const STEPS: u32 = 40;
const ROUNDS: usize = 7;

/// Times steps without a check, with the Learner's two checks, and with a `sync`. Takes the fastest
/// of some rounds for each.
pub fn steps<I: Backend<Device = WgpuDevice>>(device: &WgpuDevice) {
    let settle = |device: &WgpuDevice| {
        let client = WgpuRuntime::client(device);
        let fusion = GlobalFusionClient::<FusionCubeRuntime<WgpuRuntime>>::load(device);
        fusion.sync(move || client.flush()).expect("the device is healthy");
    };
    let nothing = |_: &WgpuDevice| ();
    let sync = |device: &WgpuDevice| I::sync(device).expect("the device is healthy");
    let mut best = [Duration::MAX; 3];
    for _ in 0..ROUNDS {
        let times = [
            time::<I>(device, nothing, nothing),
            time::<I>(device, settle, settle),
            time::<I>(device, sync, nothing),
        ];
        best.iter_mut().zip(times).for_each(|(best, time)| *best = time.min(*best));
    }
    for (name, time) in ["without", "with two checks", "with a sync"].iter().zip(best) {
        println!("a step {name}: {:?}", time / STEPS);
    }
}

fn time<I: Backend<Device = WgpuDevice>>(
    device: &WgpuDevice,
    before: impl Fn(&WgpuDevice),
    after: impl Fn(&WgpuDevice),
) -> Duration {
    type Ad<I> = Autodiff<I>;
    let mut model = Net::<Ad<I>>::new(device);
    let mut optimizer = AdamConfig::new().init();
    let batch = batch::<Ad<I>>(48);
    let mut steps = |count| {
        for _ in 0..count {
            let grads: GradientsParams = TrainStep::step(&model, batch.clone()).grads;
            before(device);
            model = optimizer.step(1e-3, model.clone(), grads);
            after(device);
        }
        I::sync(device).expect("the device is healthy");
    };
    steps(3);
    let started = Instant::now();
    steps(STEPS);
    started.elapsed()
}
