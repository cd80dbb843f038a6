//! Measures the overhead of `Lazy` on a training step and on a data loader with two workers.
//!
//! Four ways to run the same step take turns: on burn's own backend; through `Lazy`, with every
//! operation run at once; recorded as a whole and then run; and as the Learner runs it. The Learner
//! records, hashes and runs the forward and backward pass, then runs the optimizer step at once.
//!
//! The part `fit` trains with burn's Learner and with firebox's, from batch to batch.

use std::fmt::Display;
use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::trace::StepRecorder;
use firebox::{Bytes, Lazy, initialize};
use firebox_lazy::LoaderGate;
use firebox_testing::bench;
use firebox_testing::bench::paired::{Rounds, measure, time};
use firebox_testing::bench::turn::{Gray, Steps, turn as fit, turn_of_burn as fit_with_burn};
use firebox_testing::full_size::cnn::{Cnn, Images};
use firebox_testing::full_size::encoder::{Encoder, Sequences};

type Plain = Autodiff<Flex>;
type Decorated = Autodiff<Lazy<Flex>>;

/// Allowed time of a step relative to burn's own, by batch size.
const STEP_TARGETS: [(usize, f64); 2] = [(64, 1.03), (1, 1.06)];
/// Allowed time of a small batch in the Learner's loop relative to burn's.
const FIT_TARGET: f64 = 1.05;
/// Allowed time of an epoch with loader workers relative to burn's own.
const LOADER_TARGET: f64 = 1.03;

fn main() {
    bench::print_machine();
    let mut result = "result: bench=overhead".to_owned();
    for (items, target) in STEP_TARGETS {
        let device = Default::default();
        if bench::wants("cnn") {
            let ratios = compare(
                &format!("CNN, batch {items}"),
                target,
                (Cnn::<Plain>::new(&device), Images::new(items, &device)),
                (Cnn::<Decorated>::new(&device), Images::new(items, &device)),
            );
            result += &line(&format!("cnn{items}"), ratios);
        }
        if bench::wants("encoder") {
            let ratios = compare(
                &format!("transformer encoder, batch {items}"),
                target,
                (Encoder::<Plain>::new(&device), Sequences::new(items, &device)),
                (Encoder::<Decorated>::new(&device), Sequences::new(items, &device)),
            );
            result += &line(&format!("encoder{items}"), ratios);
        }
    }
    if bench::wants("fit_cnn") {
        result += &format!(" fit_cnn={:.3}", fits("CNN", 40, Cnn::new, Cnn::new));
    }
    if bench::wants("fit_perceptron") {
        let ratio = fits("perceptron", 1000, Perceptron::new, Perceptron::new);
        result += &format!(" fit_perceptron={ratio:.3}");
    }
    if bench::wants("loader") {
        let [loading, computed, training] = loader_workers();
        result += &format!(
            " loader={loading:.3} loader_computed={computed:.3} loader_training={training:.3}"
        );
    }
    println!("{result}");
}

fn line(name: &str, [eager, recorded, learner]: [f64; 3]) -> String {
    format!(" {name}_eager={eager:.3} {name}_recorded={recorded:.3} {name}_learner={learner:.3}")
}

/// A model whose steps take next to no time.
#[derive(Module, Debug)]
struct Perceptron<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Perceptron<B> {
    fn new(device: &B::Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self { hidden: linear(28 * 28, 32), output: linear(32, 10), relu: Relu::new() }
    }

    fn classify(&self, images: Images<B>) -> ClassificationOutput<B> {
        let x = self.relu.forward(self.hidden.forward(images.pixels.flatten(1, 3)));
        let output = self.output.forward(x);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), images.targets.clone());
        ClassificationOutput { loss, output, targets: images.targets }
    }
}

impl<B: AutodiffBackend> TrainStep for Perceptron<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(images);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Perceptron<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, images: Images<B>) -> ClassificationOutput<B> {
        self.classify(images)
    }
}

/// Times batches of one image in a training by burn's Learner and by firebox's. Returns the ratio.
fn fits<P, D>(
    title: &str,
    timed: usize,
    plain: impl Fn(&Device<Plain>) -> P,
    decorated: impl Fn(&Device<Decorated>) -> D,
) -> f64
where
    P: TrainStep<Input = Images<Plain>> + AutodiffModule<Plain> + Display + 'static,
    P::InnerModule: InferenceStep<Input = Images<Flex>>,
    D: TrainStep<Input = Images<Decorated>> + AutodiffModule<Decorated> + Display + 'static,
    D::InnerModule: InferenceStep<Input = Images<Lazy<Flex>>>,
{
    let steps = Steps { warm_up: 20, timed, items: 1 };
    let device = Default::default();
    let rounds = measure(
        bench::rounds(21),
        &mut [
            &mut || fit_with_burn::<Plain, P>(plain(&device), Gray::new(28), steps, &device),
            &mut || fit::<Decorated, D>(decorated(&device), Gray::new(28), steps, &device),
        ],
    );
    let title = format!("{title}, batch 1, in the Learner's loop");
    report(&title, FIT_TARGET, &rounds, steps.timed, &["firebox's"])[0]
}

/// A model in training.
struct Training<B: AutodiffBackend, M: AutodiffModule<B>, O> {
    model: Option<M>,
    optimizer: O,
    backend: PhantomData<B>,
}

fn train<B, M>(model: M) -> Training<B, M, impl Optimizer<M, B>>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
{
    initialize(&model);
    let optimizer = AdamConfig::new().init::<B, M>();
    Training { model: Some(model), optimizer, backend: PhantomData }
}

impl<B, M, O> Training<B, M, O>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + TrainStep,
    O: Optimizer<M, B>,
{
    fn optimize(&mut self, step: impl FnOnce(&M) -> TrainOutput<M::Output>) {
        let model = self.model.take().expect("the model comes back from every step");
        let output = step(&model);
        self.model = Some(self.optimizer.step(1e-3, model, output.grads));
        black_box(output.item);
    }

    /// Runs the forward pass, the backward pass and the optimizer step.
    fn step(&mut self, batch: M::Input) {
        self.optimize(|model| model.step(batch));
    }
}

impl<M, O> Training<Decorated, M, O>
where
    M: AutodiffModule<Decorated> + TrainStep,
    O: Optimizer<M, Decorated>,
{
    /// Records the same step as a whole, then runs it.
    fn step_recorded(&mut self, batch: M::Input) {
        let recording = StepRecorder::new().record::<Flex, _>(|| self.step(batch));
        recording.expect("recordings do not nest here").run();
    }

    /// Runs the same step as the Learner does.
    fn step_as_learner(&mut self, batch: M::Input) {
        self.optimize(|model| {
            let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch));
            let recording = recording.expect("recordings do not nest here");
            black_box(recording.trace().structural_hash());
            recording.run()
        });
    }
}

/// Times the four ways in turns and returns the ratios of the other three to burn's own.
fn compare<P, D>(
    title: &str,
    target: f64,
    (plain, plain_batch): (P, P::Input),
    (decorated, batch): (D, D::Input),
) -> [f64; 3]
where
    P: AutodiffModule<Plain> + TrainStep,
    P::Input: Clone,
    D: AutodiffModule<Decorated> + TrainStep,
    D::Input: Clone,
{
    let mut plain = train::<Plain, _>(plain);
    let mut eager = train::<Decorated, _>(decorated.clone());
    let mut recorded = train::<Decorated, _>(decorated.clone());
    let mut learner = train::<Decorated, _>(decorated);

    // Enough steps in a turn to take a twentieth of a second.
    plain.step(plain_batch.clone());
    let ((), once) = time(|| plain.step(plain_batch.clone()));
    let steps = (0.05 / once.as_secs_f64()).ceil() as usize;
    let rounds = bench::rounds(if once > Duration::from_millis(100) { 11 } else { 61 });
    let rounds = measure(
        rounds,
        &mut [
            &mut || turn(steps, || plain.step(plain_batch.clone())),
            &mut || turn(steps, || eager.step(batch.clone())),
            &mut || turn(steps, || recorded.step_recorded(batch.clone())),
            &mut || turn(steps, || learner.step_as_learner(batch.clone())),
        ],
    );
    report(title, target, &rounds, steps, &["eager", "recorded", "as the Learner"])
        .try_into()
        .expect("three ways")
}

fn turn(steps: usize, mut step: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..steps {
        step();
    }
    start.elapsed()
}

/// Prints burn's own time and the ratios of the others, and returns the ratios.
fn report(title: &str, target: f64, rounds: &Rounds, steps: usize, names: &[&str]) -> Vec<f64> {
    println!("\n{title}: {steps} at a time");
    println!("  {:<16}  {:>10}  {:>8}  {:>16}  target", "", "ms", "ratio", "quartiles");
    let ms = |subject| rounds.seconds(subject).median * 1e3 / steps as f64;
    println!("  {:<16}  {:>10.3}", "burn", ms(0));
    let rows = names.iter().enumerate().map(|(way, name)| {
        let ratio = rounds.ratio(way + 1, 0);
        println!(
            "  {name:<16}  {:>10.3}  {:>8.3}  {:>7.3} to {:.3}  at most {target}",
            ms(way + 1),
            ratio.median,
            ratio.low,
            ratio.high,
        );
        ratio.median
    });
    rows.collect()
}

/// An image on the host.
#[derive(Clone, Debug)]
struct Image {
    pixels: Vec<f32>,
    label: i32,
}

/// Makes a tensor of every image, normalizes it and stacks them, as burn's MNIST example does.
struct ImageBatcher;

impl<B: Backend> Batcher<B, Image, Images<B>> for ImageBatcher {
    fn batch(&self, images: Vec<Image>, device: &B::Device) -> Images<B> {
        let (pixels, labels) = images
            .into_iter()
            .map(|Image { pixels, label }| {
                let pixels = TensorData::new(pixels, [1, 1, 28, 28]);
                let pixels = (Tensor::from_data(pixels, device) - 0.1307) / 0.3081;
                (pixels, Tensor::from_data(TensorData::new(vec![label], [1]), device))
            })
            .unzip::<_, _, Vec<_>, Vec<_>>();
        Images { pixels: Tensor::cat(pixels, 0), targets: Tensor::cat(labels, 0) }
    }
}

fn loader<B: AutodiffBackend>(batches: usize) -> Arc<dyn DataLoader<B, Images<B>>> {
    let image = |i: usize| Image {
        pixels: (0..28 * 28).map(|pixel| ((i * 31 + pixel) % 256) as f32 / 255.0).collect(),
        label: (i % 10) as i32,
    };
    DataLoaderBuilder::new(ImageBatcher)
        .batch_size(32)
        .num_workers(2)
        .build(InMemDataset::new((0..32 * batches).map(image).collect()))
}

/// Times epochs of a loader with two workers, without and with training on the batches. Returns the
/// ratios to burn's own.
fn loader_workers() -> [f64; 3] {
    let device = Default::default();
    let (plain_loader, decorated_loader) = (loader::<Plain>(32), loader::<Decorated>(32));
    fn load<B: AutodiffBackend>(loader: &Arc<dyn DataLoader<B, Images<B>>>) {
        // Reads each batch, as a step would: a loader thread of `Lazy` only records what is to be
        // done, unless it may compute.
        loader.iter().for_each(|batch| drop(black_box(batch.pixels.narrow(0, 0, 1).into_data())));
    }
    let rounds = measure(
        bench::rounds(61),
        &mut [
            &mut || turn(4, || load(&plain_loader)),
            &mut || turn(4, || load(&decorated_loader)),
            &mut || {
                // As with `LearnerBuilder::loaders_compute`.
                let guard = LoaderGate::enter();
                guard.compute();
                turn(4, || load(&decorated_loader))
            },
        ],
    );
    let title = "two loader workers, 32 batches of 32";
    let loading = report(title, LOADER_TARGET, &rounds, 4, &["deferred", "computed"]);

    let (plain_loader, decorated_loader) = (loader::<Plain>(8), loader::<Decorated>(8));
    let mut plain = train::<Plain, _>(Cnn::new(&device));
    let mut eager = train::<Decorated, _>(Cnn::new(&device));
    let mut learner = train::<Decorated, _>(Cnn::new(&device));
    let mut held_back = train::<Decorated, _>(Cnn::new(&device));
    let rounds = measure(
        bench::rounds(15),
        &mut [
            &mut || turn(1, || plain_loader.iter().for_each(|batch| plain.step(batch))),
            &mut || turn(1, || decorated_loader.iter().for_each(|batch| eager.step(batch))),
            &mut || {
                turn(1, || decorated_loader.iter().for_each(|batch| learner.step_as_learner(batch)))
            },
            &mut || {
                turn(1, || {
                    // Same as in `fit`: until a batch has been counted, the limit is the bytes of a
                    // batch that a step sees.
                    let guard = LoaderGate::enter();
                    guard.limit(Bytes::new(32 * 28 * 28 * 4 + 32 * 4));
                    let mut batches = guard.starting(|| decorated_loader.iter());
                    while let Some(batch) = guard.waiting(|| batches.next()) {
                        held_back.step_as_learner(batch);
                    }
                })
            },
        ],
    );
    let title = "two loader workers and training of the CNN, 8 batches of 32";
    let arms = ["eager", "as the Learner", "as the Learner, held back"];
    let training = report(title, LOADER_TARGET, &rounds, 1, &arms);
    [loading[0], loading[1], training.into_iter().fold(0.0, f64::max)]
}
