//! Finds the largest batch of a model that fits each card, without a GPU.
//!
//! Prints a table of all cards that firebox knows.
//!
//! ```text
//! cargo run --release --features cards --example fits
//! cargo run --release --features cards --example fits -- --model gpt --card 4090 --card h100
//! ```
//!
//! Training steps with Adam are recorded on a device without memory and replayed on a dry device of
//! each card. No weight and no batch is ever allocated. The numbers exclude the memory that a
//! loader, metrics and checkpoints hold alongside the step.
//!
//! The last line is for scripts. It gives the model, the number of cards, the seconds taken, and
//! the batch for each card.

mod models;
mod search;
mod table;

use std::time::Instant;

use anyhow::{Context, bail};
use burn::backend::Autodiff;
use clap::{Parser, ValueEnum};
use firebox::Lazy;
use firebox::dry::{Card, DryCuda, DryPooledCuda};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;

use crate::models::{Cnn, Gpt, ResNet};
use crate::search::{Fit, Rehearsals, Subject};

type B = Autodiff<Lazy<DryCuda>>;

/// Find the largest batch of a model that fits each card.
#[derive(Parser)]
struct Options {
    /// The model.
    #[arg(long, value_enum, default_value_t = Model::Cnn)]
    model: Model,
    /// Only this card; may be given several times. Default: all.
    #[arg(long)]
    card: Vec<String>,
    /// Width and height of an image in pixels. Default: 28 for `cnn`, 224 for `resnet18`.
    #[arg(long, value_parser = clap::value_parser!(u32).range(8..=1024))]
    image: Option<u32>,
    /// Length of a text in tokens, for `gpt`.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=8192))]
    sequence: u32,
    /// Use the memory pools of burn's own `Cuda` instead of the pool of `firebox::Cuda`.
    #[arg(long)]
    burn_pools: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Model {
    /// Two convolutions with batch normalization and two linear layers, on grey images (28 × 28
    /// pixels by default).
    Cnn,
    /// ResNet-18 on colour images (224 × 224 pixels by default).
    Resnet18,
    /// Twelve layers, 768 wide, with a vocabulary of 8,192.
    Gpt,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let image = |default| options.image.map_or(default, |pixels| pixels as usize);
    match options.model {
        Model::Cnn => run("cnn", Cnn::<B>::new(image(28)), &options),
        Model::Resnet18 => run("resnet18", ResNet::<B>::new(image(224)), &options),
        Model::Gpt => run("gpt", Gpt::<B>::new(options.sequence as usize), &options),
    }
}

/// Searches on all cards at once and prints the results.
fn run<S: Subject<B>>(name: &str, subject: S, options: &Options) -> anyhow::Result<()> {
    let started = Instant::now();
    let cards = cards(&options.card)?;
    let rehearsals = Rehearsals::new(subject, &cards[0])?;
    let progress = ProgressBar::new(cards.len() as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos} of {len} cards, {elapsed}")?);
    let found = cards.par_iter().map(|card| {
        let fit = match options.burn_pools {
            true => search::largest_batch::<DryCuda, _, _>(card, &rehearsals),
            false => search::largest_batch::<DryPooledCuda, _, _>(card, &rehearsals),
        };
        progress.inc(1);
        fit.with_context(|| format!("no footprint on {}", card.name()))
    });
    let found: Vec<Fit> = found.collect::<anyhow::Result<_>>()?;
    progress.finish_and_clear();

    println!("{}, a training step with Adam:", rehearsals.title());
    println!("{}", table::of(&found));
    let seconds = started.elapsed().as_secs_f64();
    print!("result: model={name} cards={} seconds={seconds:.1}", found.len());
    for fit in &found {
        print!(" {}={}", fit.card.name().to_lowercase().replace(' ', "-"), fit.batch);
    }
    println!();
    Ok(())
}

/// Cards with these names, or the whole table if `names` is empty.
fn cards(names: &[String]) -> anyhow::Result<Vec<Card>> {
    if names.is_empty() {
        return Ok(Card::all().to_vec());
    }
    let mut cards = Vec::new();
    for name in names {
        let Some(card) = Card::named(name) else {
            let known: Vec<&str> = Card::all().iter().map(Card::name).collect();
            bail!("no card is called `{name}`; choose from: {}", known.join(", "));
        };
        cards.push(card);
    }
    Ok(cards)
}
