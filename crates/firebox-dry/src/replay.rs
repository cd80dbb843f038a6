//! Replays of traces on a dry device: `model.rs` on CubeCL's pools, `pooled.rs` on firebox's pool.
//! `program.rs` compiles a trace, `execute.rs` runs its instructions. `least.rs` says what a trace
//! needs at least, where no replay is worth while.

use std::any::Any;

#[cfg(feature = "cards")]
pub(crate) mod execute;
#[cfg(feature = "cards")]
pub(crate) mod least;
#[cfg(feature = "cards")]
pub(crate) mod model;
#[cfg(feature = "cards")]
pub(crate) mod pooled;
// A replay uses more of these than the host.
#[cfg_attr(not(feature = "cards"), expect(dead_code))]
pub(crate) mod program;
#[cfg_attr(not(feature = "cards"), expect(dead_code))]
pub(crate) mod translate;
pub(crate) mod values;

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".into())
}
