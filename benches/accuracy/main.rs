//! Measures how exact predictions are on a GPU.
//!
//! Runs whole training runs of every model of the zoo, each in fresh processes, and compares the
//! predictions with the bytes these processes reserve.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo bench -p firebox-tests --profile dev --features vulkan \
//!     --bench accuracy -- \
//!     --processes 10
//! ```
//!
//! This command runs all cases on the first Vulkan device. On a machine without a GPU that may be
//! Mesa's lavapipe. There a process takes 15 seconds to six minutes, most of it for computing, and
//! a release build would take longer than it saves. Compiled kernels are kept for the later
//! processes of a run.
//!
//! `cargo test -p firebox-tests --features vulkan --bench accuracy` runs a few of the cases. It
//! fails without a device, or if a prediction is too low, or too high by more than a tenth.

#[path = "backend/vulkan.rs"]
mod backend;
mod cases;
mod command;
mod comparison;
mod process;
mod target;

fn main() -> anyhow::Result<()> {
    command::run()
}
