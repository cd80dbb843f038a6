//! A training run: burn's loop, with every batch run in micro-batches.

pub(crate) mod capture;
pub(crate) mod checkpoints;
pub(crate) mod splits;
pub(crate) mod strategy;
