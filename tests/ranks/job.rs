//! The work of one rank, and what it says at its end.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    Interrupter, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining,
};
use firebox::ranks::RankError;
use firebox::{Budget, Bytes, DurableRecorder, Lazy, Learner, Ranks, TrainError, shard};
use firebox_testing::task::{Net, Point, PointBatcher, Points, points, weights};
use serde::{Deserialize, Serialize};

use crate::{exact, real};

pub type B = Autodiff<Lazy<Flex>>;

/// The environment variable that holds the job.
pub const VARIABLE: &str = "FIREBOX_RANKS_JOB";

/// The environment variable that holds the folder where ranks write what they say.
pub const WORDS: &str = "FIREBOX_RANKS_WORDS";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// A loss that is linear in the parameters, against one rank on the global batch.
    /// `follows`: weights follow from the step and are not stated.
    Exact { accumulation: usize, sums: bool, follows: bool },
    /// Parameters of 16 bit.
    Half,
    /// A loss that is no sum over items, in a batch that fits whole.
    Coupled,
    /// Digits: the parameters after training.
    Real(real::Real),
    /// Points.
    Train(Train),
}

/// What goes wrong, on which rank, at which of its batches.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Fault {
    None,
    NotANumber {
        rank: usize,
        batch: usize,
    },
    Panic {
        rank: usize,
        batch: usize,
    },
    /// Does not go on.
    Stall {
        rank: usize,
        batch: usize,
    },
    /// Stops the interrupter.
    Interrupt {
        rank: usize,
        batch: usize,
    },
    /// Ends before training.
    Leaves {
        rank: usize,
    },
    /// Has another model.
    OtherModel {
        rank: usize,
    },
    /// Does not find its budget.
    TooSmall {
        rank: usize,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Train {
    pub folder: PathBuf,
    pub epochs: usize,
    pub points: usize,
    /// The batch of a rank.
    pub batch: usize,
    pub fault: Fault,
    /// How long ranks wait for each other, in milliseconds.
    pub patience: u64,
    pub checkpoints: bool,
    /// Where steps are logged.
    pub log: Option<PathBuf>,
    /// Whether early stopping may end it, by the metrics of all ranks.
    pub stops_early: bool,
    /// Whether training may use what is free.
    pub is_free: bool,
    /// How many batches pass between two measurements of this process.
    pub measures: usize,
}

impl Train {
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            epochs: 4,
            points: 90,
            batch: 10,
            fault: Fault::None,
            patience: 60_000,
            checkpoints: false,
            log: None,
            stops_early: false,
            is_free: false,
            measures: 0,
        }
    }
}

/// What a rank says at its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Said {
    pub rank: usize,
    /// The kind of the error, and its message.
    pub error: Option<(String, String)>,
    /// The bits of the parameters, those after the last whole step where it failed.
    pub weights: Vec<Vec<u32>>,
    /// The epoch and the batch at which it ended, where it failed.
    pub position: Option<(usize, usize)>,
    pub stopped: Option<String>,
    /// How many batches it read.
    pub batches: usize,
    /// Bytes of this process, measured now and then.
    pub memory: Vec<u64>,
    /// The split of the first batch.
    pub split: String,
    /// The bytes of the exchange in the first plan.
    pub exchange: u64,
    /// What training could use, and the memory of the machine.
    pub budget: u64,
    pub machine: u64,
}

impl Job {
    pub fn of_this_process() -> Option<Self> {
        let job = std::env::var(VARIABLE).ok()?;
        Some(serde_json::from_str(&job).expect("the job is written by the tests"))
    }

    pub fn run(self) -> ExitCode {
        let ranks = Ranks::mpi().expect("MPI starts");
        let said = match self {
            Self::Exact { accumulation, sums, follows } => {
                exact::run(&ranks, accumulation, (sums, follows))
            }
            Self::Half => exact::half(&ranks),
            Self::Coupled => exact::coupled(&ranks),
            Self::Real(real) => real.run(&ranks),
            Self::Train(train) => match train.run(&ranks) {
                Some(said) => said,
                None => return ExitCode::FAILURE,
            },
        };
        let failed = said.error.is_some();
        let words = PathBuf::from(std::env::var(WORDS).expect("the tests say where"));
        let text = serde_json::to_vec(&said).expect("it is plain data");
        std::fs::write(words.join(said.rank.to_string()), text).expect("it is writable");
        if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// The bits of numbers.
pub fn bits(numbers: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    numbers.into_iter().map(|of| of.into_iter().map(f32::to_bits).collect()).collect()
}

/// How many batches this rank has read.
static BATCHES: AtomicUsize = AtomicUsize::new(0);

/// A batcher with a fault.
#[derive(Clone)]
struct Faulty {
    fault: Fault,
    rank: usize,
    measures: usize,
    interrupter: Interrupter,
    memory: std::sync::Arc<std::sync::Mutex<Vec<u64>>>,
}

impl<B: Backend> Batcher<B, Point, Points<B>> for Faulty {
    fn batch(&self, items: Vec<Point>, device: &B::Device) -> Points<B> {
        let number = BATCHES.fetch_add(1, Relaxed);
        if self.measures > 0 && number.is_multiple_of(self.measures) {
            self.memory.lock().expect("nothing panics here").push(resident());
        }
        let made = PointBatcher.batch(items, device);
        let is = |rank, batch| rank == self.rank && batch == number;
        match self.fault {
            Fault::NotANumber { rank, batch } if is(rank, batch) => {
                Points { inputs: made.inputs * f32::NAN, ..made }
            }
            Fault::Panic { rank, batch } if is(rank, batch) => panic!("the file is damaged"),
            Fault::Stall { rank, batch } if is(rank, batch) => loop {
                std::thread::park();
            },
            Fault::Interrupt { rank, batch } if is(rank, batch) => {
                self.interrupter.stop(Some("enough"));
                made
            }
            _ => made,
        }
    }
}

/// The bytes of this process in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("there is a /proc");
    let pages: u64 = status.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    pages * 4096
}

impl Train {
    /// None if the rank left.
    fn run(self, ranks: &Ranks) -> Option<Said> {
        let rank = ranks.rank();
        if matches!(self.fault, Fault::Leaves { rank: leaves } if leaves == rank) {
            return None;
        }
        let device = ranks.device::<B>();
        B::seed(&device, 11 + rank as u64);
        let model = match self.fault {
            Fault::OtherModel { rank: other } if other == rank => Net::<B>::coupled(&device, false),
            _ => Net::<B>::new(&device),
        };
        let budget = match self.fault {
            Fault::TooSmall { rank: small } if small == rank => Bytes::new(3000),
            _ => Bytes::mib(64),
        };
        let interrupter = Interrupter::new();
        let batcher = Faulty {
            fault: self.fault,
            rank,
            measures: self.measures,
            interrupter: interrupter.clone(),
            memory: Default::default(),
        };
        let of_rank = |all| shard(InMemDataset::new(all), rank, ranks.world()).seed(3);
        let loader = DataLoaderBuilder::new(batcher.clone())
            .batch_size(self.batch)
            .build(of_rank(points(self.points)));
        let valid = DataLoaderBuilder::new(PointBatcher).batch_size(20).build(of_rank(points(30)));
        let training = SupervisedTraining::new(&self.folder, loader, valid)
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .with_application_logger(None)
            .with_interrupter(interrupter)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(self.epochs);
        let file = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
        let training = match self.checkpoints {
            false => training,
            true => training.with_file_checkpointer(DurableRecorder::new(file)),
        };
        let training = match self.stops_early {
            false => training,
            true => training.early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::<B>::new(),
                Aggregate::Mean,
                // Stops once the loss does not rise.
                Direction::Highest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 1 },
            )),
        };
        let rate = CosineAnnealingLrSchedulerConfig::new(1e-2, 40).init().expect("a scheduler");
        let builder = Learner::builder().auto_batch();
        let builder = match &self.log {
            Some(path) => builder.log_json(path),
            None => builder,
        };
        let builder = match self.checkpoints {
            true => builder.resume(&self.folder),
            false => builder,
        };
        let fitted = builder
            .ranks(ranks.clone().patience(Duration::from_millis(self.patience)))
            .metrics_of_all_ranks(&self.folder)
            .memory(if self.is_free { Budget::free() } else { budget.into() })
            // Ranks split their batches differently.
            .micro_batch(3 + 2 * rank)
            .seed(5)
            .build(model, AdamConfig::new().init(), rate)
            .fit(training);
        let memory = batcher.memory.lock().expect("nothing panics here").clone();
        let said = Said { rank, batches: BATCHES.load(Relaxed), memory, ..Said::default() };
        Some(match fitted {
            Ok(fitted) => {
                let report = fitted.report.as_ref();
                Said {
                    weights: bits(weights::<Lazy<Flex>, _>(&fitted.model)),
                    split: report.map_or(String::new(), |report| report.plan.to_string()),
                    exchange: report.map_or(0, |report| report.overhead.exchange.get()),
                    budget: report.map_or(0, |report| report.budget.get()),
                    machine: firebox::plan::host_memory().map_or(0, |memory| memory.total.get()),
                    stopped: fitted.stopped,
                    ..said
                }
            }
            Err(error) => {
                let text = (kind(error.cause()).to_owned(), error.to_string());
                let state = error.into_parts().1;
                let position = state.as_ref().map(|state| (state.epoch, state.iteration));
                let weights = state.map(|state| bits(weights::<B, _>(&state.model)));
                Said { error: Some(text), position, weights: weights.unwrap_or_default(), ..said }
            }
        })
    }
}

pub fn kind(error: &TrainError) -> &'static str {
    match error {
        TrainError::Rank { .. } => "rank",
        TrainError::NotFinite { .. } => "not finite",
        TrainError::Ranks(RankError::Missing { .. }) => "missing",
        TrainError::Ranks(RankError::Left { .. }) => "left",
        TrainError::Ranks(RankError::Unexpected { .. }) => "unexpected",
        TrainError::Ranks(_) => "ranks",
        _ => "other",
    }
}
