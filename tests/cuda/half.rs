//! Tests training in 16 bit: the driver gives out what was predicted, and less than in 32 bit.

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, Half, Lazy, Learner};
use firebox_testing::zoo::{Gpt, Numbered, Zoo as _};
use libtest_mimic::{Failed, Trial};

use crate::child::{Base, Ended, Job, Pools};
use crate::trial::{CARD, LIMIT, ensure, only, run_with, test};

type Sixteen<C> = Autodiff<Half<Lazy<C>>>;

/// Trains the GPT of the zoo in 16 bit.
pub fn train<C: Base>(job: &Job) -> Ended {
    let device = Default::default();
    let folder = tempfile::tempdir().expect("a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::new(Numbered::<Gpt<Sixteen<C>>>::default());
    let valid = DataLoaderBuilder::new(Numbered::<Gpt<Half<Lazy<C>>>>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(job.items).num_workers(job.workers).build(numbers(2 * job.items)),
        valid.batch_size(job.items).build(numbers(job.items)),
    );
    let training = training
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(job.epochs);
    let budget = job.memory.expect("a budget");
    let builder = Learner::builder().auto_batch().memory(budget).quiet();
    let model = Gpt::<Sixteen<C>>::new(&device);
    match builder.build(model, AdamConfig::new().init(), 1e-3).fit(training) {
        Ok(fitted) => Ended {
            predicted: fitted.memory.map(|memory| memory.predicted),
            measured: fitted.memory.and_then(|memory| memory.measured),
            plan: fitted.report.map(|report| report.plan.to_string()),
            ..Ended::default()
        },
        Err(error) => Ended::failed(error),
    }
}

fn counts(pools: Pools) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let items = 120;
    let job = |model| Job {
        pools,
        memory: Some(Bytes::gib(4)),
        validates: true,
        ..Job::new(model, items, kernels.path().to_owned())
    };
    let mut peaks = Vec::new();
    for model in ["gpt", "gpt-in-16-bit"] {
        // Until all kernels are chosen, more is counted.
        run_with(&only(CARD), &job(model), LIMIT * 6, |_, _| ())?.fitted()?;
        let left = run_with(&only(CARD), &job(model), LIMIT * 6, |_, _| ())?;
        let predicted = left.fitted()?.predicted.ok_or("nothing was predicted")?;
        let ratio = predicted.ratio(left.peak());
        println!("{model}: predicted {ratio:.4} of {}", left.peak());
        let accuracy = match pools {
            Pools::Burns => 0.99..=1.15,
            Pools::Ours => 1.0..=1.0,
        };
        ensure(accuracy.contains(&ratio), || left.complaint(&format!("{predicted} predicted")))?;
        peaks.push(left.peak());
    }
    ensure(peaks[1] < peaks[0].scale(0.8), || format!("{peaks:?} in 32 and in 16 bit").into())
}

/// The tests.
pub fn tests() -> Vec<Trial> {
    let tests = [Pools::Burns, Pools::Ours].map(|pools| {
        let name = format!("training_in_16_bit_is_predicted{}", pools.suffix());
        test(name, move || counts(pools)).with_ignored_flag(pools == Pools::Burns)
    });
    tests.into()
}
