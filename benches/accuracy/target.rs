//! The backend that is measured, and what its device reports about memory.

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

/// The backend that the models of the zoo train on.
pub type Training = Autodiff<Lazy<Base>>;

/// Number of CubeCL streams, each with its own pools. On firebox's own pool, all threads share one.
fn streams() -> u64 {
    if Base::own_pool(&Default::default()).is_some() { 1 } else { 128 }
}

/// Memory that a process holds on the device, over all of its streams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// Bytes of all pages.
    pub reserved: Bytes,
    /// Bytes of the buffers on them.
    pub in_use: Bytes,
}

/// Waits until the device is idle and returns the memory that this process holds on it.
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

/// Keeps compiled kernels and the choices of burn's tuner in `folder`.
///
/// The next process then has the kernels, and choices do not mix with those of other runs. Reserved
/// bytes stay the same, except that each shape is tuned only once.
///
/// # Panics
///
/// If the device has already been asked for.
pub fn keep_kernels(folder: &Path) {
    let mut config = CubeClRuntimeConfig::from_current_dir();
    config.compilation.cache = Some(CacheConfig::File(folder.to_owned()));
    config.autotune.cache = CacheConfig::File(folder.to_owned());
    CubeClRuntimeConfig::set(config);
}

/// Properties of the device.
pub fn properties() -> DeviceProperties {
    client().properties().clone()
}

fn client() -> ComputeClient<Runtime> {
    Runtime::client(&Default::default())
}
