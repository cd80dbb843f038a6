//! Replays of traces on a dry device: `model.rs` on CubeCL's pools, `pooled.rs` on firebox's pool.
//! `program.rs` compiles a trace, `execute.rs` runs its instructions. `least.rs` says what a trace
//! needs at least, where no replay is worth while.

pub(crate) mod execute;
pub(crate) mod least;
pub(crate) mod model;
pub(crate) mod pooled;
pub(crate) mod program;
pub(crate) mod translate;
pub(crate) mod values;
