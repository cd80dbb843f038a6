//! Threads other than the training thread. The calls of loader threads are deferred
//! (`deferred.rs`), and the threads wait at a gate (`gate.rs`). burn's threads for metrics and
//! checkpoints leave the ends of tensors to the training thread (`handover.rs`).

pub(crate) mod deferred;
pub(crate) mod gate;
pub(crate) mod handover;
pub(crate) mod loaders;
pub(crate) mod locks;
pub(crate) mod making;
pub(crate) mod proc;
pub(crate) mod progress;
pub(crate) mod streams;
