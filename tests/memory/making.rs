//! Batches whose making takes more than a step: many large items, of which the model sees little.

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::train::SupervisedTraining;
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, Lazy, Learner};
use firebox_testing::classifiers::{Items, Kind, Model, Numbered};

use crate::{B, HEAP, check_ratio, run};

const KIND: Kind = Kind::Lstm;
const ITEMS: usize = 24;

/// Stacks an image of 1 MiB for each item. The model gets their shade.
#[derive(Clone, Debug)]
struct Stacking;

impl<B: Backend> Batcher<B, usize, Items<B>> for Stacking {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Items<B> {
        let image = |_: &usize| Tensor::<B, 2>::ones([512, 512], device);
        let images: Vec<Tensor<B, 2>> = items.iter().map(image).collect();
        let shade = Tensor::stack::<3>(images, 0).mean_dim(1).mean_dim(2) - 1.0;
        let Items { inputs, targets } = Numbered(KIND).batch(items, device);
        Items { inputs: inputs + shade, targets }
    }
}

/// Trains in this process and prints what was predicted and measured.
pub fn train(workers: usize) {
    let device = Default::default();
    let folder = tempfile::tempdir().expect("a folder");
    let loader = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(Stacking)
        .batch_size(ITEMS)
        .num_workers(workers)
        .build(loader(6 * ITEMS));
    let valid = DataLoaderBuilder::<Lazy<Flex>, _, _>::new(Numbered(KIND)).build(loader(2));
    let level = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let model = Model::<B>::new(KIND, &device);
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(30));
    let fitted =
        builder.build(model, AdamConfig::new().init(), 1e-3).fit(training).expect("it fits");
    let measured = (HEAP.peak_usage() - level) as u64;
    let report = fitted.report.expect("a plan was made");
    assert!(report.making > report.predicted(), "{report}");
    assert!(report.to_string().contains("to make a batch"), "{report}");
    println!("measured: {} {measured}", fitted.memory.expect("it was compared").predicted.get());
}

/// Runs the training in a child process.
#[track_caller]
fn check(workers: usize) {
    let (succeeded, text, errors) = run(&format!("making_by_{workers}"));
    assert!(succeeded, "{text}{errors}");
    assert!(errors.contains("making a training batch of 24 may take"), "{errors}");
    check_ratio("making", &text);
}

#[test]
fn making_by_the_thread_that_trains() {
    check(0);
}

#[test]
fn making_of_what_loader_threads_asked_for() {
    check(2);
}
