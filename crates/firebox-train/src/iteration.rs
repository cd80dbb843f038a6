//! The iteration: what happens to a batch between the loader and the end of the optimizer's step.
//! Every loop passes two stations, its micro-batches and the update of the parameters, and has one
//! of two drivers for them. [`rehearsing`] records all of it and throws it away. [`running`]
//! records one micro-step at a time, compares it with the budget, and runs it; [`queue`] runs the
//! update. burn's loop, custom loops and validation share both drivers.

pub(crate) mod loading;
pub(crate) mod on_device;
pub(crate) mod outputs;
pub(crate) mod pieces;
pub(crate) mod queue;
pub(crate) mod rehearsing;
pub(crate) mod running;
