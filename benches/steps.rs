//! Measures the Learner's steps on a card without memory when each step differs: with random crops,
//! and with values that are read.
//!
//! The first occurrence of a step is predicted anew and does not count. Crops have 81 places, all
//! of which occur during warm-up.
//!
//! The card computes nothing, so all of the time is the host's: recording, hashing, predicting and
//! burn's own work.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::{AdamConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::dry::{Card, Cuda, DryCuda, Lease};
use firebox::{Lazy, is_rehearsal};
use firebox_testing::bench;
use firebox_testing::bench::paired::measure;
use firebox_testing::bench::turn::{Gray, Steps, turn};
use firebox_testing::full_size::cnn::{Cnn, Images};

type B = Autodiff<Lazy<DryCuda>>;
type Plain = Autodiff<DryCuda>;

/// Allowed time of a step with random crops or reads relative to one without.
const TARGET: f64 = 1.05;
/// Length of one turn.
const TURN: Steps = Steps { warm_up: 400, timed: 40, items: 4 };
/// Pixels along an edge of an image, before cropping.
const EDGE: usize = 36;

/// What a step does.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Crops images, always at the same place.
    Fixed,
    /// Crops images at a different place in each step.
    Random,
    /// Reads three values during the step.
    Reads,
}

#[derive(Module, Debug)]
struct Cropping<B: Backend> {
    cnn: Cnn<B>,
    #[module(skip)]
    way: Way,
}

/// Steps run so far in the current turn.
static STEPS: AtomicUsize = AtomicUsize::new(0);

impl<B: Backend> Cropping<B> {
    fn crop(&self, images: Images<B>) -> Images<B> {
        let step = STEPS.load(Relaxed);
        // One of nine places along each side, in an order without a pattern.
        let at = |factor: usize| match self.way {
            Way::Random => (step + 1) * factor % 1013 % 9,
            Way::Fixed | Way::Reads => 4,
        };
        let (y, x) = (at(7919), at(104_729));
        let [items, channels, _, _] = images.pixels.dims();
        let pixels = images.pixels.slice([0..items, 0..channels, y..y + 28, x..x + 28]);
        if let Way::Reads = self.way {
            for row in 0..3 {
                let value = pixels.clone().narrow(2, row, 1).sum().into_scalar();
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

/// Trains and returns the duration of the timed steps.
fn steps(way: Way, device: &Device<B>) -> Duration {
    STEPS.store(0, Relaxed);
    turn::<B, _>(Cropping { cnn: Cnn::new(device), way }, Gray::new(EDGE), TURN, device)
}

/// Times the same steps on burn alone.
fn turn_of_burn(way: Way, device: &Device<Plain>) -> Duration {
    STEPS.store(0, Relaxed);
    let mut model = Cropping::<Plain> { cnn: Cnn::new(device), way };
    let mut optimizer = AdamConfig::new().init();
    let mut begin = Instant::now();
    for step in 0..TURN.warm_up + TURN.timed {
        if step == TURN.warm_up {
            begin = Instant::now();
        }
        let batch = Gray::new(EDGE).batch((0..TURN.items).collect(), device);
        let output = TrainStep::step(&model, batch);
        model = optimizer.step(1e-3, model, output.grads);
        drop(output.item.loss.into_data());
    }
    begin.elapsed()
}

fn main() {
    bench::print_machine();
    let card = Card::named("RTX 3060 12GB").expect("in the table");
    let lease = Lease::<Cuda>::take(&card.properties()).expect("no other card was asked for");
    let device = lease.device();
    let turns = [Way::Fixed, Way::Random, Way::Reads];
    let mut of_learner = turns.map(|way| move || steps(way, device));
    let mut of_burn = [Way::Fixed, Way::Random].map(|way| move || turn_of_burn(way, device));
    let [fixed, random, reads] = &mut of_learner;
    let [burn_fixed, burn_random] = &mut of_burn;
    let rounds = measure(bench::rounds(9), &mut [fixed, random, reads, burn_fixed, burn_random]);
    println!("\na CNN on a card without memory: {} steps of the Learner", TURN.timed);
    println!("  {:<14}  {:>8}  {:>8}  {:>16}  target", "", "ms", "ratio", "quartiles");
    let ms = |subject| rounds.seconds(subject).median * 1e3 / TURN.timed as f64;
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
