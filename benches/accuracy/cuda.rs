//! The bench `accuracy` on CUDA, with burn's autotune.
//!
//! Runs on an NVIDIA device. Without one, or with `--card`, it runs on the blank driver, which
//! computes nothing: burn's real CUDA backend and its allocator, measured by what the driver gave
//! out.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo bench -p firebox-tests --features cuda \
//!     --bench accuracy_cuda -- --processes 3 --jobs 2
//! ```
//!
//! `cargo test -p firebox-tests --features cuda --bench accuracy_cuda` runs a few of the cases on
//! two cards. It fails if a prediction is too low, or too high by more than a quarter.

#[path = "backend/cuda.rs"]
mod backend;
mod cases;
mod command;
mod comparison;
mod process;
mod target;

fn main() -> anyhow::Result<()> {
    command::run()
}
