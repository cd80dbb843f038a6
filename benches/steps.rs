//! What the Learner's steps cost on a card without memory where each is another: with random crops, and with values that are read.
//! Steps that come for the first time are predicted anew, and do not count: the crops are of 81 places, all of which have come before.
//!
//! The card computes nothing, so that all of the time is the host's: recording, hashing, predicting and burn's own work.

#[allow(dead_code, reason = "it makes its images itself")]
#[path = "models/cnn.rs"]
mod cnn;
#[allow(dead_code, reason = "it has one part")]
#[path = "harness/machine.rs"]
mod machine;
#[allow(dead_code, reason = "it times what happens between steps")]
#[path = "harness/paired.rs"]
mod paired;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::optim::{AdamConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::dry::{Card, Cuda, DryCuda, Lease};
use firebox::{Bytes, Lazy, Learner, initialize, is_rehearsal};

use crate::cnn::{Cnn, Images};
use crate::paired::measure;

type B = Autodiff<Lazy<DryCuda>>;
type Plain = Autodiff<DryCuda>;

/// What a step with random crops or reads may take of one without.
const TARGET: f64 = 1.05;
/// The steps of a turn that do not count, in which all is planned, and those that do.
const WARM_UP: usize = 400;
const TIMED: usize = 40;
/// The images of a batch.
const ITEMS: usize = 4;

/// What a step does.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Crops images, always at the same place.
    Fixed,
    /// Crops them at another place in each step.
    Random,
    /// Reads three values on the way.
    Reads,
}

#[derive(Module, Debug)]
struct Cropping<B: Backend> {
    cnn: Cnn<B>,
    #[module(skip)]
    way: Way,
}

/// The steps of the running turn.
static STEPS: AtomicUsize = AtomicUsize::new(0);

impl<B: Backend> Cropping<B> {
    fn crop(&self, images: Images<B>) -> Images<B> {
        let step = STEPS.load(Relaxed);
        // Of nine places along each side, in an order without a pattern.
        let at = |factor: usize| match self.way {
            Way::Random => (step + 1) * factor % 1013 % 9,
            Way::Fixed | Way::Reads => 4,
        };
        let (y, x) = (at(7919), at(104_729));
        let [items, channels, _, _] = images.pixels.dims();
        let pixels = images.pixels.slice([0..items, 0..channels, y..y + 28, x..x + 28]);
        if let Way::Reads = self.way {
            for row in 0..3 {
                let value = pixels.clone().narrow(0, row, 1).sum().into_scalar();
                std::hint::black_box(value);
            }
        }
        Images { pixels, targets: images.targets }
    }
}

impl<B: AutodiffBackend> TrainStep for Cropping<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> TrainOutput<ClassificationOutput<B>> {
        if !is_rehearsal() {
            STEPS.fetch_add(1, Relaxed);
        }
        let TrainOutput { grads, item } = TrainStep::step(&self.cnn, self.crop(images));
        TrainOutput { grads, item }
    }
}

impl<B: Backend> InferenceStep for Cropping<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> ClassificationOutput<B> {
        InferenceStep::step(&self.cnn, self.crop(images))
    }
}

/// Makes images of 36 by 36 pixels, and notes when it is asked for a batch.
#[derive(Clone)]
struct Blank(Arc<std::sync::Mutex<Vec<Instant>>>);

impl<B: Backend> Batcher<B, usize, Images<B>> for Blank {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Images<B> {
        self.0.lock().expect("nobody panics with it").push(Instant::now());
        let pixels = TensorData::new(vec![0.5f32; items.len() * 36 * 36], [items.len(), 1, 36, 36]);
        let targets = TensorData::new(vec![1i32; items.len()], [items.len()]);
        Images {
            pixels: Tensor::from_data(pixels, device),
            targets: Tensor::from_data(targets, device),
        }
    }
}

/// Trains; gives how long the steps took that count.
fn turn(way: Way, device: &Device<B>) -> Duration {
    STEPS.store(0, Relaxed);
    let model = Cropping::<B> { cnn: Cnn::new(device), way };
    initialize(&model);
    let begun = Arc::new(std::sync::Mutex::new(Vec::new()));
    let loader = |batches: usize, batcher: Blank| -> Arc<dyn DataLoader<B, Images<B>>> {
        DataLoaderBuilder::new(batcher)
            .batch_size(ITEMS)
            .set_device(device.clone())
            .build(InMemDataset::new((0..batches * ITEMS).collect::<Vec<usize>>()))
    };
    let train = loader(WARM_UP + TIMED + 1, Blank(begun.clone()));
    let valid = DataLoaderBuilder::new(Blank(Arc::default()))
        .batch_size(ITEMS)
        .set_device(device.clone())
        .build(InMemDataset::new((0..ITEMS).collect::<Vec<usize>>()));
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(4))
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-3)
        .fit(training)
        .expect("it fits");
    let begun = begun.lock().expect("nobody panics with it");
    begun[WARM_UP + TIMED] - begun[WARM_UP]
}

/// The same steps by burn alone.
fn turn_of_burn(way: Way, device: &Device<Plain>) -> Duration {
    STEPS.store(0, Relaxed);
    let mut model = Cropping::<Plain> { cnn: Cnn::new(device), way };
    let mut optimizer = AdamConfig::new().init();
    let mut begin = Instant::now();
    for step in 0..WARM_UP + TIMED {
        if step == WARM_UP {
            begin = Instant::now();
        }
        let batch = Blank(Arc::default()).batch((0..ITEMS).collect(), device);
        let output = TrainStep::step(&model, batch);
        model = optimizer.step(1e-3, model, output.grads);
        drop(output.item.loss.into_data());
    }
    begin.elapsed()
}

fn main() {
    machine::print();
    let card = Card::named("RTX 3060 12GB").expect("in the table");
    let lease = Lease::<Cuda>::take(&card.properties()).expect("no other card was asked for");
    let device = lease.device();
    let turns = [Way::Fixed, Way::Random, Way::Reads];
    let mut of_learner = turns.map(|way| move || turn(way, device));
    let mut of_burn = [Way::Fixed, Way::Random].map(|way| move || turn_of_burn(way, device));
    let [fixed, random, reads] = &mut of_learner;
    let [burn_fixed, burn_random] = &mut of_burn;
    let rounds = measure(machine::rounds(9), &mut [fixed, random, reads, burn_fixed, burn_random]);
    println!("\na CNN on a card without memory: {TIMED} steps of the Learner");
    println!("  {:<14}  {:>8}  {:>8}  {:>16}  target", "", "ms", "ratio", "quartiles");
    let ms = |subject| rounds.seconds(subject).median * 1e3 / TIMED as f64;
    println!("  {:<14}  {:>8.3}", "as always", ms(0));
    let mut result = "result: bench=steps".to_owned();
    for (subject, name) in [(1, "random_crops"), (2, "three_reads")] {
        let ratio = rounds.ratio(subject, 0);
        let (median, low, high) = (ratio.median, ratio.low, ratio.high);
        println!(
            "  {name:<14}  {:>8.3}  {median:>8.3}  {low:>7.3} to {high:.3}  at most {TARGET}",
            ms(subject)
        );
        result += &format!(" {name}={median:.3}");
    }
    let ratio = rounds.ratio(4, 3).median;
    println!("  burn alone: {:.3} ms, with random crops {:.3} ms, ratio {ratio:.3}", ms(3), ms(4));
    println!("{result} random_crops_of_burn={ratio:.3}");
}
