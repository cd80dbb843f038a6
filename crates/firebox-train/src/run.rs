//! A training run: burn's loop, with every batch run in micro-batches. `strategy.rs` is the loop,
//! and `micro_step.rs` one micro-step of it.

pub(crate) mod capture;
pub(crate) mod checkpoints;
pub(crate) mod micro_step;
pub(crate) mod queue;
pub(crate) mod strategy;
