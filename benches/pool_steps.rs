//! What a pool of our own costs a training step on a GPU: the Learner's steps on `firebox::Vulkan` against those on burn's `Vulkan`, on
//! the same device, in turns. Planning and the first steps do not count.

#[allow(dead_code, reason = "it makes its images itself")]
#[path = "models/cnn.rs"]
mod cnn;
#[allow(dead_code, reason = "it has one part")]
#[path = "harness/machine.rs"]
mod machine;
#[allow(dead_code, reason = "it times what happens between steps")]
#[path = "harness/paired.rs"]
mod paired;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Vulkan};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, DeviceMemory, Lazy, LazyBackend, Learner};

use crate::cnn::{Cnn, Images};
use crate::paired::measure;

/// What a step may take of one on burn's pools.
const TARGET: f64 = 1.01;
/// The steps of a turn that do not count, and those that do.
const WARM_UP: usize = 10;
const TIMED: usize = 40;
/// The images of a batch: few, as the work of the host is where a pool costs.
const SIZES: [usize; 1] = [2];

/// Makes images, and notes when it is asked for them.
#[derive(Clone)]
struct Blank(Arc<Mutex<Vec<Instant>>>);

impl<B: Backend> Batcher<B, usize, Images<B>> for Blank {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Images<B> {
        self.0.lock().expect("nobody panics with it").push(Instant::now());
        let pixels = TensorData::new(vec![0.5f32; items.len() * 28 * 28], [items.len(), 1, 28, 28]);
        let targets = TensorData::new(vec![1i32; items.len()], [items.len()]);
        Images {
            pixels: Tensor::from_data(pixels, device),
            targets: Tensor::from_data(targets, device),
        }
    }
}

/// Trains; gives how long the steps took that count.
fn turn<B>(items: usize) -> Duration
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
{
    let begun = Blank(Arc::default());
    let numbers = |batches: usize| InMemDataset::new((0..batches * items).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(begun.clone())
        .batch_size(items)
        .build(numbers(WARM_UP + TIMED + 1));
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Blank(Arc::default()))
        .batch_size(items)
        .build(numbers(1));
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(2))
        .quiet()
        .build(Cnn::<B>::new(&Default::default()), AdamConfig::new().init(), 1e-3)
        .fit(training)
        .expect("it fits");
    let begun = begun.0.lock().expect("nobody panics with it");
    begun[WARM_UP + TIMED] - begun[WARM_UP]
}

fn main() {
    machine::print();
    println!("\na CNN on the first Vulkan device: {TIMED} steps of the Learner");
    println!(
        "  {:<10}  {:>9}  {:>9}  {:>8}  {:>16}  target",
        "", "burn's", "ours", "ratio", "quartiles"
    );
    let mut result = "result: bench=pool_steps".to_owned();
    for items in SIZES {
        let mut burns = || turn::<Autodiff<Lazy<Vulkan>>>(items);
        let mut ours = || turn::<Autodiff<Lazy<firebox::Vulkan>>>(items);
        let rounds = measure(machine::rounds(9), &mut [&mut burns, &mut ours]);
        let ms = |subject| rounds.seconds(subject).median * 1e3 / TIMED as f64;
        let ratio = rounds.ratio(1, 0);
        println!(
            "  {:<10}  {:>6.2} ms  {:>6.2} ms  {:>8.3}  {:>7.3} to {:.3}  at most {TARGET}",
            format!("{items} images"),
            ms(0),
            ms(1),
            ratio.median,
            ratio.low,
            ratio.high
        );
        result += &format!(" images{items}={:.3}", ratio.median);
    }
    println!("{result}");
}
