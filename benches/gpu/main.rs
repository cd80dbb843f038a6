//! What has to be measured on a GPU: the largest micro-batch against the planned one, the time of a step and of a plan,
//! and what happens when memory runs out. `run.sh` beside it runs all of it on a machine with an NVIDIA GPU.
//!
//! The backend is CUDA with the feature `cuda`, Vulkan with `vulkan`, and Flex otherwise, where only the times make
//! sense; what cannot be measured says so.

#[allow(dead_code, reason = "batches are made of host data here")]
#[path = "../models/cnn.rs"]
mod cnn;
#[allow(dead_code, reason = "batches are made of host data here")]
#[path = "../models/gpt.rs"]
mod gpt;
#[path = "../harness/paired.rs"]
mod paired;

mod child;
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
    /// Passed by cargo; says nothing.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Part {
    /// The largest micro-batch by brute force, and the planned one.
    Largest {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// The budgets.
        #[arg(long, value_delimiter = ',', default_value = "1GiB,4GiB,16GiB")]
        memory: Vec<Budget>,
        /// By how much a size grows from one trial to the next, in per cent.
        #[arg(long, default_value_t = 2.5)]
        stride: f64,
        /// The least micro-steps of a batch. With many, an even split is close to the largest size.
        #[arg(long, default_value_t = 24)]
        steps: usize,
        /// The most seconds that a trial may take.
        #[arg(long, default_value_t = 120)]
        limit: u64,
    },
    /// The time of a step through `Lazy`, as the Learner runs it, over the backend's own.
    Ratio {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// How often every way is timed.
        #[arg(long, default_value_t = 31)]
        rounds: usize,
        /// The items of a batch. Default: the model's.
        #[arg(long)]
        items: Option<usize>,
    },
    /// The time of a plan, the first and a later one.
    PlanTime {
        /// The models.
        #[arg(long, value_delimiter = ',', default_value = "cnn,gpt")]
        model: Vec<Subject>,
        /// The budget.
        #[arg(long, default_value = "8GiB")]
        memory: Budget,
        /// The items of a batch. Default: 64 times the model's.
        #[arg(long)]
        items: Option<usize>,
    },
    /// What happens when a step needs more than there is and the plan does not know.
    OutOfMemory {
        /// The model.
        #[arg(long, default_value = "gpt")]
        model: Subject,
        /// The items of the steps.
        #[arg(long, value_delimiter = ',', default_value = "320,4096")]
        items: Vec<usize>,
        /// The most seconds that a trial may take.
        #[arg(long, default_value_t = 120)]
        limit: u64,
    },
    /// One training in this process: what the other parts start.
    #[command(hide = true)]
    Trial(trial::Trial),
}

fn main() -> anyhow::Result<()> {
    let Some(part) = Options::parse().part else {
        println!("nothing measured: name a part, or see --help");
        return Ok(());
    };
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
        Part::Trial(trial) => trial.run(),
    }
}
