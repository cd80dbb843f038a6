//! Real data: digits, on one rank and on several that share the same batches.

use std::io::Read;
use std::sync::Arc;

use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use firebox::{Bytes, Lazy, Learner, MicroBatch, Ranks, shard};
use firebox_testing::task::weights;
use libtest_mimic::Trial;
use serde::{Deserialize, Serialize};

use crate::job::{B, Job, Said, bits};
use crate::launch::run as launch;

/// The batch of all ranks together, which one to four can share.
const GLOBAL: usize = 96;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Real {
    /// Whether one step of plain descent is made, which shows the gradient.
    one_step: bool,
}

#[derive(Clone, Debug, MicroBatch)]
struct Images<B: Backend> {
    pixels: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct ImageBatcher;

impl<B: Backend> Batcher<B, [i32; 65], Images<B>> for ImageBatcher {
    fn batch(&self, items: Vec<[i32; 65]>, device: &B::Device) -> Images<B> {
        let pixels = items.iter().flat_map(|item| &item[..64]).map(|pixel| *pixel as f32 / 16.0);
        let labels: Vec<i32> = items.iter().map(|item| item[64]).collect();
        let pixels = TensorData::new(pixels.collect::<Vec<f32>>(), [items.len(), 64]);
        Images {
            pixels: Tensor::from_data(pixels, device),
            labels: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn classify(&self, batch: Images<B>) -> ClassificationOutput<B> {
        let output = self.output.forward(gelu(self.hidden.forward(batch.pixels)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, output, batch.labels)
    }
}

impl<B: AutodiffBackend> TrainStep for Mlp<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Images<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Mlp<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Images<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// The digits: 64 pixels and a label.
fn digits() -> Vec<[i32; 65]> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../datasets/digits.csv.gz");
    let mut text = String::new();
    let file = std::fs::File::open(path).expect("the digits are there");
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("they are text");
    let digit = |line: &str| {
        let numbers: Vec<i32> = line.split(',').map(|n| n.parse().expect("a number")).collect();
        numbers.try_into().expect("64 pixels and a label")
    };
    text.lines().map(digit).collect()
}

impl Real {
    pub fn run(self, ranks: &Ranks) -> Said {
        let device = Default::default();
        // Rank 0 gives its parameters to the others.
        B::seed(&device, ranks.rank() as u64);
        let model = Mlp::<B> {
            hidden: LinearConfig::new(64, 48).init(&device),
            output: LinearConfig::new(48, 10).init(&device),
        };
        let mut digits = digits();
        let valid = digits.split_off(1500);
        if self.one_step {
            digits.truncate(GLOBAL);
        }
        let of_rank = shard(InMemDataset::new(digits), ranks.rank(), ranks.world()).seed(9);
        let loader =
            DataLoaderBuilder::new(ImageBatcher).batch_size(GLOBAL / ranks.world()).build(of_rank);
        let validation = DataLoaderBuilder::new(ImageBatcher)
            .batch_size(100)
            .build(InMemDataset::new(valid.clone()));
        let loaders = (loader, validation);
        let model = match self.one_step {
            true => fit(ranks, loaders, model, SgdConfig::new().init(), (1.0, 1)),
            false => fit(ranks, loaders, model, AdamConfig::new().init(), (1e-2, 3)),
        };
        let batch: Images<Lazy<Flex>> = ImageBatcher.batch(valid, &Default::default());
        let loss: f32 = model.classify(batch).loss.into_scalar().elem();
        let mut numbers = weights::<Lazy<Flex>, _>(&model);
        numbers.push(vec![loss]);
        Said { rank: ranks.rank(), weights: bits(numbers), ..Said::default() }
    }
}

type Loaders =
    (Arc<dyn DataLoader<B, Images<B>>>, Arc<dyn DataLoader<Lazy<Flex>, Images<Lazy<Flex>>>>);

/// Trains with a learning rate, for some epochs.
fn fit(
    ranks: &Ranks,
    (loader, validation): Loaders,
    model: Mlp<B>,
    optimizer: impl Optimizer<Mlp<B>, B> + 'static,
    (rate, epochs): (f64, usize),
) -> Mlp<Lazy<Flex>> {
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(folder.path(), loader, validation)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(epochs);
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).ranks(ranks.clone());
    builder.quiet().build(model, optimizer, rate).fit(training).expect("it fits").model
}

/// The largest difference of numbers, and the difference of the losses.
fn differences(one: &Said, several: &Said) -> (f32, f32) {
    let of = |said: &Said| -> Vec<Vec<f32>> {
        said.weights.iter().map(|of| of.iter().copied().map(f32::from_bits).collect()).collect()
    };
    let (one, several) = (of(one), of(several));
    let last = one.len() - 1;
    let is_finite = |numbers: &[Vec<f32>]| numbers.iter().flatten().all(|n| n.is_finite());
    assert!(is_finite(&one) && is_finite(&several));
    let pairs = one[..last].iter().flatten().zip(several[..last].iter().flatten());
    let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (largest, (one[last][0] - several[last][0]).abs())
}

pub fn tests() -> Vec<Trial> {
    let case = |world: usize| {
        Trial::test(format!("real::{world}_ranks_learn_what_one_does"), move || {
            for one_step in [true, false] {
                let job = Job::Real(Real { one_step });
                let (one, several) = (launch(&job, 1), launch(&job, world));
                let differs = several.iter().find(|of| of.weights != several[0].weights);
                assert_eq!(differs, None, "ranks have different parameters");
                let (numbers, loss) = differences(&one[0], &several[0]);
                let of_one = f32::from_bits(one[0].weights[4][0]);
                println!(
                    "{world} ranks, one step {one_step}: {numbers:e}, loss {of_one}, {loss:e}"
                );
                assert!(one_step || of_one < 1.5, "a loss of {of_one}");
                assert!(loss <= 1e-4, "the loss differs by {loss}");
                // After one step of rate one, parameters differ as gradients do.
                assert!(!one_step || numbers <= 1e-6, "the gradient differs by {numbers}");
            }
            Ok(())
        })
    };
    (2..=4).map(case).collect()
}
