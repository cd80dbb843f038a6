//! The iteration: what happens to a batch between the loader and the end of the optimizer's step.
//! It is written once. A loop passes two stations, `each` for the micro-batches and `update` for
//! the parameters, and one of two drivers is behind them: [`rehearsing`] records all of it and
//! throws it away, [`running`] records one micro-step at a time, compares it with the budget, and
//! runs it. burn's loop, custom loops and validation are such loops.

pub(crate) mod outputs;
pub(crate) mod pieces;
pub(crate) mod queue;
pub(crate) mod rehearsing;
pub(crate) mod running;
