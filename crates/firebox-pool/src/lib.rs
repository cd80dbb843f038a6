//! CubeCL runtimes whose buffers lie on a few pages of known size, in one order for all threads.
//!
//! CubeCL's own allocator keeps a pool of pages for each size of buffers and each thread, and requests reach it in batches, so that
//! what it reserves is more than buffers need and differs from run to run. [`Pooled`] puts a pool of our own in front of any CubeCL
//! runtime: the same devices, kernels and choices of the tuner, and buffers on pages that are asked for at the sizes that
//! training was planned with.
//!
//! | | CubeCL's pools | this one |
//! |---|---|---|
//! | pages | of fixed sizes, the largest a quarter of the card | one for each [`Region`], as large as the plan says |
//! | a place | the first gap of a pool for its size | the smallest gap of its region |
//! | threads | a stream and a pool for each | one stream, one pool |
//! | order | requests in batches of 32, frees when the server gets to look | as in the program |
//! | no memory | a panic on the device's thread | an error at the next `sync`, `flush` or `read` |

mod id;
mod inner;
mod pool;
mod prepare;
mod refusal;
mod runtime;
mod server;
mod space;
mod transfer;

pub use inner::{has_exact_pages, opens_a_page};
pub use pool::{Holder, Lifted, Needed, PageId, Pages, Place, Pool, PoolMemory, Region, SMALL};
pub use refusal::{NoPlace, Why};
pub use runtime::{Control, Pooled};
pub use server::{Layout, PoolInfo, PoolServer};
pub use space::{Fit, Space};
