//! Trains in 64 bit, which a process sets once for a device: split steps are those of the whole
//! batch.

use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{Device, FloatDType, IntDType};
use firebox::{Bytes, PeakAlloc};

use net::{close, loop_of_ones_own};

mod net;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

#[test]
fn split_steps_are_those_of_the_whole_batch() {
    let mut device = Device::flex();
    device.configure((FloatDType::F64, IntDType::I32)).expect("it is new");
    let device = device.autodiff();
    let sizes = [1024, 300, 1024];
    for optim in [SgdConfig::new().init(), AdamConfig::new().init()] {
        let train = |memory| loop_of_ones_own(&device, optim.clone(), memory, &sizes);
        let (whole, split) = (train(Bytes::gib(1)), train(Bytes::mib(24)));
        assert!(split.steps.plans()[0].plan.len() > 1, "{}", split.steps.plans()[0].line());
        // To the last bit of 32.
        close(&whole.parameters, &split.parameters, 2e-7);
        close(&whole.losses, &split.losses, 2e-7);
    }
}
