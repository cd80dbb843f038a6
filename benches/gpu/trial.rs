//! Runs one training with the Learner in a child process and reports the memory it took.

use std::fmt::{Debug, Display};
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, LearningComponentsMarker, SupervisedTraining, TrainStep};
use clap::Args;
use firebox::{
    Budget, Bytes, Fitted, Half, Lazy, LazyBackend, Learner, MicroBatch, Park, RecomputePolicy,
};
use firebox_testing::bench::renderer::BatchEnds;
use firebox_testing::full_size::cnn::Cnn;
use firebox_testing::full_size::gpt::Gpt;

use crate::model::{self, FromNumbers, Subject};
use crate::real::{self, Device, Real};

type Decorated = Autodiff<Lazy<Real>>;
type Narrow = Autodiff<Half<Lazy<Real>>>;
type Plain = Autodiff<real::Plain>;
type Training<B, M> = SupervisedTraining<
    LearningComponentsMarker<B, f64, M, OptimizerAdaptor<burn::optim::Adam, M, B>>,
>;

/// More memory than there is: only what is measured says what fits.
pub const NO_LIMIT: Budget = Budget::Bytes(Bytes::gib(1 << 20));

/// Printed by a trial whose training ended normally although the device had failed.
pub const UNNOTICED: &str = "the device failed, and training did not notice";

/// Training with Adam, in micro-batches of a given size or as planned.
#[derive(Args, Clone, Copy, Debug)]
pub struct Trial {
    /// The model.
    #[arg(long)]
    pub model: Subject,
    /// Items in a batch.
    #[arg(long)]
    pub batch: usize,
    /// Items in a micro-batch. Default: as planned.
    #[arg(long)]
    pub micro_batch: Option<usize>,
    /// Budget of the plan.
    #[arg(long)]
    pub memory: Budget,
    /// Plans without training.
    #[arg(long)]
    pub plan_only: bool,
    /// Also times a step, over this many batches.
    #[arg(long, default_value_t = 0)]
    pub timed: usize,
    /// Lets the plan recompute.
    #[arg(long)]
    pub recompute: bool,
    /// Parks the optimizer's state in host memory.
    #[arg(long)]
    pub park: bool,
    /// Trains in 16 bit.
    #[arg(long, conflicts_with = "plain")]
    pub half: bool,
    /// Trains with burn's own learner on burn's own backend.
    #[arg(long)]
    pub plain: bool,
}

impl Trial {
    /// Two batches, within a budget.
    pub fn new(model: Subject, batch: usize, memory: Budget) -> Self {
        Self {
            model,
            batch,
            micro_batch: None,
            memory,
            plan_only: false,
            timed: 0,
            recompute: false,
            park: false,
            half: false,
            plain: false,
        }
    }

    /// Arguments that start this trial.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["trial".to_owned(), "--model".into(), self.model.name()];
        arguments.extend(["--batch".into(), self.batch.to_string()]);
        arguments.extend(["--memory".into(), self.memory.to_string()]);
        arguments.extend(["--timed".into(), self.timed.to_string()]);
        if let Some(items) = self.micro_batch {
            arguments.extend(["--micro-batch".into(), items.to_string()]);
        }
        let flags = [
            (self.plan_only, "--plan-only"),
            (self.recompute, "--recompute"),
            (self.park, "--park"),
            (self.half, "--half"),
            (self.plain, "--plain"),
        ];
        arguments.extend(flags.iter().filter(|(set, _)| *set).map(|(_, name)| (*name).to_owned()));
        arguments
    }

    /// Trains in this process and prints a line that begins with `measured:`.
    pub fn run(&self) -> anyhow::Result<()> {
        let device = Device::default();
        // Creates the context and the first kernel before anything is counted.
        Tensor::<Real, 1>::zeros([1], &device).into_data();
        match (self.model, self.half, self.plain) {
            (Subject::Cnn, _, true) => self.train_plain::<Cnn<Plain>, _>(model::cnn, &device),
            (gpt, _, true) => self.train_plain(|device| model::gpt::<Plain>(gpt, device), &device),
            (Subject::Cnn, false, _) => self.train::<Decorated, Cnn<_>, _>(model::cnn, &device),
            (Subject::Cnn, true, _) => self.train::<Narrow, Cnn<_>, _>(model::cnn, &device),
            (gpt, false, _) => {
                self.train::<Decorated, Gpt<_>, _>(|device| model::gpt(gpt, device), &device)
            }
            (gpt, true, _) => {
                self.train::<Narrow, Gpt<_>, _>(|device| model::gpt(gpt, device), &device)
            }
        }
    }

    /// Training on two batches, and on those that are timed.
    fn training<B, M>(&self, folder: &std::path::Path, ends: &BatchEnds) -> Training<B, M>
    where
        B: AutodiffBackend<Device = Device>,
        M: TrainStep + AutodiffModule<B> + Display + 'static,
        M::InnerModule: InferenceStep,
        M::Input: Clone + Debug + Send + 'static,
        <M::InnerModule as InferenceStep>::Input: Clone + Debug + Send + 'static,
        FromNumbers: Batcher<B, usize, M::Input>
            + Batcher<B::InnerBackend, usize, <M::InnerModule as InferenceStep>::Input>,
    {
        let numbers = |items: usize| InMemDataset::new((0..items).collect::<Vec<usize>>());
        SupervisedTraining::new(
            folder,
            DataLoaderBuilder::new(FromNumbers)
                .batch_size(self.batch)
                .build(numbers((2 + self.timed) * self.batch)),
            DataLoaderBuilder::new(FromNumbers).batch_size(1).build(numbers(1)),
        )
        .with_application_logger(None)
        .renderer(ends.renderer())
        .num_epochs(1)
    }

    fn train_plain<M, I>(&self, model: impl Fn(&Device) -> M, device: &Device) -> anyhow::Result<()>
    where
        M: TrainStep<Input = I> + AutodiffModule<Plain> + Display + 'static,
        M::InnerModule: InferenceStep,
        <M::InnerModule as InferenceStep>::Input: Clone + Debug + Send + 'static,
        FromNumbers: Batcher<Plain, usize, I>
            + Batcher<real::Plain, usize, <M::InnerModule as InferenceStep>::Input>,
        I: Clone + Debug + Send + 'static,
    {
        let (folder, ends) = (tempfile::tempdir()?, BatchEnds::default());
        let training = self.training::<Plain, M>(folder.path(), &ends);
        let adam = AdamConfig::new().init();
        training.launch(burn::train::Learner::new(model(device), adam, 1e-4));
        sync(device)?;
        println!("measured: step_us={}", median(&ends).as_micros());
        Ok(())
    }

    fn train<B, M, I>(&self, model: impl Fn(&Device) -> M, device: &Device) -> anyhow::Result<()>
    where
        B: AutodiffBackend<Device = Device> + LazyBackend<Base = Real>,
        B::InnerBackend: LazyBackend<Base = Real>,
        M: TrainStep<Input = I> + AutodiffModule<B> + Display + 'static,
        M::InnerModule: InferenceStep,
        <M::InnerModule as InferenceStep>::Input: MicroBatch + Clone + Debug + Send + 'static,
        FromNumbers: Batcher<B, usize, I>
            + Batcher<B::InnerBackend, usize, <M::InnerModule as InferenceStep>::Input>,
        I: MicroBatch + Clone + Debug + Send + 'static,
    {
        // By default what fits as it is.
        let policy = match self.recompute {
            true => RecomputePolicy::if_needed().at_most(1.0),
            false => RecomputePolicy::never(),
        };
        let learner = || {
            let mut builder = Learner::builder().auto_batch().memory(self.memory).recompute(policy);
            if let Some(items) = self.micro_batch {
                builder = builder.micro_batch(items);
            }
            if self.park {
                builder = builder.park_optimizer(Park::Host);
            }
            builder.build(model(device), AdamConfig::new().init(), 1e-4)
        };
        if self.plan_only {
            let batch: I = FromNumbers.batch((0..self.batch).collect(), device);
            let report = learner().plan(&batch)?;
            let (micro_batch, predicted) = (report.micro_batch(), report.predicted());
            println!("planned: micro_batch={micro_batch} predicted={}", predicted.get());
            return Ok(());
        }
        let (folder, ends) = (tempfile::tempdir()?, BatchEnds::default());
        let fitted: Fitted<M::InnerModule> =
            learner().fit(self.training::<B, M>(folder.path(), &ends))?;
        sync(device)?;
        let report = fitted.report.as_ref();
        let (micro_batch, predicted) =
            report.map_or((0, Bytes::ZERO), |report| (report.micro_batch(), report.predicted()));
        let slower = report.and_then(|report| report.recomputed.as_ref());
        let slower = slower.map_or(0, |recomputing| (recomputing.overhead * 1e4) as u64);
        let (most, reserved) = match &fitted.memory {
            Some(memory) => (memory.predicted, memory.measured),
            None => (Bytes::ZERO, None),
        };
        println!(
            "measured: micro_batch={micro_batch} predicted={} most={} reserved={} slower={slower} step_us={}",
            predicted.get(),
            most.get(),
            number(reserved),
            median(&ends).as_micros(),
        );
        Ok(())
    }
}

/// The median time from one batch to the next, from the third on: the first ones compile, tune and
/// are planned.
fn median(ends: &BatchEnds) -> Duration {
    let ends: Vec<Instant> = ends.get().into_iter().skip(2).collect();
    let mut times: Vec<Duration> = ends.windows(2).map(|two| two[1] - two[0]).collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn sync(device: &Device) -> anyhow::Result<()> {
    Real::sync(device).map_err(|error| anyhow::anyhow!("{UNNOTICED}: {error:?}"))?;
    real::Plain::sync(device).map_err(|error| anyhow::anyhow!("{UNNOTICED}: {error:?}"))
}

fn number(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| "-".into(), |bytes| bytes.get().to_string())
}
