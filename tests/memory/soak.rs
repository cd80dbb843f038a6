//! Long runs within a tight budget. The heap and the process's memory must stay flat and never
//! exceed the budget.

use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::train::SupervisedTraining;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use firebox::plan::Resident;
use firebox::{Bytes, Lazy, Learner};
use firebox_testing::classifiers::{Items, Kind, Model, Numbered};

use crate::{B, HEAP, budget};

/// A run of `steps` optimizer steps.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    pub name: &'static str,
    pub kind: Kind,
    pub items: usize,
    /// Memory in MiB that it may use in addition to what
    /// [threads keep](firebox::trace::Heap::kept).
    pub mib: u64,
    pub steps: usize,
}

/// The runs of the tests, short and long.
pub const SOAKS: [Soak; 4] = {
    let cnn = Soak { name: "soak_of_a_cnn", kind: Kind::Cnn, items: 24, mib: 6, steps: 60 };
    let lengths = Soak { name: "soak_of_lengths", kind: Kind::Lengths, items: 8, mib: 8, ..cnn };
    [
        cnn,
        lengths,
        Soak { name: "long_soak_of_a_cnn", steps: 2000, ..cnn },
        Soak { name: "long_soak_of_lengths", steps: 2000, ..lengths },
    ]
};

/// The peak of the heap since the previous step, and the memory of the process.
#[derive(Clone, Copy, Debug)]
struct Sample {
    heap: usize,
    process: Bytes,
}

/// Takes a sample with each batch.
#[derive(Clone, Debug)]
struct Sampling {
    batcher: Numbered,
    samples: Arc<Mutex<Vec<Sample>>>,
}

impl<B: Backend> Batcher<B, usize, Items<B>> for Sampling {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Items<B> {
        let process = Resident::of_this_process().map_or(Bytes::ZERO, |resident| resident.now);
        let sample = Sample { heap: HEAP.peak_usage(), process };
        HEAP.reset_peak_usage();
        self.samples.lock().expect("nobody panics").push(sample);
        self.batcher.batch(items, device)
    }
}

impl Soak {
    /// Trains, and checks the measurements.
    pub fn run(&self) {
        let device = Default::default();
        let folder = tempfile::tempdir().expect("a folder");
        let samples = Arc::new(Mutex::new(Vec::with_capacity(self.steps + 1)));
        let batcher = Sampling { batcher: Numbered(self.kind), samples: samples.clone() };
        let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
        let train = DataLoaderBuilder::<B, _, _>::new(batcher)
            .batch_size(self.items)
            .build(numbers(self.items * self.steps));
        let valid = DataLoaderBuilder::<Lazy<Flex>, _, _>::new(Numbered(self.kind));
        let valid = valid.batch_size(2).build(numbers(2));
        let level = HEAP.current_usage();
        HEAP.reset_peak_usage();
        let model = Model::<B>::new(self.kind, &device);
        let training = SupervisedTraining::new(folder.path(), train, valid)
            .metrics((AccuracyMetric::new(), LossMetric::new()))
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(1);
        let budget = budget(self.mib);
        let builder = Learner::builder().auto_batch().memory(budget).strict();
        let fitted = builder.build(model, AdamConfig::new().init(), 1e-3).fit(training);
        let fitted = fitted.expect("it fits");
        let samples = samples.lock().expect("nobody panics");
        // The first sample is from before the first step.
        let parts: Vec<Sample> = samples[1..]
            .chunks(self.steps.div_ceil(if self.steps < 500 { 3 } else { 10 }))
            .map(|part| Sample {
                heap: part.iter().map(|sample| sample.heap).max().unwrap_or_default(),
                process: part.iter().map(|sample| sample.process).max().unwrap_or_default(),
            })
            .collect();
        // Plans are made until all lengths have arrived.
        let first = parts[1];
        let rest = |of: fn(&Sample) -> u64| parts[2..].iter().map(of).max().unwrap_or_default();
        let heap = rest(|sample| sample.heap as u64);
        let process = rest(|sample| sample.process.get());
        println!(
            "measured: steps={} budget={} predicted={} heap_first={} heap_rest={heap} process_first={} process_rest={process}",
            self.steps,
            budget.get(),
            fitted.memory.unwrap_or_default().predicted.get(),
            first.heap - level,
            first.process.get(),
        );
        let most = parts.iter().map(|part| part.heap).max().unwrap_or_default();
        let most = Bytes::new((most - level) as u64);
        let is_tight = most > Bytes::mib(self.mib).scale(0.6);
        assert!(most <= budget && is_tight, "{most} of {budget}");
        assert!(heap as f64 <= first.heap as f64 * 1.02, "the heap grows: {parts:?}");
        // The kernel counts pages per processor and adds them up once there are enough. The figure
        // for a process of 10 MiB is off by up to half a MiB.
        let level = first.process.get() as f64;
        let noise = Bytes::mib(1).get() as f64;
        assert!(process as f64 <= level * 1.05 + noise, "the process grows: {parts:?}");
    }
}
