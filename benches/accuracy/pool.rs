//! The bench `accuracy_cuda` on `firebox::Cuda`, which has firebox's own memory pool.
//!
//! Here the prediction equals what the driver gives out, to the byte.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo bench --features cuda --bench accuracy_pool -- \
//!     --processes 3 --jobs 2
//! ```

#[cfg(feature = "cuda")]
#[path = "backend/pool.rs"]
mod backend;
#[cfg(feature = "cuda")]
mod cases;
#[cfg(feature = "cuda")]
mod command;
#[cfg(feature = "cuda")]
mod comparison;
#[cfg(feature = "cuda")]
mod process;
#[cfg(feature = "cuda")]
mod target;

#[cfg(feature = "cuda")]
fn main() -> anyhow::Result<()> {
    command::run()
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("not run: accuracy_pool (needs the feature `cuda`)");
}
