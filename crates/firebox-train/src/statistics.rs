//! Pools the running statistics of batch normalization over a batch that is run in parts. Each
//! micro-step calls [`Pooled`], if the user asked for it.
//!
//! Each micro-step starts with the statistics from before the batch, and leaves `(1 - m)·before +
//! m·own` for a momentum `m`. The statistics of the whole batch follow from these results. The mean
//! is the mean of the parts' means. By the law of total variance, the variance is the mean of their
//! variances plus the variance of their means. Each part is weighted by its items. Sums are
//! computed in at least 32 bit, over the differences between the means and the first part's mean,
//! because large means that differ slightly would cancel.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};

const MEAN: &str = "running_mean";
const VARIANCE: &str = "running_var";

/// The statistics of one batch.
#[derive(Debug)]
pub(crate) struct Pooled<B: Backend> {
    momentum: f64,
    items: usize,
    /// The number of micro-steps included so far.
    parts: usize,
    /// Keyed by the paths of the modules.
    of: BTreeMap<String, OfModule<B>>,
}

/// The statistics of one module.
#[derive(Clone, Debug)]
struct OfModule<B: Backend> {
    before: Pair<B>,
    /// The mean after the first micro-step.
    first: Option<Tensor<B, 1>>,
    /// Sums over the micro-steps, each term weighted by its share of the items: the difference of
    /// the mean from the first mean, its square, and the variance.
    moved: Tensor<B, 1>,
    squares: Tensor<B, 1>,
    variance: Tensor<B, 1>,
}

/// The mean and the variance of a module.
#[derive(Clone, Debug)]
struct Pair<B: Backend> {
    mean: Tensor<B, 1>,
    variance: Tensor<B, 1>,
}

impl<B: Backend> Pooled<B> {
    /// Starts pooling for a batch of `items` items.
    pub(crate) fn new(momentum: f64, items: usize) -> Self {
        Self { momentum, items, parts: 0, of: BTreeMap::new() }
    }

    /// Called before a micro-step. Resets the module to the statistics from before the batch.
    pub(crate) fn begin<M: Module<B>>(&mut self, module: &M) {
        if self.of.is_empty() {
            let of_module = |before: Pair<B>| {
                let none = wide(before.mean.zeros_like());
                let [moved, squares, variance] = [none.clone(), none.clone(), none];
                OfModule { before, first: None, moved, squares, variance }
            };
            let found = read(module).into_iter();
            self.of = found.map(|(path, pair)| (path, of_module(pair))).collect();
        } else {
            let before = self.of.iter().map(|(path, of)| (path.clone(), of.before.clone()));
            write(module, before.collect());
        }
    }

    /// Called after a micro-step on `items` items.
    pub(crate) fn end<M: Module<B>>(&mut self, module: &M, items: usize) {
        self.parts += 1;
        let share = items as f64 / self.items as f64;
        for (path, Pair { mean, variance }) in read(module) {
            let Some(of) = self.of.get_mut(&path) else { continue };
            let (mean, variance) = (wide(mean), wide(variance));
            let moved = mean.clone() - of.first.get_or_insert(mean).clone();
            of.moved = of.moved.clone() + moved.clone() * share;
            of.squares = of.squares.clone() + moved.clone() * moved * share;
            of.variance = of.variance.clone() + variance * share;
        }
    }

    /// Called after the batch. A batch that ran whole already has its statistics.
    pub(crate) fn finish<M: Module<B>>(self, module: &M) {
        if self.parts < 2 {
            return;
        }
        let momentum = self.momentum;
        let pooled = self.of.into_iter().filter_map(|(path, of)| {
            let dtype = of.before.mean.dtype();
            let mean = of.first? + of.moved.clone();
            let of_means = (of.squares - of.moved.clone() * of.moved).clamp_min(0.0) / momentum;
            let variance = of.variance + of_means;
            Some((path, Pair { mean: mean.cast(dtype), variance: variance.cast(dtype) }))
        });
        write(module, pooled.collect());
    }
}

/// Casts a tensor to 32 bit, unless it is in 64 bit.
fn wide<B: Backend>(tensor: Tensor<B, 1>) -> Tensor<B, 1> {
    if tensor.dtype() == DType::F64 { tensor } else { tensor.cast(DType::F32) }
}

/// The current position of a module visitor.
#[derive(Debug, Default)]
struct Place(Vec<(String, bool)>);

impl Place {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.to_owned(), container == "Struct:BatchNorm"));
    }

    fn exit(&mut self) {
        self.0.pop();
    }

    /// If the visited tensor is a statistic of a batch normalization: the path of that module, and
    /// the name of the statistic.
    fn statistic(&self) -> Option<(String, &str)> {
        let ((name, of_batch_norm), above) = self.0.split_last()?;
        let path: Vec<&str> = above.iter().map(|(name, _)| name.as_str()).collect();
        let is_statistic = *of_batch_norm && (name == MEAN || name == VARIANCE);
        is_statistic.then(|| (path.join("."), name.as_str()))
    }
}

/// Reads the statistics of a module, keyed by the paths of its batch normalizations.
fn read<B: Backend, M: Module<B>>(module: &M) -> BTreeMap<String, Pair<B>> {
    struct Read<B: Backend> {
        place: Place,
        mean: Option<Tensor<B, 1>>,
        found: BTreeMap<String, Pair<B>>,
    }

    impl<B: Backend> ModuleVisitor<B> for Read<B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some((path, name)) = self.place.statistic() else { return };
            let value = Tensor::<B, 1>::from_primitive(param.val().into_primitive());
            if name == MEAN {
                self.mean = Some(value);
            } else if let Some(mean) = self.mean.take() {
                self.found.insert(path, Pair { mean, variance: value });
            }
        }

        fn enter_module(&mut self, name: &str, container: &str) {
            self.place.enter(name, container);
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.place.exit();
        }
    }

    // Making a record applies this thread's pending updates.
    drop(module.clone().into_record());
    let mut read = Read { place: Place::default(), mean: None, found: BTreeMap::new() };
    module.visit(&mut read);
    read.found
}

/// Writes statistics into a module.
fn write<B: Backend, M: Module<B>>(module: &M, statistics: BTreeMap<String, Pair<B>>) {
    struct Write<B: Backend> {
        place: Place,
        statistics: BTreeMap<String, Pair<B>>,
    }

    impl<B: Backend> ModuleMapper<B> for Write<B> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let statistic = self.place.statistic();
            let pair = statistic.and_then(|(path, name)| Some((self.statistics.get(&path)?, name)));
            let Some((pair, name)) = pair else { return param };
            let value = if name == MEAN { &pair.mean } else { &pair.variance };
            let value = Tensor::from_primitive(value.clone().into_primitive());
            Param::initialized(param.id, value)
        }

        fn enter_module(&mut self, name: &str, container: &str) {
            self.place.enter(name, container);
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.place.exit();
        }
    }

    // Modules share their running statistics with their clones.
    drop(module.clone().map(&mut Write { place: Place::default(), statistics }));
}
