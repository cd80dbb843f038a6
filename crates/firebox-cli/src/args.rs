//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use firebox::Bytes;

/// Plan the memory of a burn model's training step for cards you have and cards you want.
///
/// A trace is saved by the program that trains, with `Learner::builder().save_trace("step.trace")`
/// or `Learner::trace`. It holds the step for every batch size, and no weights and no data.
#[derive(Debug, Parser)]
#[command(name = "firebox", version, after_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  firebox plan step.trace --batch 256 --card rtx-4090
  firebox plan step.trace --batch 256 --memory 10GiB --card rtx-3080 --json
  firebox report step.trace --batch 256 --card rtx-4090 -o memory.html
  firebox diff before.trace after.trace --batch 256 --card rtx-4090

Exit codes:
  0  done; with `plan`, the batch fits every card
  1  a file cannot be read or written, or is no trace
  2  the command line is wrong
  3  the batch does not fit a card";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// How a batch is split on each card, and what that needs.
    #[command(after_help = "\
Examples:
  firebox plan step.trace --batch 256                      all cards that firebox knows
  firebox plan step.trace --batch 256 --card t4 --advise   what would need less
  firebox plan step.trace --batch 64 --card cpu --memory 2GiB")]
    Plan(PlanOptions),
    /// The largest batch that fits each card without being split.
    #[command(after_help = "\
Examples:
  firebox largest step.trace --card rtx-3060 --card rtx-4090
  firebox largest step.trace --card rtx-3060 --recompute     also by recomputing activations")]
    Largest(LargestOptions),
    /// Draws where the memory of a step goes.
    #[command(after_help = "\
Examples:
  firebox report step.trace --batch 256 --card rtx-4090 -o memory.html   to look into, in a browser
  firebox report step.trace --batch 256 --card rtx-4090 -o memory.svg    for a document; also .png
  firebox report step.trace --batch 256 --card rtx-4090 -o memory.json   for https://ui.perfetto.dev")]
    Report(ReportOptions),
    /// What changed between two traces, by module, and what it means at the peak.
    #[command(after_help = "\
Examples:
  firebox diff before.trace after.trace --batch 256 --card t4")]
    Diff(DiffOptions),
    /// The cards that firebox knows.
    Cards {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What a trace is of, and whether its batches may be split.
    Show {
        /// The saved trace.
        trace: PathBuf,
    },
}

/// What to plan on.
#[derive(Args, Debug)]
pub struct On {
    /// A card, such as `rtx-4090`, `t4` or `h100-80gb`, or `cpu` for burn's Flex. May be given
    /// several times. Default for `plan` and `largest`: all cards that firebox knows.
    #[arg(long, value_name = "CARD")]
    pub card: Vec<String>,
    /// What training may use, such as `10GiB`, at most what the card has. Default: what an empty
    /// card has free, minus burn's context and a margin.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory: Option<Bytes>,
    /// Plan for burn's own memory pools instead of those of `firebox::Cuda`.
    #[arg(long)]
    pub burn_pools: bool,
}

/// The step to plan, and on what.
#[derive(Args, Debug)]
pub struct StepOptions {
    /// The saved trace.
    pub trace: PathBuf,
    /// Items of a batch.
    #[arg(long, value_name = "ITEMS", value_parser = items)]
    pub batch: usize,
    #[command(flatten)]
    pub on: On,
    /// Items of a micro-batch. Default: as many as fit.
    #[arg(long, value_name = "ITEMS", value_parser = items)]
    pub micro_batch: Option<usize>,
    /// When activations are recomputed instead of kept.
    #[arg(long, value_enum, default_value_t)]
    pub recompute: Recompute,
    /// Keep the optimizer's state outside of the device between steps.
    #[arg(long)]
    pub park: bool,
}

/// When activations are recomputed.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum Recompute {
    Never,
    /// Where a batch cannot be trained in another way.
    #[default]
    IfNeeded,
}

#[derive(Args, Debug)]
pub struct PlanOptions {
    #[command(flatten)]
    pub step: StepOptions,
    /// Count a checkpoint that is written while training goes on.
    #[arg(long)]
    pub checkpoint: bool,
    /// Say what would need less, the most first.
    #[arg(long)]
    pub advise: bool,
    /// As JSON, one object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct LargestOptions {
    /// The saved trace.
    pub trace: PathBuf,
    #[command(flatten)]
    pub on: On,
    /// Also recompute activations, for at most 30 % more time.
    #[arg(long)]
    pub recompute: bool,
    /// Keep the optimizer's state outside of the device between steps.
    #[arg(long)]
    pub park: bool,
    /// As JSON, one object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ReportOptions {
    #[command(flatten)]
    pub step: StepOptions,
    /// The file: `.html`, `.svg`, `.png`, or `.json` for Perfetto.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

#[derive(Args, Debug)]
pub struct DiffOptions {
    /// The trace before.
    pub before: PathBuf,
    /// The trace after.
    pub after: PathBuf,
    /// Items of a batch.
    #[arg(long, value_name = "ITEMS", value_parser = items)]
    pub batch: usize,
    #[command(flatten)]
    pub on: On,
}

fn bytes(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|error: firebox::trace::ParseBytesError| error.to_string())
}

fn items(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least one item".to_owned()),
        Ok(items) => Ok(items),
        Err(error) => Err(format!("{error}")),
    }
}
