//! Recomputation: rewrites a recorded step so that it recomputes tensors instead of keeping
//! them, with less memory and more time.
//!
//! [`select`] chooses what to drop and what to recompute so that tensors stay within a number
//! of bytes. What it gives is a [`Recipe`], plain data. [`apply`] makes another trace from it, of
//! which any memory model can tell the footprint. [`check`] verifies that trace against the
//! recorded one, with no code of the others.
//!
//! Values stay what they are: a repeated call is the recorded one, on inputs that have the same
//! values. Never repeated are [random draws, uploads, reads and transfers](is_redoable).

mod alive;
mod apply;
mod check;
mod cost;
#[cfg(test)]
mod graphs;
mod lives;
mod masks;
mod program;
mod recipe;
mod seeds;
mod segment;
mod select;
mod walk;

pub use apply::{ApplyError, apply};
pub use check::{CheckError, check};
pub use cost::{Demand, Rates, is_redoable};
pub use program::{Program, ProgramError};
pub use recipe::{Anchor, Edit, Made, Recipe, Rewritten, StepOrigin};
pub use segment::{anchors_before, model_steps, segment};
pub use select::select;
pub use walk::Selected;
