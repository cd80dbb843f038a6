//! A custom training loop within a memory budget: two optimizers, one for the body of a
//! classifier and one for its head, which learns to tell two spirals apart.
//!
//! ```text
//! cargo run --release --example custom-loop
//! cargo run --release --example custom-loop -- --memory 6MiB
//! ```
//!
//! The last line is for scripts. The measured peak is the peak of the heap above its level before
//! the model was built.

use anyhow::Context;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Gelu, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use clap::Parser;
use firebox::{Budget, Bytes, Lazy, Learner, MicroBatch, WeightedGradients};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;

/// Train with a loop and two optimizers of your own within a memory budget.
#[derive(Parser)]
struct Options {
    /// Memory that training may use: an amount (6MiB), a share of all memory (50%), or `free`.
    #[arg(long, default_value = "6MiB")]
    memory: Budget,
    /// Passes over the 8,192 points.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Points per optimizer step.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
}

/// A point and the spiral it lies on.
type Point = ([f32; 2], i32);

/// `count` points on two spirals.
fn spirals(count: usize) -> Vec<Point> {
    let point = |i: usize| {
        // Spread evenly, in no order that the class could be read from.
        let along = (i as f32 * 0.618_034).fract();
        let (angle, class) = (1.0 + along * 7.0, (i % 2) as i32);
        let turned = angle + class as f32 * std::f32::consts::PI;
        ([turned.cos() * angle / 8.0, turned.sin() * angle / 8.0], class)
    };
    (0..count).map(point).collect()
}

#[derive(Clone, Debug, MicroBatch)]
struct Points<B: Backend> {
    /// `[items, 2]`
    places: Tensor<B, 2>,
    /// `[items]`
    classes: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct PointBatcher;

impl<B: Backend> Batcher<B, Point, Points<B>> for PointBatcher {
    fn batch(&self, points: Vec<Point>, device: &B::Device) -> Points<B> {
        let (places, classes): (Vec<_>, Vec<_>) = points.into_iter().unzip();
        let count = places.len();
        let places = TensorData::new(places.into_iter().flatten().collect(), [count, 2]);
        Points {
            places: Tensor::from_data(places, device),
            classes: Tensor::from_data(TensorData::new(classes, [count]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Body<B: Backend> {
    layers: Vec<Linear<B>>,
    gelu: Gelu,
}

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    body: Body<B>,
    head: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &B::Device) -> Self {
        let sizes = [2, 128, 128, 128];
        let layer = |sizes: &[usize]| LinearConfig::new(sizes[0], sizes[1]).init(device);
        let body = Body { layers: sizes.windows(2).map(layer).collect(), gelu: Gelu::new() };
        Self { body, head: LinearConfig::new(128, 2).init(device) }
    }

    /// Maps places `[items, 2]` to logits `[items, 2]`.
    fn forward(&self, places: Tensor<B, 2>) -> Tensor<B, 2> {
        let layers = self.body.layers.iter();
        self.head.forward(layers.fold(places, |x, layer| self.body.gelu.forward(layer.forward(x))))
    }
}

/// The optimizers of the two parts.
#[derive(Clone)]
struct Optimizers<B, H> {
    body: B,
    head: H,
}

/// What a micro-batch tells: the gradients of the two parts, and the loss.
struct Learned<B: AutodiffBackend> {
    body: GradientsParams,
    head: GradientsParams,
    loss: Tensor<B::InnerBackend, 1>,
}

fn learn<B: AutodiffBackend>(model: &Classifier<B>, points: Points<B>) -> Learned<B> {
    let logits = model.forward(points.places);
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    let loss = loss.forward(logits, points.classes);
    let mut grads = loss.backward();
    Learned {
        body: GradientsParams::from_module(&mut grads, &model.body),
        head: GradientsParams::from_module(&mut grads, &model.head),
        loss: loss.inner(),
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();

    let device = Default::default();
    B::seed(&device, 1);
    let mut model = Classifier::<B>::new(&device);
    let mut optim = Optimizers {
        body: AdamWConfig::new().init(),
        head: SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
    };
    let loader = DataLoaderBuilder::new(PointBatcher)
        .batch_size(options.batch_size as usize)
        .shuffle(1)
        .num_workers(1)
        .build(InMemDataset::new(spirals(8192)));

    let mut steps = Learner::builder().auto_batch().memory(options.memory).step_planner(&model)?;
    for epoch in 1..=options.epochs {
        let (mut sum, mut items) = (0.0, 0.0);
        for batch in steps.batches(&*loader) {
            let loss = steps.step(&mut model, &mut optim, &batch, |model, optim, parts| {
                let mut body = WeightedGradients::mean(parts.weight());
                let mut head = WeightedGradients::mean(parts.weight());
                let mut losses = Vec::new();
                parts.each(model, learn, |model, learned, weight| {
                    body.add(&model.body, learned.body, weight);
                    head.add(&model.head, learned.head, weight);
                    losses.push((learned.loss, weight));
                })?;
                let (body, head) = (body.finish(&model.body), head.finish(&model.head));
                parts.update(model, |model| {
                    model.body = optim.body.step(2e-3, model.body.clone(), body);
                    model.head = optim.head.step(2e-2, model.head.clone(), head);
                })?;
                Ok(losses)
            })?;
            for (loss, weight) in loss {
                sum += f64::from(loss.into_scalar()) * weight;
                items += weight;
            }
        }
        if epoch % 10 == 0 || epoch == options.epochs {
            println!("epoch {epoch}/{}: loss {:.4}", options.epochs, sum / items);
        }
    }

    let plan = steps.plans().first().context("a batch was trained on")?.plan.clone();
    let (budget, predicted) = (steps.budget(), steps.memory().predicted);
    drop(steps);
    let measured = Bytes::new((HEAP.peak_usage() - before) as u64);

    let points = PointBatcher.batch(spirals(2000), &device);
    let guessed = model.valid().forward(points.places).argmax(1).squeeze_dim::<1>(1);
    let right: i32 = guessed.equal(points.classes).int().sum().into_scalar();
    println!(
        "result: accuracy={:.3} batch={} micro_batches={} budget={} predicted={} measured={}",
        f64::from(right) / 2000.0,
        options.batch_size,
        plan.len(),
        budget.get(),
        predicted.get(),
        measured.get()
    );
    Ok(())
}
