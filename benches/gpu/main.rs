//! Measurements that need a GPU.
//!
//! They cover the largest micro-batch against the planned one, the time of a step and of a plan,
//! and what happens when memory runs out. `run.sh` in this folder runs all of them on a machine
//! with an NVIDIA GPU.
//!
//! The backend is CUDA with the feature `cuda`, Vulkan with `vulkan`, and Flex otherwise. On Flex
//! only the times are meaningful. A part that cannot be measured says so.

mod child;
mod costs;
mod failing;
mod largest;
mod model;
mod real;
mod times;
mod trial;

use std::time::Duration;

use clap::{Parser, Subcommand};
use firebox::Budget;

use crate::model::Subject;

/// Measure on a GPU.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    part: Option<Part>,
    /// Passed by cargo; ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Part {
    /// Compares the largest micro-batch, found by brute force, with the planned one.
    Largest {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// The budgets.
        #[arg(long, value_delimiter = ',', default_value = "1GiB,4GiB,16GiB")]
        memory: Vec<Budget>,
        /// Growth of the size from one trial to the next, in per cent.
        #[arg(long, default_value_t = 2.5)]
        stride: f64,
        /// Minimum number of micro-steps in a batch. With many, an even split is close to the
        /// largest size.
        #[arg(long, default_value_t = 24)]
        steps: usize,
        /// Time limit of a trial, in seconds.
        #[arg(long, default_value_t = 120)]
        limit: u64,
    },
    /// Times a step through `Lazy`, as the Learner runs it, against the backend's own.
    Ratio {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// Number of rounds; each way is timed once per round.
        #[arg(long, default_value_t = 31)]
        rounds: usize,
        /// Items in a batch. Default: the model's.
        #[arg(long)]
        items: Option<usize>,
    },
    /// Times the first plan and later ones.
    PlanTime {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// The budget.
        #[arg(long, default_value = "8GiB")]
        memory: Budget,
        /// Items in a batch. Default: 64 times the model's.
        #[arg(long)]
        items: Option<usize>,
    },
    /// Shows what happens when a step needs more memory than there is and the plan does not know.
    OutOfMemory {
        /// The model.
        #[arg(long, default_value = "gpt")]
        model: Subject,
        /// Items in the batch of each trial.
        #[arg(long, value_delimiter = ',', default_value = "320,4096")]
        items: Vec<usize>,
        /// Time limit of a trial, in seconds.
        #[arg(long, default_value_t = 120)]
        limit: u64,
    },
    /// Times a step with burn, split, with recomputed tensors, parked state and in 16 bit.
    Costs {
        /// The model.
        #[arg(long, default_value = "gpt")]
        model: Subject,
        /// Items in a batch. Default: the model's.
        #[arg(long)]
        items: Option<usize>,
        /// Timed batches.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
        timed: u16,
        /// Time limit of a trial, in seconds.
        #[arg(long, default_value_t = 120)]
        limit: u64,
    },
    /// Runs one training in this process. The other parts start it.
    #[command(hide = true)]
    Trial(trial::Trial),
}

fn main() -> anyhow::Result<()> {
    let Some(part) = Options::parse().part else {
        println!("nothing measured: name a part, or see --help");
        return Ok(());
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info"))
        .format_timestamp_millis()
        .init();
    println!("backend: {}", real::NAME);
    match part {
        Part::Largest { model, memory, stride, steps, limit } => {
            let search = largest::Search { stride, steps, limit: Duration::from_secs(limit) };
            search.run(&model, &memory)
        }
        Part::Ratio { model, rounds, items } => times::ratio(&model, rounds, items),
        Part::PlanTime { model, memory, items } => times::plan(&model, memory, items),
        Part::OutOfMemory { model, items, limit } => {
            failing::run(model, &items, Duration::from_secs(limit))
        }
        Part::Costs { model, items, timed, limit } => {
            let (items, limit) = (items.unwrap_or(model.items()), Duration::from_secs(limit));
            costs::run(model, items, timed.into(), limit)
        }
        Part::Trial(trial) => trial.run(),
    }
}
