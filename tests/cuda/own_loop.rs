//! Tests a training loop of the user's own: two networks take turns, each with an optimizer of its
//! own. What the driver gives out is compared with the prediction.

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::activation::softplus;
use burn::tensor::backend::AutodiffBackend;
use firebox::{Bytes, Lazy, Learner, MicroBatch, TrainError, WeightedGradients};
use libtest_mimic::{Failed, Trial};

use crate::child::{Base, Ended, Job, Pools};
use crate::trial::{CARD, LIMIT, ensure, only, run_with, test};

type B<C> = Autodiff<Lazy<C>>;

const NOISE: usize = 64;
const WIDTH: usize = 256;

#[derive(Clone, Debug, MicroBatch)]
struct Pairs<B: Backend> {
    real: Tensor<B, 2>,
    noise: Tensor<B, 2>,
}

#[derive(Clone)]
struct Numbers;

impl<B: Backend> Batcher<B, usize, Pairs<B>> for Numbers {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Pairs<B> {
        let rows = |width: usize| {
            let numbers = items.iter().flat_map(|item| (0..width).map(move |i| (item + i) as f32));
            TensorData::new(numbers.collect(), [items.len(), width])
        };
        Pairs {
            real: Tensor::from_data(rows(NOISE), device),
            noise: Tensor::from_data(rows(NOISE), device),
        }
    }
}

#[derive(Module, Debug)]
struct Network<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Network<B> {
    fn new(outputs: usize, device: &B::Device) -> Self {
        let sizes = [NOISE, WIDTH, WIDTH, outputs];
        let layer = |sizes: &[usize]| LinearConfig::new(sizes[0], sizes[1]).init(device);
        Self { layers: sizes.windows(2).map(layer).collect() }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
struct Gan<B: Backend> {
    generator: Network<B>,
    discriminator: Network<B>,
}

impl<B: AutodiffBackend> Gan<B> {
    fn discriminator_gradient(&self, batch: Pairs<B>) -> GradientsParams {
        let generated = self.generator.valid().forward(batch.noise.inner());
        let fake = self.discriminator.forward(Tensor::from_inner(generated));
        let real = self.discriminator.forward(batch.real);
        let loss = softplus(fake, 1.0).mean() + softplus(-real, 1.0).mean();
        GradientsParams::from_grads(loss.backward(), &self.discriminator)
    }

    fn generator_gradient(&self, batch: Pairs<B>) -> GradientsParams {
        let fake = self.discriminator.forward(self.generator.forward(batch.noise));
        GradientsParams::from_grads(softplus(-fake, 1.0).mean().backward(), &self.generator)
    }
}

/// Trains for the job's epochs. Its last batch has another size than the others.
pub fn train<C: Base>(job: &Job) -> Result<Ended, TrainError> {
    let device = Default::default();
    let mut gan = Gan::<B<C>> {
        generator: Network::new(NOISE, &device),
        discriminator: Network::new(1, &device),
    };
    let mut optims = (AdamConfig::new().init(), AdamConfig::new().init());
    let items = job.batches * job.items + job.items / 2 + 1;
    let loader = DataLoaderBuilder::<B<C>, _, _>::new(Numbers)
        .batch_size(job.items)
        .num_workers(job.workers)
        .build(InMemDataset::new((0..items).collect()));
    let mut builder = Learner::builder().auto_batch().quiet();
    builder = builder.memory(job.memory.unwrap_or(Bytes::gib(2)));
    if let Some(items) = job.micro_batch {
        builder = builder.micro_batch(items);
    }
    let mut steps = builder.step_planner(&gan)?;
    for _ in 0..job.epochs {
        for batch in steps.batches(&*loader) {
            steps.step(&mut gan, &mut optims, &batch, |gan, optims, parts| {
                let mut sum = WeightedGradients::mean(parts.weight());
                parts.each(gan, Gan::discriminator_gradient, |gan, grads, weight| {
                    sum.add(&gan.discriminator, grads, weight);
                })?;
                let grads = sum.finish(&gan.discriminator);
                parts.update(gan, |gan| {
                    let network = gan.discriminator.clone();
                    gan.discriminator = optims.0.step(1e-3, network, grads);
                })?;
                let mut sum = WeightedGradients::mean(parts.weight());
                parts.each(gan, Gan::generator_gradient, |gan, grads, weight| {
                    sum.add(&gan.generator, grads, weight);
                })?;
                let grads = sum.finish(&gan.generator);
                parts.update(gan, |gan| {
                    gan.generator = optims.1.step(1e-3, gan.generator.clone(), grads);
                })
            })?;
        }
    }
    let memory = steps.memory();
    let plans = steps.plans().iter().map(|plan| plan.plan.to_string());
    Ok(Ended {
        predicted: Some(memory.predicted),
        measured: memory.measured,
        plan: Some(plans.collect::<Vec<_>>().join(", ")),
        ..Ended::default()
    })
}

fn compare(pools: Pools, items: usize, micro_batch: Option<usize>) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let job = Job { pools, micro_batch, ..Job::new("own-loop", items, kernels.path().to_owned()) };
    // The first run tunes.
    run_with(&only(CARD), &job, LIMIT * 6, |_, _| ())?.fitted()?;
    let left = run_with(&only(CARD), &job, LIMIT * 2, |_, _| ())?;
    let ended = left.fitted()?;
    let books = left.books.as_ref().ok_or("the child kept no books")?;
    ensure(books.device(0).launches() > 0 && books.device(0).refused() == 0, || {
        left.complaint("nothing was launched")
    })?;
    let ratio = ended.predicted.unwrap_or_default().ratio(left.peak());
    let plan = ended.plan.clone().unwrap_or_default();
    println!("own loop, {plan}: predicted {ratio:.4} of the {} that the driver gave", left.peak());
    let accuracy = match pools {
        Pools::Burns => 0.99..=1.15,
        Pools::Ours => 1.0..=1.0,
    };
    ensure(accuracy.contains(&ratio), || left.complaint(&format!("{ratio:.4} was predicted")))
}

/// The tests.
pub fn tests() -> Vec<Trial> {
    let cases = [(Pools::Burns, None), (Pools::Ours, None), (Pools::Ours, Some(700))];
    let trial = |(pools, micro_batch): (Pools, Option<usize>)| {
        let split = if micro_batch.is_some() { "_in_micro_batches" } else { "" };
        let name = format!("an_own_loop_is_predicted{split}{}", pools.suffix());
        // The other two tell less, and tuning takes half a minute each.
        let is_usual = micro_batch.is_some();
        test(name, move || compare(pools, 2000, micro_batch)).with_ignored_flag(!is_usual)
    };
    cases.map(trial).into_iter().collect()
}
