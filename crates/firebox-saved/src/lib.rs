//! Saved traces: a recorded training step in a file, from which its memory can be predicted for any
//! card, any batch size and any split into micro-batches, on another machine and without the code
//! of the model.
//!
//! A trace holds the numbers of one batch size. [`SavedTrace::record`] records a few small splits
//! of each form (`form.rs`), compares them number by number (`rule.rs`, `description.rs`,
//! `skeleton.rs`), and keeps how numbers follow from sizes. [`SavedTrace::sample`] makes the trace
//! of any split. `file.rs` writes and reads it.

mod description;
mod error;
mod file;
mod form;
mod rule;
mod rules;
mod saved;
mod skeleton;

pub use error::{InstantiateError, Irregular, LoadError, SaveError};
pub use form::ENOUGH;
pub use saved::{About, RecordingProgress, Sample, SavedTrace};
