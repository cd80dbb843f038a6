//! Measures what it costs to give the parts of a batch numbers of the whole: trainings whose loss
//! is divided by the class weights of its batch take turns with those of a plain mean.

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::{Bytes, Lazy, Learner, SplitCheck};
use firebox_testing::bench;
use firebox_testing::bench::paired::{measure, time};
use firebox_testing::task::{Given, Points, batch};

type B = Autodiff<Lazy<Flex>>;

const ITEMS: usize = 48;
const BATCHES: usize = 40;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    inner: Vec<Linear<B>>,
    last: Linear<B>,
    weights: Option<[f32; 3]>,
}

impl<B: Backend> Net<B> {
    fn output(&self, batch: Points<B>) -> ClassificationOutput<B> {
        let hidden = gelu(self.first.forward(batch.inputs));
        let hidden = self.inner.iter().fold(hidden, |x, layer| gelu(layer.forward(x)));
        let output = self.last.forward(hidden);
        let weights = self.weights.map(|weights| weights.to_vec());
        let loss = CrossEntropyLossConfig::new().with_weights(weights);
        let loss = loss.init(&output.device()).forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        self.output(batch)
    }
}

/// The time of a training on `BATCHES` batches.
fn train(
    (width, depth): (usize, usize),
    weights: Option<[f32; 3]>,
    micro_batch: usize,
) -> Duration {
    let device = Default::default();
    let layer = |from, to| LinearConfig::new(from, to).init::<B>(&device);
    let model = Net {
        first: layer(6, width),
        inner: (0..depth).map(|_| layer(width, width)).collect(),
        last: layer(width, 3),
        weights,
    };
    let folder = tempfile::tempdir().expect("a folder");
    let none = Given::loader::<<B as AutodiffBackend>::InnerBackend>(Vec::new());
    let batches = Given::loader::<B>(vec![batch(ITEMS); BATCHES]);
    let training = SupervisedTraining::new(folder.path(), batches, none)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(4)).quiet();
    let learner = builder.micro_batch(micro_batch).build(model, SgdConfig::new().init(), 1e-3);
    let (fitted, took) = time(|| learner.fit(training).expect("it fits"));
    assert_eq!(fitted.split_check, SplitCheck::Proved);
    took
}

fn main() {
    bench::print_machine();
    println!("{BATCHES} batches of {ITEMS} items, milliseconds a batch, by class over mean");
    let mut result = "result: bench=splits".to_owned();
    for (width, depth) in [(32, 4), (160, 11), (512, 6)] {
        for micro_batch in [6, 24] {
            let of = |weights| train((width, depth), weights, micro_batch);
            let rounds = measure(
                bench::rounds(15),
                &mut [&mut || of(None), &mut || of(Some([0.2, 1.0, 3.5]))],
            );
            let ms = |subject| rounds.seconds(subject).median * 1e3 / BATCHES as f64;
            let ratio = rounds.ratio(1, 0);
            println!(
                "{depth:>2} x {width:>3}, parts of {micro_batch:>2}: {:>8.2} {:>8.2}  {:.3} ({:.3} to {:.3})",
                ms(0),
                ms(1),
                ratio.median,
                ratio.low,
                ratio.high
            );
            result += &format!(" {depth}x{width}_{micro_batch}={:.3}", ratio.median);
        }
    }
    println!("{result}");
}
