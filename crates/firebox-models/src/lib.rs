//! The memory models of cards, compiled once.
//!
//! A model is a whole stack of burn and CubeCL, which takes a minute or two to compile. At low
//! optimisation, rustc takes generic code from a dependency that has compiled it. In debug builds
//! the stacks are compiled here, instead of in each program that has `use firebox_models as _`. In
//! release builds the crate is empty.

#[cfg(debug_assertions)]
mod stacks;

#[cfg(debug_assertions)]
pub use stacks::{cuda, wgpu};
