//! What the tests and benches of firebox share: models, their batches, and the machine they run on.
//!
//! Examples do not use it. They are to be read, and copied, by themselves.
#![allow(missing_docs, reason = "a model's fields and constructors say what they are by name")]

pub mod bench;
pub mod classifiers;
pub mod full_size;
pub mod layers;
pub mod lengths;
pub mod machine;
pub mod task;
pub mod zoo;
