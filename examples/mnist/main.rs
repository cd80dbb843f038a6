//! burn's MNIST example, with plain burn and with firebox.
//!
//! `plain.rs` is training as usually written with burn; `firebox.rs` is the same with firebox.
//! Compare the two files.
//!
//! ```text
//! cargo run --release --features mnist --example mnist -- --memory 200MiB
//! cargo run --release --features mnist --example mnist -- --plain
//! ```
//!
//! burn downloads the images, or `--data DIR` reads them from the four IDX files of MNIST.

mod data;
mod idx;
mod model;
mod plain;
#[path = "firebox.rs"]
mod with_firebox;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use firebox::Budget;

/// Train on MNIST, with firebox or with plain burn.
#[derive(Parser)]
pub struct Options {
    /// Folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte`
    /// and `t10k-labels-idx1-ubyte`. Default: burn downloads them.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Train with plain burn.
    #[arg(long)]
    plain: bool,
    /// Memory that training may use (not with `--plain`).
    #[arg(long, default_value = "free")]
    memory: Budget,
    /// Passes over the training images.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images per optimizer step.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Folder for logs and checkpoints.
    #[arg(long, default_value = ".artifacts/mnist")]
    artifacts: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let folder = &options.artifacts;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    if options.plain { plain::train(&options) } else { with_firebox::train(&options) }
}
