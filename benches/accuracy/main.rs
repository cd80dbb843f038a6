//! How exact predictions are on a GPU: whole training runs of every model of the zoo, each in fresh processes, against
//! what these processes reserve.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo bench --profile dev --features vulkan --bench accuracy -- --processes 10
//! ```
//!
//! runs all cases on the first Vulkan device, which may be Mesa's lavapipe on a machine without a GPU. There a process takes
//! 15 seconds to six minutes, most of it to compute, and a release build would take longer than it saves. Compiled kernels are
//! kept for the later processes of a run. With `--features cuda` the same command runs all on an NVIDIA device, with burn's
//! autotune. Without one, or with `--card`, it runs on the blank driver, which computes nothing: burn's real CUDA backend and
//! its allocator, measured by what the driver gave out.
//!
//! `cargo test --features vulkan --bench accuracy`, or `cuda`, runs a few of the cases and fails where a prediction is too low, or too
//! high by more than a tenth. Without a device it says in one line what was not run.

#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod cases;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod command;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod comparison;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
#[path = "../../tests/machine/mod.rs"]
mod machine;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod process;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod target;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
#[path = "../../tests/zoo/mod.rs"]
mod zoo;

#[cfg(any(feature = "vulkan", feature = "cuda"))]
fn main() -> anyhow::Result<()> {
    command::run()
}

#[cfg(not(any(feature = "vulkan", feature = "cuda")))]
fn main() {
    println!("not run: accuracy (needs the feature `vulkan` or `cuda`)");
}
