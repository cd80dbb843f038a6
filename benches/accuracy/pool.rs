//! The bench `accuracy_cuda` on `firebox::Cuda`, which has firebox's own memory pool.
//!
//! Here the prediction equals what the driver gives out, to the byte.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo bench -p firebox-tests --features cuda \
//!     --bench accuracy_pool -- \
//!     --processes 3 --jobs 2
//! ```

#[path = "backend/pool.rs"]
mod backend;
mod cases;
mod command;
mod comparison;
mod process;
mod target;

fn main() -> anyhow::Result<()> {
    command::run()
}
