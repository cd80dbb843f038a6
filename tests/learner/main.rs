//! Tests the Learner: equal to burn's where the batch fits, equal to the whole batch's gradient
//! where it is split, and typed errors where it cannot continue.

mod attempts;
mod bad_input;
mod broken_files;
mod broken_steps;
mod closeness;
mod coupling;
mod custom_ops;
mod devices;
mod equal_to_burn;
mod faults;
mod given;
mod gradients;
mod hangs;
mod metrics;
mod micro_batch;
#[path = "../../examples/custom_op/op.rs"]
mod op;
mod parked;
mod places;
mod planning;
mod recompute;
mod rehearsals;
mod resumed;
mod shapes;
mod silent;
mod sizes;
mod states;
mod user_panics;
mod whole_batch;
