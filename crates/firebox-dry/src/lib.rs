//! A CubeCL device without memory: it tells what a program of burn's reserves on a GPU that need not be there.
//!
//! burn's CUDA and wgpu backends are one backend, `CubeBackend`, over CubeCL runtimes. [`DryRuntime`] is one more
//! runtime. On it run burn's real fusion, choice of kernels, temporary buffers and CubeCL's real allocator; kernels
//! are dropped instead of compiled, and pages have a size and no memory. What counts on a GPU is what the allocator
//! reserves, up to several times what tensors need, and it depends on all of these.
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
//! [`Dry`] replays a recorded trace there and tells its footprint: the same bytes as the program itself reserves.
//!
//! # What is mirrored, and of what
//!
//! | What | CUDA | wgpu |
//! |---|---|---|
//! | the allocator, its pools, when pages are freed | the real one, `memory_management` of cubecl-runtime | the same |
//! | configuration of the pools | the default, which cubecl-cuda cannot change (`runtime.rs`) | the default; not what a program gave to `init_setup` |
//! | largest page, alignment | a quarter of the memory, 512 bytes (`runtime.rs`) | as the device reports, `max_storage_buffer_binding_size` and `min_uniform_buffer_offset_alignment` (`runtime.rs`) |
//! | layout of tensors | rows padded, `PitchedMemoryLayoutPolicy` | contiguous, `ContiguousMemoryLayoutPolicy` |
//! | pools per stream, streams by thread | `stream/base.rs` of cubecl-runtime; the program has one, and each loader thread whose tensors a trace tells | the same |
//! | scalars and shapes of a launch | a buffer of the tensors' pools while the launch is issued; from capability 7.0 on for shapes of unknown rank only (`launch_checked` in `compute/server.rs`) | a pool of their own that `memory_usage` leaves out (`compute/mem_manager.rs`); not counted |
//! | when a launch lets go of its tensors | when it is issued: `Command::resource` takes the binding and keeps an address | the same: a queued task holds `WgpuResource`s, which keep the page and not the place in it (`prepare_bindings` in `compute/server.rs`) |
//! | uploads and reads | pinned memory of the host, not counted (`compute/command.rs`) | staging buffers, not counted (`compute/mem_manager.rs`) |
//! | buffers of no bytes | a page of no bytes | the same; the real storage makes it 32 bytes (`compute/storage.rs`) and does not count them |
//! | a buffer above the largest page | a panic on the device's thread; here a [`Refusal`] | the same |
//! | a full card | a panic; here the pages are counted all the same | the same |
//!
//! # Order
//!
//! On a real device burn's fusion runs on one thread and CubeCL's server on another. The server takes requests in batches of
//! 32: it sleeps until there are so many, or until somebody waits for an answer (`CHANNEL_MAX_TASK` in
//! `device/handle/channel.rs` of cubecl-common). What the program drops before a batch is full is free for every request of
//! it. Serving a batch takes time, in which later operations drop more: then the server sees less alive, by chance.
//!
//! Here server and fusion share a thread. Requests wait for their batch, which is served when the next one begins. So every run
//! gives the same bytes, and at each request the most is alive that can be alive on a real device whose batches begin at the
//! same requests.
//!
//! A batch begins anew after each answer. The program waits for one at a [`Step::SETTLE`](firebox_trace::Step::SETTLE), not
//! at a [`Step::DRAIN`](firebox_trace::Step::DRAIN), which empties burn's queue only; but another thread may ask there, such as
//! that of the metrics. And a loader thread that uploads meanwhile shifts the batches that follow. So the rounds of a replay
//! differ: in the first one somebody reads at every drain; in the second one nobody does in the first half of the program, and
//! then somebody reads and each answer is followed by the uploads of a batch. There are more rounds, with more uploads, only
//! behind one that opened a page. What a loader thread computes on the device, and its requests beyond one a tensor, are not
//! modelled. It is no proof that no real run reserves more: batches may begin elsewhere, and where a buffer is put depends on
//! which gaps there are, so that with less alive a later buffer can find its gap taken.
//!
//! Whether an operation works in place is a race, too. It does if its input has no more than two holders, the program and the
//! allocator (`can_mut` in `memory_pool/handle.rs` of cubecl-runtime), and while the server binds a new buffer the request
//! is a third (`initialize_memory`). A real run therefore takes a few small buffers more, now here, now there. Here it never
//! does; where that was found to matter, on wgpu, a replay asks from its second round on, behind every request, whether the pool of
//! the smallest pages has room for one buffer more ([`Usage::full`]).
//!
//! One request overtakes others on a real device: an upload comes from the program's thread and skips burn's queue.
//! Here it waits for what was executed before it.
//!
//! fusion keeps its plans for the life of a device, so a program can be run in another way once others were run before.
//!
//! # Autotune
//!
//! With burn's autotune on, the tuner has the device time candidates for each new shape, which takes memory of its own, and
//! files the fastest on disk. Here the candidate that asks for the most memory is said to be the fastest, so that the result
//! bounds what a real device chooses, and what tuning itself allocates counts. Where a real device is known
//! ([`Dry::with_choices_of`]), what it has on disk is chosen and not tuned again. Its files are only read: a dry device has a
//! name of its own for each run, and what is filed under it is removed when the run is over.

mod card;
mod card_table;

mod target;

mod room;
mod storage;
mod usage;

mod server;

mod device;
mod runtime;
mod tuning;

mod twin;

mod execute;
mod model;
mod pooled;
mod program;
mod translate;
mod values;

pub use card::{Capability, Card};
pub use device::{DryDevice, Lease, LeaseError, MAX_DEVICES, MAX_DEVICES_PER_CARD, Panicked};
pub use model::{Dry, MOST_REPLAYS, ReplayError};
pub use runtime::{DryCompiler, DryRuntime, NoCode};
pub use server::{DryInfo, DryServer, max_streams};
pub use storage::DryStorage;
pub use target::{Cuda, Target, Wgpu};
pub use twin::{DryTwin, Mirrored, Pooling};
pub use usage::{Refusal, Usage};
pub use values::{HostValues, NotComputed, Observer};
