//! Runs one training with the Learner in a child process and reports the memory it took.

use std::fmt::{Debug, Display};

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use clap::Args;
use firebox::{Budget, Bytes, Lazy, Learner, MicroBatch, RecomputePolicy};

use crate::model::{self, FromNumbers, Subject};
use crate::real::{self, Device, Real};

type B = Autodiff<Lazy<Real>>;

/// Printed by a trial whose training ended normally although the device had failed.
pub const UNNOTICED: &str = "the device failed, and training did not notice";

/// Two batches of training, in micro-batches of a given size or as planned.
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
}

impl Trial {
    /// Arguments that start this trial.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["trial".to_owned(), "--model".into(), self.model.name()];
        arguments.extend(["--batch".into(), self.batch.to_string()]);
        arguments.extend(["--memory".into(), self.memory.to_string()]);
        if let Some(items) = self.micro_batch {
            arguments.extend(["--micro-batch".into(), items.to_string()]);
        }
        if self.plan_only {
            arguments.push("--plan-only".into());
        }
        arguments
    }

    /// Trains in this process and prints a line that begins with `measured:`.
    pub fn run(&self) -> anyhow::Result<()> {
        let device = Device::default();
        match self.model {
            Subject::Cnn => self.train(model::cnn::<B>(&device), &device),
            gpt => self.train(model::gpt::<B>(gpt, &device), &device),
        }
    }

    fn train<M, I>(&self, model: M, device: &Device) -> anyhow::Result<()>
    where
        M: TrainStep<Input = I> + AutodiffModule<B> + Display + 'static,
        M::InnerModule: InferenceStep,
        <M::InnerModule as InferenceStep>::Input: MicroBatch + Clone + Debug + Send + 'static,
        FromNumbers: Batcher<B, usize, I>
            + Batcher<Lazy<Real>, usize, <M::InnerModule as InferenceStep>::Input>,
        I: MicroBatch + Clone + Debug + Send + 'static,
    {
        // Creates the context and the first kernel before anything is counted.
        Tensor::<Real, 1>::zeros([1], device).into_data();
        let ready = real::driver_used();
        let numbers = |items: usize| InMemDataset::new((0..items).collect::<Vec<usize>>());
        let mut builder = Learner::builder().auto_batch().memory(self.memory);
        // What fits as it is.
        builder = builder.recompute(RecomputePolicy::never());
        if let Some(items) = self.micro_batch {
            builder = builder.micro_batch(items);
        }
        let learner = builder.build(model, AdamConfig::new().init(), 1e-4);
        if self.plan_only {
            let batch: I = FromNumbers.batch((0..self.batch).collect(), device);
            let report = learner.plan(&batch)?;
            let (micro_batch, predicted) = (report.micro_batch(), report.predicted());
            println!("planned: micro_batch={micro_batch} predicted={}", predicted.get());
            return Ok(());
        }
        let folder = tempfile::tempdir()?;
        let training = SupervisedTraining::new(
            folder.path(),
            DataLoaderBuilder::new(FromNumbers)
                .batch_size(self.batch)
                .build(numbers(2 * self.batch)),
            DataLoaderBuilder::new(FromNumbers).batch_size(1).build(numbers(1)),
        );
        let training = training
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let fitted = learner.fit(training)?;
        Real::sync(device).map_err(|error| anyhow::anyhow!("{UNNOTICED}: {error:?}"))?;
        let report = fitted.report.as_ref();
        let (micro_batch, predicted) =
            report.map_or((0, Bytes::ZERO), |report| (report.micro_batch(), report.predicted()));
        let grown = real::driver_used().zip(ready).map(|(now, ready)| now - ready);
        println!(
            "measured: micro_batch={micro_batch} predicted={} reserved={} driver={}",
            predicted.get(),
            number(real::reserved(device)),
            number(grown),
        );
        Ok(())
    }
}

fn number(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| "-".into(), |bytes| bytes.get().to_string())
}
