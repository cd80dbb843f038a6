//! What a process of its own does: one training run as a user writes it, and what it held on the device.

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
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, LearningComponentsMarker, SupervisedTraining, TrainStep};
use firebox::{Bytes, Learner};
use firebox_dry::Dry;

use crate::cases::Case;
use crate::target::{Base, Training, held, held_by_driver, properties};
use crate::zoo::iterations::{parts, record, train};
use crate::zoo::{self, Numbered, Zoo};

/// Optimizer steps an epoch on whole batches.
const STEPS: usize = 2;
/// More than any case needs: batches are split as the case says.
const BUDGET: Bytes = Bytes::gib(64);
const SEED: u64 = 7;

/// How a case is trained.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Setup {
    /// Epochs of two optimizer steps each.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Threads of the data loader; with none, batches are made where they are used.
    #[arg(long, default_value_t = 2)]
    workers: u64,
    /// How many batches of the loader an optimizer step has (burn's `grads_accumulation`).
    #[arg(long, value_name = "BATCHES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulate: u64,
    /// Trains without a checkpointer.
    #[arg(long)]
    no_checkpoints: bool,
}

impl Setup {
    /// The arguments that say the same to another process.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--epochs", self.epochs),
            ("--workers", self.workers),
            ("--accumulate", self.accumulate),
        ];
        let numbers = numbers.map(|(name, number)| [name.to_owned(), number.to_string()]);
        let flag = self.no_checkpoints.then(|| "--no-checkpoints".to_owned());
        numbers.into_iter().flatten().chain(flag).collect()
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

        /// Runs a case in this process, and two more iterations if what they leave is asked for.
        pub fn run(case: &Case, setup: Setup, left: bool) -> anyhow::Result<Found> {
            match case.model {
                $($name => measure::<zoo::$model<Training>>(case, setup, left),)*
                other => bail!("there is no model `{other}`; `--list` names the cases of all"),
            }
        }

        /// What two iterations of a model on batches of so many items reserve on the device's twin without memory.
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

/// What a process found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What the Learner predicted.
    pub predicted: Bytes,
    /// What the process had reserved after training.
    pub reserved: Bytes,
    /// Growth of the process's memory in training, as the driver tells it, if it does: compiled kernels included.
    pub driver: Option<Bytes>,
    /// What two iterations leave alive, if that was asked for.
    pub left: Option<Left>,
}

/// What is in use after two iterations: the model, the optimizer's state and the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub predicted: Bytes,
    pub measured: Bytes,
}

const MARK: &str = "found:";
const UNKNOWN: &str = "-";

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MARK} {} {}", self.predicted.get(), self.reserved.get())?;
        match self.driver {
            Some(driver) => write!(f, " {}", driver.get())?,
            None => write!(f, " {UNKNOWN}")?,
        }
        match self.left {
            Some(left) => write!(f, " {} {}", left.predicted.get(), left.measured.get()),
            None => Ok(()),
        }
    }
}

impl Found {
    /// Reads the line that a process printed.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.split(MARK).nth(1))?;
        let number = |word: &str| word.parse().ok().map(Bytes::new);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (predicted, reserved, driver, left) = match words[..] {
            [predicted, reserved, driver] => (predicted, reserved, driver, None),
            [predicted, reserved, driver, left, measured] => {
                let left = Left { predicted: number(left)?, measured: number(measured)? };
                (predicted, reserved, driver, Some(left))
            }
            _ => return None,
        };
        let driver = if driver == UNKNOWN { None } else { Some(number(driver)?) };
        Some(Self { predicted: number(predicted)?, reserved: number(reserved)?, driver, left })
    }
}

fn dry_run<M: Subject>(items: usize) -> anyhow::Result<Bytes> {
    let trace = record::<Training, M>(items, &parts([items]), &Default::default());
    Ok(Dry::<Base>::new(properties()).replay(&trace)?.peak)
}

fn measure<M: Subject>(case: &Case, setup: Setup, left: bool) -> anyhow::Result<Found> {
    Training::seed(&Default::default(), SEED);
    // This makes the driver's context, which no prediction contains.
    Base::sync(&Default::default()).map_err(|error| anyhow::anyhow!("{error}"))?;
    let before = held_by_driver();
    let predicted = fit::<M>(case, setup)?;
    // Before the look at the pools, which makes every stream that there is not yet.
    let driver = held_by_driver().zip(before).map(|(after, before)| after - before);
    let driver = driver.filter(|driver| *driver > Bytes::ZERO);
    let reserved = held().reserved;
    let left = if left { Some(step::<M>(case)?) } else { None };
    Ok(Found { predicted, reserved, driver, left })
}

/// Trains as a user does, with loader threads, metrics and checkpoints; gives the predicted bytes.
fn fit<M: Subject>(case: &Case, setup: Setup) -> anyhow::Result<Bytes> {
    let device = Default::default();
    let folder = tempfile::tempdir()?;
    let rest = if case.valid { case.items * 2 / 3 } else { 0 };
    // An odd number: burn gives a worker whole batches, and a worker that has the smaller one alone would bring it first.
    let batches = STEPS * setup.accumulate as usize + usize::from(case.valid);
    let valid_items = if case.valid { case.items + case.items / 3 } else { 0 };
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<Training, _, _>::new(Numbered::<M>::new())
        .batch_size(case.items)
        .shuffle(SEED)
        .num_workers(setup.workers as usize)
        .build(numbers(batches * case.items + rest));
    let valid = DataLoaderBuilder::<Valid, _, _>::new(Numbered::<M::Valid>::new())
        .batch_size(case.items)
        .num_workers(setup.workers as usize)
        .build(numbers(valid_items));
    let mut training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(setup.epochs as usize);
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
        eprintln!("{}", plan.line());
    }
    Ok(fitted.memory.context("no batch was trained on")?.predicted)
}

/// Runs two iterations, on a device without memory and on the real one.
fn step<M: Subject>(case: &Case) -> anyhow::Result<Left> {
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
    Ok(Left { predicted: last.live, measured })
}
