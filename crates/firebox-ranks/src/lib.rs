//! Ranks: the processes that train one model together, each on a device of its own.
//!
//! [`Ranks`] says which of them this process is, exchanges messages with the others, and sums
//! numbers over all of them. It knows no model and no backend. What carries it is an [`Engine`]:
//! [`Alone`], or MPI with the feature `mpi`. [`shard`] gives each rank its part of a data set.
//!
//! Nothing here listens on a network. The transport is MPI's.

mod engine;
mod error;
#[cfg(feature = "mpi")]
mod mpi;
mod ranks;
mod shard;
mod sum;

pub use engine::{Alone, Engine};
pub use error::RankError;
pub use ranks::Ranks;
pub use shard::{Shard, begin_epoch, shard};
pub use sum::{BUCKET, Summing, exchange_bytes};
