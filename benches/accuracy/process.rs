//! The work of a child process: one training run as a user writes it, and the bytes it held on the
//! device.

use std::fmt;

use anyhow::{Context, bail};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig};
use burn::record::CompactRecorder;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::TrainingProgress;
use burn::train::{InferenceStep, LearningComponentsMarker, SupervisedTraining, TrainStep};
use firebox::{Bytes, Learner, PlanReport};
use firebox_dry::Dry;
use firebox_testing::bench::renderer::OnOutput;
use firebox_testing::machine;
use firebox_testing::zoo::iterations::{parts, record, train};
use firebox_testing::zoo::{self, Numbered, Zoo};
use serde::{Deserialize, Serialize};

use crate::cases::Case;
use crate::target::{Base, Training, held, held_by_driver, properties};

/// Optimizer steps per epoch on whole batches.
const STEPS: usize = 2;
/// More than any case needs. The case says how batches are split.
const BUDGET: Bytes = Bytes::gib(64);
const SEED: u64 = 7;

/// How a case is trained.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Setup {
    /// Epochs of two optimizer steps each. Default: two, or four on the blank driver, where batches
    /// are planned again once their kernels are tuned.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: Option<u64>,
    /// Threads of the data loader. With zero, the training thread makes the batches.
    #[arg(long, default_value_t = 2)]
    workers: u64,
    /// Loader batches per optimizer step (burn's `grads_accumulation`).
    #[arg(long, value_name = "BATCHES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulate: u64,
    /// Trains without a checkpointer.
    #[arg(long)]
    no_checkpoints: bool,
}

impl Setup {
    /// Arguments that pass this setup to another process.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--epochs", self.epochs),
            ("--workers", Some(self.workers)),
            ("--accumulate", Some(self.accumulate)),
        ];
        let given = numbers.into_iter().filter_map(|(name, number)| Some((name, number?)));
        let numbers = given.map(|(name, number)| [name.to_owned(), number.to_string()]);
        let flag = self.no_checkpoints.then(|| "--no-checkpoints".to_owned());
        numbers.flatten().chain(flag).collect()
    }

    fn epochs(&self) -> usize {
        let usual = if machine::is_blank() { 4 } else { 2 };
        self.epochs.unwrap_or(usual) as usize
    }
}

type Valid = <Training as AutodiffBackend>::InnerBackend;
type Components<M> =
    LearningComponentsMarker<Training, f64, M, OptimizerAdaptor<Adam, M, Training>>;

/// A model of the zoo that can be trained here.
trait Subject:
    Zoo<Training>
    + TrainStep<Input = <Self as Zoo<Training>>::Batch>
    + AutodiffModule<Training, InnerModule = Self::Valid>
    + fmt::Display
    + 'static
{
    type Valid: Zoo<Valid> + InferenceStep<Input = <Self::Valid as Zoo<Valid>>::Batch>;

    /// Sets the metrics that a user would look at.
    fn metrics(
        training: SupervisedTraining<Components<Self>>,
    ) -> SupervisedTraining<Components<Self>>;
}

macro_rules! subjects {
    ($($name:literal: $model:ident, $metrics:expr;)*) => {
        $(impl Subject for zoo::$model<Training> {
            type Valid = zoo::$model<Valid>;

            fn metrics(
                training: SupervisedTraining<Components<Self>>,
            ) -> SupervisedTraining<Components<Self>> {
                training.metrics($metrics)
            }
        })*

        /// Runs a case in this process. If `left` is set, also measures what two more iterations
        /// leave in use.
        pub fn run(case: &Case, setup: Setup, left: bool) -> anyhow::Result<Found> {
            match case.model {
                $($name => measure::<zoo::$model<Training>>(case, setup, left),)*
                other => bail!("there is no model `{other}`; `--list` names the cases of all"),
            }
        }

        /// Predicts what two iterations of a model on batches of `items` items reserve, on the
        /// device's twin without memory.
        pub fn predict(model: &str, items: usize) -> anyhow::Result<Bytes> {
            match model {
                $($name => dry_run::<zoo::$model<Training>>(items),)*
                other => bail!("there is no model `{other}`; `--list` names the cases of all"),
            }
        }
    };
}

subjects! {
    "mlp": Mlp, (AccuracyMetric::new(), LossMetric::new());
    "cnn": Cnn, (AccuracyMetric::new(), LossMetric::new());
    "resnet": ResNet, (AccuracyMetric::new(), LossMetric::new());
    "unet": UNet, (LossMetric::new(),);
    "encoder": Encoder, (AccuracyMetric::new(), LossMetric::new());
    "gpt": Gpt, (AccuracyMetric::new(), LossMetric::new());
    "lstm": Recurrent, (AccuracyMetric::new(), LossMetric::new());
    "autoencoder": Autoencoder, (LossMetric::new(),);
    "siamese": Siamese, (LossMetric::new(),);
    "reader": Reader, (AccuracyMetric::new(), LossMetric::new());
}

/// Results of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The largest prediction of the Learner.
    pub predicted: Bytes,
    /// Bytes that the process had reserved after training.
    pub reserved: Bytes,
    /// Growth of the process's memory during training according to the driver, if it tells.
    /// Includes compiled kernels. On the blank driver: the most that it ever gave out, planning
    /// included.
    pub driver: Option<Bytes>,
    /// Bytes predicted, and given out by the blank driver, in the last epoch, if kernels had to be
    /// tuned before it.
    pub tuned: Option<Compared>,
    /// The largest page for small buffers among the latest predictions.
    pub small_page: Bytes,
    /// Bytes that two iterations leave in use, if asked for: the model, the optimizer state and the
    /// batch.
    pub left: Option<Compared>,
}

/// Predicted and measured bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    pub predicted: Bytes,
    pub measured: Bytes,
}

const MARK: &str = "found:";

impl Found {
    /// The bytes to compare: what the blank driver gave out, or what the allocator of a real device
    /// has reserved. If kernels were tuned, the bytes of the plan made afterwards.
    pub fn counted(&self, is_blank: bool) -> Compared {
        let measured = self.driver.filter(|_| is_blank).unwrap_or(self.reserved);
        self.tuned.unwrap_or(Compared { predicted: self.predicted, measured })
    }

    /// The line that a process prints.
    pub fn line(&self) -> anyhow::Result<String> {
        Ok(format!("{MARK} {}", serde_json::to_string(self)?))
    }

    /// Parses that line.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.split(MARK).nth(1))?;
        serde_json::from_str(line).ok()
    }
}

/// Forgets the peak of earlier epochs when the last one begins.
fn last_epoch() -> impl FnMut(&TrainingProgress) + Send + Sync {
    let mut before = 0;
    move |item| {
        let epoch = item.global_progress.items_processed;
        if epoch == item.global_progress.items_total && before != epoch {
            machine::forget_peak();
        }
        before = epoch;
    }
}

fn dry_run<M: Subject>(items: usize) -> anyhow::Result<Bytes> {
    let trace = record::<Training, M>(items, &parts([items]), &Default::default());
    Ok(Dry::<Base>::new(properties()).replay(&trace)?.peak)
}

fn measure<M: Subject>(case: &Case, setup: Setup, left: bool) -> anyhow::Result<Found> {
    Training::seed(&Default::default(), SEED);
    // Creates the driver's context, which no prediction contains.
    Base::sync(&Default::default()).map_err(|error| anyhow::anyhow!("{error}"))?;
    let before = held_by_driver();
    let predictions = fit::<M>(case, setup)?;
    // Read before looking at the pools, because that creates every stream that does not exist yet.
    let driver = held_by_driver().zip(before).map(|(after, before)| after - before);
    let driver = machine::peak().or(driver).filter(|driver| *driver > Bytes::ZERO);
    let recent = machine::recent_peak();
    let reserved = held().reserved;
    let tuned = predictions.tuned.zip(recent);
    let tuned = tuned.map(|(predicted, measured)| Compared { predicted, measured });
    let left = if left { Some(step::<M>(case)?) } else { None };
    let Predictions { most: predicted, small_page, .. } = predictions;
    Ok(Found { predicted, reserved, driver, tuned, small_page, left })
}

/// Predicted needs of a training run.
struct Predictions {
    most: Bytes,
    /// The prediction after kernels were tuned, if any had to be.
    tuned: Option<Bytes>,
    /// The page for small buffers in the latest plans.
    small_page: Bytes,
}

/// Trains as a user does, with loader threads, metrics and checkpoints.
fn fit<M: Subject>(case: &Case, setup: Setup) -> anyhow::Result<Predictions> {
    let device = Default::default();
    let folder = tempfile::tempdir()?;
    let rest = if case.valid { case.items * 2 / 3 } else { 0 };
    // The number of batches is odd. burn gives workers whole batches, and a worker that has only
    // the smaller one would deliver it first.
    let batches = STEPS * setup.accumulate as usize + usize::from(case.valid);
    let valid_items = if case.valid { case.items + case.items / 3 } else { 0 };
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<Training, _, _>::new(Numbered::<M>::default())
        .batch_size(case.items)
        .shuffle(SEED)
        .num_workers(setup.workers as usize)
        .build(numbers(batches * case.items + rest));
    let valid = DataLoaderBuilder::<Valid, _, _>::new(Numbered::<M::Valid>::default())
        .batch_size(case.items)
        .num_workers(setup.workers as usize)
        .build(numbers(valid_items));
    let mut training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(OnOutput(last_epoch()))
        .num_epochs(setup.epochs());
    if !setup.no_checkpoints {
        training = training.with_file_checkpointer(CompactRecorder::new());
    }
    if setup.accumulate > 1 {
        training = training.grads_accumulation(setup.accumulate as usize);
    }
    let builder = Learner::builder().auto_batch().memory(BUDGET).quiet();
    let builder = builder.micro_batch(case.micro.unwrap_or(case.items));
    let model = M::new(&device);
    let learner = builder.build(model, AdamConfig::new().init(), 1e-3);
    let fitted = learner.fit(M::metrics(training)).map_err(|error| anyhow::anyhow!("{error}"))?;
    for plan in &fitted.plans {
        eprintln!("{}\n{plan}", plan.line());
    }
    let most = fitted.memory.context("no batch was trained on")?.predicted;
    // The latest plan of each size counts.
    let is_latest = |(at, plan): &(usize, &PlanReport)| {
        let later = &fitted.plans[at + 1..];
        let is_same = |other: &PlanReport| {
            (other.phase, other.plan.batch()) == (plan.phase, plan.plan.batch())
        };
        !later.iter().any(is_same)
    };
    let latest = fitted.plans.iter().enumerate().filter(is_latest);
    let latest: Vec<_> = latest.map(|(_, plan)| plan).collect();
    let small_page = latest.iter().map(|plan| plan.overhead.small_page).max().unwrap_or_default();
    // firebox's own pool has a page for each kind of buffer. Each is as large as in the plan that
    // needs the largest.
    let pools = latest.iter().filter_map(|plan| plan.paging.as_ref()?.pool);
    let pages = pools.reduce(|one, other| one.larger(&other)).map(|pages| pages.total());
    let latest = pages.or_else(|| latest.into_iter().map(PlanReport::predicted).max());
    let tuned = latest.filter(|_| fitted.plans.iter().any(PlanReport::tunes));
    Ok(Predictions { most, tuned, small_page })
}

/// Runs two iterations, on a device without memory and on the real one.
fn step<M: Subject>(case: &Case) -> anyhow::Result<Compared> {
    let device = Default::default();
    let micro = case.micro.unwrap_or(case.items);
    let starts = (0..case.items).step_by(micro);
    let parts = parts(starts.map(|start| micro.min(case.items - start)));
    let trace = record::<Training, M>(case.items, &parts, &device);
    let footprint = Dry::<Base>::new(properties()).replay(&trace)?;
    let last = footprint.timeline.last().context("nothing was recorded")?;
    let before = held().in_use;
    let numbers: Vec<usize> = (0..case.items).collect();
    let batch = M::batch(&numbers, &device);
    let trained = train::<Training, M>(M::new(&device), &batch, &parts);
    let measured = held().in_use - before;
    drop((trained, batch));
    Ok(Compared { predicted: last.live, measured })
}
