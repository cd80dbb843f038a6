//! Trains a small GPT on this repository's own text, character by character, and lets it write.
//!
//! Lines differ in length, so batches have many lengths.
//!
//! ```text
//! cargo run --release --example char_gpt
//! cargo run --release --example char_gpt -- --memory 64MiB --epochs 10
//! ```
//!
//! The loss is a mean over the characters that are not padding. The weight of a batch is therefore
//! its number of such characters.
//!
//! The last line is for scripts. It gives the mean loss per character on held-out lines, the
//! budget, and the predicted and measured peak in bytes. The measured peak is the peak of the heap
//! above its level before the model was built.

mod model;
mod text;

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::SupervisedTraining;
use burn::train::metric::{AccuracyMetric, LossMetric};
use clap::Parser;
use firebox::{Budget, Lazy, Learner};
use peak_alloc::PeakAlloc;

use crate::model::Gpt;
use crate::text::{LineBatcher, Lines, PADDING, lines};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// Train a small GPT on the text of this repository within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (64MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "free")]
    memory: Budget,
    /// Passes over the text.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Lines per optimizer step.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Number of characters to write at the end.
    #[arg(long, default_value_t = 240)]
    sample: usize,
    /// Seed for the weights and the sample.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Folder for logs.
    #[arg(long, default_value = ".artifacts/char_gpt")]
    artifacts: std::path::PathBuf,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let device = Default::default();
    B::seed(&device, options.seed);
    let (train, valid) = lines()?;
    let held_out = valid.clone();
    let batch_size = options.batch_size as usize;
    std::fs::create_dir_all(&options.artifacts)
        .with_context(|| format!("cannot write to {}", options.artifacts.display()))?;
    let train_loader =
        DataLoaderBuilder::new(LineBatcher).batch_size(batch_size).build(InMemDataset::new(train));
    let valid_loader =
        DataLoaderBuilder::new(LineBatcher).batch_size(batch_size).build(InMemDataset::new(valid));
    let accuracy = || AccuracyMetric::new().with_pad_token(PADDING as usize);
    let training = SupervisedTraining::new(&options.artifacts, train_loader, valid_loader)
        .metric_train_numeric(accuracy())
        .metric_valid_numeric(accuracy())
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .num_epochs(options.epochs as usize);

    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let fitted = Learner::builder()
        .auto_batch()
        .memory(options.memory)
        .stop_on_ctrl_c()
        .build(Gpt::<B>::new(&device), AdamWConfig::new().init(), 2e-3)
        .fit(training)?;
    let measured = HEAP.peak_usage().saturating_sub(before);

    println!("{}", fitted.model.write(options.sample, options.seed));
    let loss = loss(&fitted.model, &held_out);
    let budget = fitted.report.context("no batch was trained on")?.budget;
    let memory = fitted.memory.context("no batch was trained on")?;
    println!(
        "result: loss={loss:.3} budget={} predicted={} measured={measured}",
        budget.get(),
        memory.predicted.get(),
    );
    Ok(())
}

/// Mean loss per character.
fn loss(model: &Gpt<Lazy<Flex>>, held_out: &[String]) -> f64 {
    let (mut sum, mut weight) = (0.0, 0.0);
    for some in held_out.chunks(32) {
        let batch: Lines<Lazy<Flex>> = LineBatcher::of(some.to_vec(), &Default::default());
        let characters = batch.characters();
        sum += f64::from(model.predict(batch).loss.into_scalar()) * characters;
        weight += characters;
    }
    sum / weight
}
