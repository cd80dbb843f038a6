//! A generative adversarial network within a memory budget: a discriminator and a generator, each
//! with its own optimizer, take turns on every batch. The generator learns eight spots on a circle.
//!
//! ```text
//! cargo run --release --example gan
//! cargo run --release --example gan -- --memory 6MiB
//! ```
//!
//! The last line is for scripts: the share of generated points that lie close to a spot, and how
//! many of the spots they reach.

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::{leaky_relu, softplus};
use burn::tensor::backend::AutodiffBackend;
use clap::Parser;
use firebox::{Budget, Bytes, Lazy, Learner, MicroBatch, WeightedGradients};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// Train a generator and a discriminator within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (6MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "6MiB")]
    memory: Budget,
    /// Steps of both networks.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Points per step.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
}

/// Size of the noise that the generator turns into a point.
const NOISE: usize = 16;
const SPOTS: usize = 8;
/// Standard deviation of the points around a spot, on a circle of radius one.
const WIDTH: f64 = 0.05;

/// Real points, and noise for as many generated ones.
#[derive(Clone, Debug, MicroBatch)]
struct Batch<B: Backend> {
    /// `[items, 2]`
    real: Tensor<B, 2>,
    /// `[items, NOISE]`
    noise: Tensor<B, 2>,
}

/// The places of the spots.
fn spots() -> [[f32; 2]; SPOTS] {
    std::array::from_fn(|i| {
        let angle = i as f32 * std::f32::consts::TAU / SPOTS as f32;
        [angle.cos(), angle.sin()]
    })
}

fn batch<B: Backend>(items: usize, device: &B::Device) -> Batch<B> {
    let spots = spots();
    let places: Vec<f32> = (0..items).flat_map(|i| spots[i % SPOTS]).collect();
    let places = Tensor::from_data(TensorData::new(places, [items, 2]), device);
    let around = Tensor::random([items, 2], Distribution::Normal(0.0, WIDTH), device);
    let noise = Tensor::random([items, NOISE], Distribution::Normal(0.0, 1.0), device);
    Batch { real: places + around, noise }
}

/// A network of three layers.
#[derive(Module, Debug)]
struct Network<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Network<B> {
    fn new(sizes: [usize; 4], device: &B::Device) -> Self {
        let layer = |sizes: &[usize]| LinearConfig::new(sizes[0], sizes[1]).init(device);
        Self { layers: sizes.windows(2).map(layer).collect() }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let last = self.layers.len() - 1;
        self.layers.iter().enumerate().fold(x, |x, (i, layer)| match i {
            i if i == last => layer.forward(x),
            _ => leaky_relu(layer.forward(x), 0.2),
        })
    }
}

#[derive(Module, Debug)]
struct Gan<B: Backend> {
    generator: Network<B>,
    discriminator: Network<B>,
}

impl<B: AutodiffBackend> Gan<B> {
    /// The discriminator's gradient: real points should score high, generated ones low.
    fn discriminator_gradient(&self, batch: Batch<B>) -> GradientsParams {
        // Without automatic differentiation: the generator does not learn here.
        let generated = self.generator.valid().forward(batch.noise.inner());
        let fake = self.discriminator.forward(Tensor::from_inner(generated));
        let real = self.discriminator.forward(batch.real);
        let loss = softplus(fake, 1.0).mean() + softplus(-real, 1.0).mean();
        GradientsParams::from_grads(loss.backward(), &self.discriminator)
    }

    /// The generator's gradient: generated points should score high.
    fn generator_gradient(&self, batch: Batch<B>) -> GradientsParams {
        let fake = self.discriminator.forward(self.generator.forward(batch.noise));
        let loss = softplus(-fake, 1.0).mean();
        GradientsParams::from_grads(loss.backward(), &self.generator)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();

    let device = Default::default();
    B::seed(&device, 3);
    let mut gan = Gan::<B> {
        generator: Network::new([NOISE, 128, 128, 2], &device),
        discriminator: Network::new([2, 128, 128, 1], &device),
    };
    let adam = || AdamConfig::new().with_beta_1(0.5);
    let mut optims = (adam().init(), adam().init());

    let mut steps = Learner::builder().auto_batch().memory(options.memory).step_planner(&gan)?;
    for step in 1..=options.steps {
        let batch = batch::<B>(options.batch_size as usize, &device);
        steps.step(
            &mut gan,
            &mut optims,
            &batch,
            |gan, (of_generator, of_discriminator), parts| {
                let mut sum = WeightedGradients::mean(parts.weight());
                parts.each(gan, Gan::discriminator_gradient, |gan, grads, weight| {
                    sum.add(&gan.discriminator, grads, weight);
                })?;
                let grads = sum.finish(&gan.discriminator);
                parts.update(gan, |gan| {
                    let network = gan.discriminator.clone();
                    gan.discriminator = of_discriminator.step(1e-3, network, grads);
                })?;

                let mut sum = WeightedGradients::mean(parts.weight());
                parts.each(gan, Gan::generator_gradient, |gan, grads, weight| {
                    sum.add(&gan.generator, grads, weight);
                })?;
                let grads = sum.finish(&gan.generator);
                parts.update(gan, |gan| {
                    gan.generator = of_generator.step(1e-3, gan.generator.clone(), grads);
                })
            },
        )?;
        if step % 500 == 0 {
            println!("step {step}/{}", options.steps);
        }
    }

    let plan = steps.plans().first().context("a batch was trained on")?.plan.clone();
    let (budget, predicted) = (steps.budget(), steps.memory().predicted);
    drop(steps);
    let measured = Bytes::new((HEAP.peak_usage() - before) as u64);

    let (close, reached) = judge(&gan.generator.valid(), &device);
    println!(
        "result: close={close:.3} spots={reached} batch={} micro_batches={} budget={} predicted={} measured={}",
        options.batch_size,
        plan.len(),
        budget.get(),
        predicted.get(),
        measured.get()
    );
    Ok(())
}

/// The share of 2,000 generated points that lie within four widths of a spot, and how many spots
/// have at least 20 of them.
fn judge<B: Backend>(generator: &Network<B>, device: &B::Device) -> (f64, usize) {
    const POINTS: usize = 2000;
    let noise = Tensor::random([POINTS, NOISE], Distribution::Normal(0.0, 1.0), device);
    let points: Vec<f32> = generator.forward(noise).into_data().iter::<f32>().collect();
    let mut near = [0; SPOTS];
    for point in points.chunks(2) {
        let distance = |spot: &[f32; 2]| (point[0] - spot[0]).hypot(point[1] - spot[1]);
        if let Some(spot) = spots().iter().position(|spot| distance(spot) < 4.0 * WIDTH as f32) {
            near[spot] += 1;
        }
    }
    let close = near.iter().sum::<usize>() as f64 / POINTS as f64;
    (close, near.iter().filter(|count| **count >= 20).count())
}
