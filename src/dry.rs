//! What training reserves on a GPU that need not exist: cards, dry devices, and the memory model
//! that uses them. Re-exports `firebox-dry` and names the backends without memory.
//!
//! ```
//! use burn::backend::Autodiff;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::prelude::*;
//! use firebox::dry::{Card, Cuda, Dry, DryCuda, Lease};
//! use firebox::{Bytes, Lazy};
//! use firebox::trace::{StepRecorder, rehearse};
//!
//! type B = Autodiff<Lazy<DryCuda>>;
//!
//! let card = Card::named("T4").expect("in the table");
//! let lease = Lease::<Cuda>::take(&card.properties())?;
//! let model: Linear<B> = LinearConfig::new(1024, 1024).init(lease.device());
//! let batch = Tensor::<B, 2>::zeros([8192, 1024], lease.device()); // of no memory
//! let recorder = StepRecorder::new().refuse_reads();
//! let rehearsal = rehearse::<B, _>(&recorder, &model, |model| {
//!     model.forward(batch.clone()).sum().backward();
//! })?;
//! drop(lease);
//! let footprint = Dry::<DryCuda>::new(card.properties()).replay(&rehearsal.trace)?;
//! assert!(footprint.peak >= Bytes::mib(2 * 32 + 4)); // batch, result, weights
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
pub use firebox_dry::{
    Capability, Card, CardModel, Cuda, Dry, DryDevice, DryRuntime, DryTwin, Lease, LeaseError,
    Lifetimes, MAX_DEVICES, MAX_DEVICES_PER_CARD, Mirrored, Panicked, ReplayError, Target,
    Throughput, Usage, Wgpu,
};
use firebox_pool::Pooled;

/// burn's `Cuda` with fusion, without memory. A model on it needs no weights on the host either.
pub type DryCuda = Fusion<CubeBackend<DryRuntime<Cuda>, f32, i32, u8>>;

/// [`firebox::Cuda`](crate::pool::Pooled), without memory.
pub type DryPooledCuda = Fusion<CubeBackend<Pooled<DryRuntime<Cuda>>, f32, i32, u8>>;

/// burn's `Wgpu` with fusion, without memory.
pub type DryWgpu = Fusion<CubeBackend<DryRuntime<Wgpu>, f32, i32, u32>>;
