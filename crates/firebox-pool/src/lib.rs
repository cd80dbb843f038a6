//! CubeCL runtimes that place buffers on a few pages of known size, in one order for all threads.
//!
//! CubeCL's own allocator keeps a pool of pages for each buffer size and each thread, and requests
//! reach it in batches. It therefore reserves more than the buffers need, and the amount varies
//! between runs. [`Pooled`] puts firebox's pool in front of any CubeCL runtime. Devices, kernels
//! and tuner choices stay the same, but buffers go to pages that have the sizes of the training
//! plan.
//!
//! | | CubeCL's pools | this pool |
//! |---|---|---|
//! | pages | fixed sizes, up to a quarter of the card | per [`Region`], sized by the plan |
//! | placement | first gap in the pool for the buffer's size | by the plan, see [`Fit`] |
//! | threads | one stream and one pool each | one stream and one pool for all |
//! | order | requests in batches of 32, frees when the server notices them | program order |
//! | out of memory | panic on the device's thread | error at the next `sync`, `flush` or `read` |

#[cfg(feature = "cubecl")]
mod buffer;
#[cfg(feature = "cubecl")]
mod inner;
#[cfg(feature = "cubecl")]
mod measure;
mod no_place;
mod packing;
mod pool;
#[cfg(feature = "cubecl")]
mod prepare;
#[cfg(feature = "cubecl")]
mod refusal;
mod region;
#[cfg(feature = "cubecl")]
mod runtime;
#[cfg(feature = "cubecl")]
mod server;
mod space;
#[cfg(feature = "cubecl")]
mod transfer;
mod unroll;

#[cfg(feature = "cubecl")]
pub use inner::{has_exact_pages, opens_a_page};
#[cfg(feature = "cubecl")]
pub use measure::Measure;
pub use no_place::{NoPlace, Why};
pub use packing::{Packing, Sequence, pack};
pub use pool::{Holder, Lifetime, Lifted, Needed, PageId, Place, Pool, PoolMemory};
pub use region::{Pages, Region, SMALL, SMALL_PAGE};
#[cfg(feature = "cubecl")]
pub use runtime::{Control, Pooled};
#[cfg(feature = "cubecl")]
pub use server::{Layout, PoolInfo, PoolServer};
pub use space::{Fit, Space};
pub use unroll::Loop;
