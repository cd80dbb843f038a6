//! The backend that is measured, and what its device says about its memory.

use std::path::Path;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use cubecl::Runtime as _;
use cubecl::client::ComputeClient;
use cubecl::ir::DeviceProperties;
use cubecl::stream_id::StreamId;
use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use firebox::{Bytes, DeviceMemory as _, Lazy};

pub use crate::backend::{Base, Runtime, held_by_driver, name};

/// What the models of the zoo are trained on.
pub type Training = Autodiff<Lazy<Base>>;

/// The streams that CubeCL has, each with pools of its own. On a pool of ours all have one.
fn streams() -> u64 {
    if Base::own_pool(&Default::default()).is_some() { 1 } else { 128 }
}

/// What a process holds on the device, over all of its streams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// The pages.
    pub reserved: Bytes,
    /// The buffers on them.
    pub in_use: Bytes,
}

/// Waits until the device is idle and tells what this process holds on it.
pub fn held() -> Held {
    let device = Default::default();
    Base::sync(&device).expect("the device is healthy");
    let client = client();
    let mut held = Held::default();
    for value in 0..streams() {
        let usage = StreamId { value }.executes(|| client.memory_usage());
        let usage = usage.expect("the device is healthy");
        held.reserved += Bytes::new(usage.bytes_reserved);
        held.in_use += Bytes::new(usage.bytes_in_use);
    }
    held
}

/// Keeps compiled kernels in `folder`, so that the next process has them, and what burn's tuner has chosen, so that it is not
/// mixed with what others have tuned. Changes nothing in what is reserved, except that a shape is tuned once.
///
/// # Panics
///
/// If the device was asked for before.
pub fn keep_kernels(folder: &Path) {
    let mut config = CubeClRuntimeConfig::from_current_dir();
    config.compilation.cache = Some(CacheConfig::File(folder.to_owned()));
    config.autotune.cache = CacheConfig::File(folder.to_owned());
    CubeClRuntimeConfig::set(config);
}

/// The properties of the device.
pub fn properties() -> DeviceProperties {
    client().properties().clone()
}

fn client() -> ComputeClient<Runtime> {
    Runtime::client(&Default::default())
}
