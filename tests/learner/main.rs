//! The Learner: equal to burn's where the batch fits, equal to the whole batch's gradient where it is split, and
//! typed errors where it cannot go on.

mod closeness;
mod equal_to_burn;
mod failures;
mod gradients;
mod metrics;
mod micro_batch;
#[path = "../models/mod.rs"]
mod models;
mod planning;
mod task;
mod whole_batch;
