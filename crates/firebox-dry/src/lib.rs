//! A CubeCL device without memory. It measures what a burn program reserves on a GPU, without that
//! GPU.
//!
//! burn's CUDA and wgpu backends are one backend, `CubeBackend`, over different CubeCL runtimes.
//! [`DryRuntime`] is one more runtime. It runs burn's real fusion, kernel selection and temporary
//! buffers on CubeCL's real allocator. Kernels are dropped instead of compiled, and pages have a
//! size but no memory. What counts on a GPU is what the allocator reserves. It depends on all of
//! these, and can be several times what tensors need.
//!
//! ```
//! use burn_backend::{Backend, ops::FloatTensorOps};
//! use burn_cubecl::CubeBackend;
//! use burn_fusion::Fusion;
//! use firebox_dry::{Card, Cuda, DryRuntime, Lease};
//! use firebox_trace::Bytes;
//!
//! type B = Fusion<CubeBackend<DryRuntime<Cuda>, f32, i32, u8>>;
//!
//! let card = Card::named("RTX 4090").expect("in the table");
//! let mut lease = Lease::<Cuda>::take(&card.properties())?;
//! let (_, usage) = lease.run(|device| {
//!     let image = B::float_zeros([800, 1024, 256].into(), device, burn_std::FloatDType::F32);
//!     B::sync(device).expect("a dry device does not fail");
//!     image
//! })?;
//! assert_eq!(usage.in_use, Bytes::mib(800));
//! // Its page is a quarter of the card.
//! assert_eq!(usage.reserved, card.largest_buffer());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Dry`] replays a recorded trace on such a device and returns its footprint: the same bytes that
//! the program itself reserves.
//!
//! # What is mirrored, and from where
//!
//! File names refer to cubecl-cuda and cubecl-wgpu unless another crate is named.
//!
//! - *Allocator, its pools, and when pages are freed.* Both: the real code, `memory_management` of
//!   cubecl-runtime.
//! - *Pool configuration.* CUDA: the default, which cubecl-cuda cannot change (`runtime.rs`). wgpu:
//!   the default; what a program passes to `init_setup` is ignored.
//! - *Largest page and alignment.* CUDA: a quarter of the memory, and 512 bytes (`runtime.rs`).
//!   wgpu: what the device reports, `max_storage_buffer_binding_size` and
//!   `min_uniform_buffer_offset_alignment` (`runtime.rs`).
//! - *Tensor layout.* CUDA: padded rows, `PitchedMemoryLayoutPolicy`. wgpu: contiguous,
//!   `ContiguousMemoryLayoutPolicy`.
//! - *Pools per stream, and a thread's stream.* Both: `stream/base.rs` of cubecl-runtime. A replay
//!   runs on one stream.
//! - *Scalars and shapes of a launch.* CUDA: a buffer from the tensors' pools while the launch is
//!   issued; from capability 7.0 on only for shapes of unknown rank (`launch_checked` in
//!   `compute/server.rs`). wgpu: a separate pool, which `memory_usage` leaves out
//!   (`compute/mem_manager.rs`); not counted.
//! - *When a launch releases its tensors.* CUDA: when it is issued. `Command::resource` takes the
//!   binding and keeps an address. wgpu: also when it is issued. A queued task holds
//!   `WgpuResource`s, which keep the page but not the place in it (`prepare_bindings` in
//!   `compute/server.rs`).
//! - *Uploads and reads.* CUDA: pinned host memory, not counted (`compute/command.rs`). wgpu:
//!   staging buffers, not counted (`compute/mem_manager.rs`).
//! - *Buffers of zero bytes.* Both: a page of zero bytes. wgpu's real storage makes the page 32
//!   bytes (`compute/storage.rs`) and does not count them.
//! - *A buffer larger than the largest page.* Both: a panic on the device's thread. Here it is
//!   not made, and [`Usage::largest`] has its size.
//! - *A full card.* Both: a panic. Here the pages are counted all the same.
//!
//! # Order
//!
//! On a real device burn's fusion runs on one thread and CubeCL's server on another. The server
//! takes requests in batches of 32, and serving them takes time (`CHANNEL_MAX_TASK` in
//! `device/handle/channel.rs` of cubecl-common). What the program drops meanwhile is free for them.
//! By chance, the server therefore sees less alive than the program has at the request.
//!
//! Here server and fusion share a thread, and a request is served when it is made. Every run
//! therefore gives the same bytes. At each request, the most is alive that can be alive on a real
//! device. That does not prove that no real run reserves more: where a buffer is placed depends on
//! the gaps that exist, so with less alive a later buffer can find its gap taken.
//!
//! At a [`Mark::Settle`](firebox_trace::Mark::Settle) the program waits for the device. At a
//! [`Mark::Drain`](firebox_trace::Mark::Drain) it only empties burn's queue, but another thread,
//! such as the metrics thread, may read there. A replay waits at both. On CubeCL's pools it has two
//! rounds: in the second, buffers are placed in the gaps that the first has left. What loader
//! threads request themselves is not modelled.
//!
//! Whether an operation works in place is also a race. It does if its input has at most two
//! holders, the program and the allocator (`can_mut` in `memory_pool/handle.rs` of cubecl-runtime).
//! While the server binds a new buffer, the request is a third holder (`initialize_memory`). A real
//! run therefore takes a few extra small buffers at varying points. Here it never does. On burn's
//! own pools, who plans counts one more page of the smallest size.
//!
//! One request overtakes others on a real device: an upload comes from the program's thread and
//! skips burn's queue. Here it waits for what was executed before it.
//!
//! Fusion keeps its plans for the life of a device, so a program may run differently once others
//! have run there.
//!
//! # Autotune
//!
//! With burn's autotune on, the tuner has the device time candidates for each new shape and stores
//! the fastest on disk. Timing takes memory of its own. Here the candidate that requests the most
//! memory is reported as the fastest, so the result bounds what a real device chooses. What tuning
//! itself allocates counts. If a real device is known ([`Dry::with_choices_of`]), what it has on
//! disk is chosen and not tuned again. Its files are only read: a dry device has a new name for
//! each run in which the tuner takes part, and what is stored under that name is removed after the
//! run.

#[cfg(feature = "cards")]
mod card;

#[cfg(feature = "cards")]
mod target;

#[cfg(feature = "cards")]
mod server;

#[cfg(feature = "cards")]
mod compiler;
#[cfg(feature = "cards")]
mod device;
#[cfg(feature = "cards")]
mod registry;
#[cfg(feature = "cards")]
mod runtime;

#[cfg(feature = "cards")]
mod twin;

mod replay;

#[cfg(feature = "cards")]
mod models;

#[cfg(feature = "cards")]
pub use crate::{
    card::{Capability, Card, Throughput},
    compiler::{DryCompiler, NoCode},
    device::{DryDevice, Lease, Panicked},
    models::CardModel,
    registry::{LeaseError, MAX_DEVICES, MAX_DEVICES_PER_CARD},
    replay::model::{Dry, MOST_REPLAYS, ReplayError},
    replay::pooled::Lifetimes,
    runtime::DryRuntime,
    server::storage::DryStorage,
    server::usage::Usage,
    server::{DryInfo, DryServer, max_streams},
    target::{Cuda, Target, Wgpu},
    twin::{DryTwin, Mirrored},
};
pub use replay::values::{Leading, NotComputed, compute_values};
