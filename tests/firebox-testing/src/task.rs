//! A small task for the tests: points of three classes, a model without randomness, and one with
//! batch normalization and dropout.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

/// Locks Flex's random generator. The process has only one, so training that uses it runs alone.
pub fn random_state() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[derive(Clone, Debug, MicroBatch)]
pub struct Points<B: Backend> {
    pub inputs: Tensor<B, 2>,
    pub targets: Tensor<B, 1, Int>,
}

#[derive(Clone, Debug)]
pub struct Point(pub [f32; 6], pub i32);

#[derive(Clone, Debug)]
pub struct PointBatcher;

impl<B: Backend> Batcher<B, Point, Points<B>> for PointBatcher {
    fn batch(&self, items: Vec<Point>, device: &B::Device) -> Points<B> {
        let inputs: Vec<f32> = items.iter().flat_map(|point| point.0).collect();
        let targets: Vec<i32> = items.iter().map(|point| point.1).collect();
        Points {
            inputs: Tensor::from_data(TensorData::new(inputs, [items.len(), 6]), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}

/// Points on three noisy rays. The same number always gives the same points.
pub fn points(count: usize) -> Vec<Point> {
    let wave = |i: usize| ((i * 7919 % 1013) as f32 / 1013.0 - 0.5) * 2.0;
    (0..count)
        .map(|i| {
            let class = i % 3;
            let mut point = [0.0; 6];
            for (dim, value) in point.iter_mut().enumerate() {
                let along = if dim / 2 == class { 1.0 } else { -0.3 };
                *value = along + 0.8 * wave(i * 6 + dim + 1);
            }
            Point(point, class as i32)
        })
        .collect()
}

pub fn loader<B: Backend>(
    points: Vec<Point>,
    batch: usize,
    shuffle: Option<u64>,
) -> Arc<dyn DataLoader<B, Points<B>>> {
    let builder = DataLoaderBuilder::new(PointBatcher).batch_size(batch);
    let builder = match shuffle {
        Some(seed) => builder.shuffle(seed),
        None => builder,
    };
    builder.build(InMemDataset::new(points))
}

/// A batch of `items` points.
pub fn batch<B: Backend>(items: usize) -> Points<B> {
    PointBatcher.batch(points(items), &Default::default())
}

/// A loader that yields given batches.
pub struct Given<I>(Vec<I>);

struct GivenIterator<I>(std::vec::IntoIter<I>);

impl<I: Clone + Send + Sync + 'static> Given<I> {
    pub fn loader<B: Backend>(batches: Vec<I>) -> Arc<dyn DataLoader<B, I>> {
        Arc::new(Self(batches))
    }

    /// Yields given batches once.
    pub fn iterator<'a>(batches: Vec<I>) -> Box<dyn DataLoaderIterator<I> + 'a> {
        Box::new(GivenIterator(batches.into_iter()))
    }
}

impl<I> Iterator for GivenIterator<I> {
    type Item = I;

    fn next(&mut self) -> Option<I> {
        self.0.next()
    }
}

impl<I> DataLoaderIterator<I> for GivenIterator<I> {
    fn progress(&self) -> Progress {
        Progress::new(0, 1)
    }
}

impl<B: Backend, I: Clone + Send + Sync + 'static> DataLoader<B, I> for Given<I> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<I> + 'a> {
        Self::iterator(self.0.clone())
    }

    fn num_items(&self) -> usize {
        self.0.len()
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, I>> {
        Self::loader(self.0.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, I>> {
        Self::loader(self.0[start..end].to_vec())
    }
}

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    first: Linear<B>,
    norm: Option<BatchNorm<B>>,
    dropout: Option<Dropout>,
    second: Linear<B>,
}

impl<B: Backend> Net<B> {
    /// A model without randomness, whose items are independent of each other.
    pub fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(6, 16).init(device),
            norm: None,
            dropout: None,
            second: LinearConfig::new(16, 3).init(device),
        }
    }

    /// A model with batch normalization, and with dropout if `dropout`.
    pub fn coupled(device: &B::Device, dropout: bool) -> Self {
        Self {
            norm: Some(BatchNormConfig::new(16).init(device)),
            dropout: dropout.then(|| DropoutConfig::new(0.2).init()),
            ..Self::new(device)
        }
    }

    /// A model whose layers are on two devices.
    pub fn across(first: &B::Device, second: &B::Device) -> Self {
        Self { second: LinearConfig::new(16, 3).init(second), ..Self::new(first) }
    }

    pub fn first_weight(&self) -> Tensor<B, 2> {
        self.first.weight.val()
    }

    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let mut x = gelu(self.first.forward(x));
        if let Some(norm) = &self.norm {
            x = norm.forward(x);
        }
        if let Some(dropout) = &self.dropout {
            x = dropout.forward(x);
        }
        self.second.forward(x)
    }

    fn classify(&self, batch: Points<B>) -> ClassificationOutput<B> {
        let output = self.forward(batch.inputs);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Net<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// Values of all parameters and running statistics, in the order of the module's fields.
pub fn weights<B: Backend, M: Module<B>>(module: &M) -> Vec<Vec<f32>> {
    struct Collect(Vec<Vec<f32>>);

    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data().to_vec().expect("weights are f32"));
        }
    }

    let mut collect = Collect(Vec::new());
    // Making a record updates the running statistics.
    drop(module.clone().into_record());
    module.visit(&mut collect);
    collect.0
}

/// Contents of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Lines of a log.
    Log(String),
    /// A record, in which the order of entries does not matter.
    Record(serde_json::Value),
    /// Anything else.
    Unknown,
}

impl Content {
    fn read(path: &Path) -> Self {
        let text = || std::fs::read_to_string(path).expect("the file is readable text");
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("log") => Self::Log(text()),
            Some("json") => Self::Record(serde_json::from_str(&text()).expect("it is json")),
            _ => Self::Unknown,
        }
    }

    /// Whether the file contains `name`.
    pub fn mentions(&self, name: &str) -> bool {
        match self {
            Self::Log(text) => text.contains(name),
            Self::Record(value) => value.to_string().contains(name),
            Self::Unknown => false,
        }
    }
}

/// Files below a folder, by path.
pub fn files(folder: &Path) -> BTreeMap<String, Content> {
    fn walk(folder: &Path, root: &Path, found: &mut BTreeMap<String, Content>) {
        for entry in std::fs::read_dir(folder).expect("the folder is readable").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, root, found);
            } else {
                let name = path.strip_prefix(root).expect("inside").display().to_string();
                found.insert(name, Content::read(&path));
            }
        }
    }

    let mut found = BTreeMap::new();
    walk(folder, folder, &mut found);
    found.remove("experiment.log");
    found
}
