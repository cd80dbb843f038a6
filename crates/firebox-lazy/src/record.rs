//! Recording: `session.rs` holds the recording of a thread, `call.rs` records one call, and
//! `recording.rs` is what users call.

pub(crate) mod arrival;
pub(crate) mod call;
pub(crate) mod describe;
pub(crate) mod draws;
pub(crate) mod inputs;
pub(crate) mod known;
pub(crate) mod limits;
pub(crate) mod parking;
pub(crate) mod parks;
pub(crate) mod recorder;
pub(crate) mod recording;
pub(crate) mod rehearsing;
pub(crate) mod rewriting;
pub(crate) mod running;
pub(crate) mod session;
pub(crate) mod values;
