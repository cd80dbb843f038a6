//! Programs in which a split batch, or one that weighs nothing, has another gradient than one would
//! think, and steps that need other memory than their batches show. Each trains as burn does, is
//! refused by name, or says what it takes.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::{relu, sigmoid};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    InferenceStep, LearnerModel, RegressionOutput, SequenceOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use firebox::{
    Bytes, Fitted, Learner, LearnerBuilder, LossReduction, MicroBatch, PeakAlloc, SplitCheck,
    TrainError,
};
use net::{Kind, Net, numbers, training};

mod net;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The most that the heap held where a step looked, and the fewest items that were validated.
static MOST: AtomicUsize = AtomicUsize::new(0);
static FEWEST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// One test at a time: the allocator counts for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

macro_rules! steps {
    ($model:ty, $batch:ty, $output:ty) => {
        impl TrainStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> TrainOutput<$output> {
                let output = self.output(batch);
                let output = TrainOutput::new(self, output.loss.backward(), output);
                MOST.fetch_max(HEAP.current_usage(), Relaxed);
                output
            }
        }

        impl InferenceStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> $output {
                FEWEST.fetch_min(batch.items().expect("it can be cut"), Relaxed);
                self.output(batch)
            }
        }
    };
}

struct Make<O>(fn(&[usize], &Device) -> O);

impl<O: 'static> Batcher<usize, O> for Make<O> {
    fn batch(&self, items: Vec<usize>, device: &Device) -> O {
        (self.0)(&items, device)
    }
}

fn loader<O: Clone + Send + Debug + 'static>(
    make: fn(&[usize], &Device) -> O,
    items: Range<usize>,
    batch: usize,
) -> Arc<dyn DataLoader<O>> {
    let items = InMemDataset::new(items.collect::<Vec<usize>>());
    DataLoaderBuilder::new(Make(make)).batch_size(batch).build(items)
}

type Train<M> = Arc<dyn DataLoader<<M as TrainStep>::Input>>;
type Valid<M> = Arc<dyn DataLoader<<M as InferenceStep>::Input>>;

fn supervised<M: LearnerModel>(
    folder: &std::path::Path,
    train: Train<M>,
    valid: Valid<M>,
) -> SupervisedTraining<M> {
    SupervisedTraining::new(folder, train, valid)
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(1)
}

fn fit<M: LearnerModel>(
    model: M,
    builder: LearnerBuilder,
    (optim, lr): (ModuleOptimizer, f64),
    (train, valid): (Train<M>, Valid<M>),
) -> Result<Fitted<M>, TrainError>
where
    <M as TrainStep>::Input: MicroBatch,
    <M as InferenceStep>::Input: MicroBatch,
{
    let folder = tempfile::tempdir().expect("a folder");
    let learner = builder.quiet().build(model, optim, lr);
    learner.fit(supervised(folder.path(), train, valid)).map_err(|error| error.cause)
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn auto(memory: Bytes) -> LearnerBuilder {
    Learner::builder().auto_batch().memory(memory)
}

fn table(items: &[usize], columns: usize, device: &Device) -> Tensor<2> {
    let number = |item: usize, at: usize| ((item * 31 + at * 17) % 97) as f32 / 97.0 - 0.5;
    let all: Vec<f32> =
        items.iter().flat_map(|item| (0..columns).map(move |at| number(*item, at))).collect();
    Tensor::from_data(TensorData::new(all, [items.len(), columns]), device)
}

fn column(items: &[usize], of: fn(usize) -> f32, device: &Device) -> Tensor<2> {
    let all: Vec<f32> = items.iter().map(|item| of(*item)).collect();
    Tensor::from_data(TensorData::new(all, [items.len(), 1]), device)
}

#[derive(Clone, Debug, MicroBatch)]
struct Rows {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(outputs: usize) -> Self {
        let device = device();
        device.seed(7);
        Self {
            first: LinearConfig::new(128, 1024).init(&device),
            second: LinearConfig::new(1024, outputs).init(&device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

/// burn's cross entropy with class weights; the rare class comes last.
#[derive(Module, Debug)]
struct Imbalanced {
    mlp: Mlp,
}

impl Imbalanced {
    fn output(&self, batch: Rows) -> RegressionOutput {
        let output = self.mlp.forward(batch.inputs);
        let targets = batch.targets.clone().squeeze_dim::<1>(1).int();
        let loss = CrossEntropyLossConfig::new()
            .with_weights(Some(vec![1.0, 20.0]))
            .init(&output.device())
            .forward(output.clone(), targets);
        RegressionOutput::new(loss, output, batch.targets)
    }
}

steps!(Imbalanced, Rows, RegressionOutput);

fn rare(items: &[usize], device: &Device) -> Rows {
    let targets = column(items, |item| f32::from(item >= 768), device);
    Rows { inputs: table(items, 128, device), targets }
}

#[test]
fn class_weights_that_no_few_items_show_are_found() {
    let _alone = alone();
    let loaders = || (loader(rare, 0..1024, 1024), loader(rare, 0..8, 8));
    let model = Imbalanced { mlp: Mlp::new(2) };
    let trained = fit(model, auto(Bytes::mib(8)), (SgdConfig::new().init(), 1.0), loaders());
    let error = trained.err().expect("class weights are not items");
    assert!(matches!(error, TrainError::Coupled { .. }), "{error}");
}

#[test]
fn class_weights_that_a_later_batch_shows_are_found() {
    let _alone = alone();
    // The first batch has items of one class alone.
    let later = |items: &[usize], device: &Device| {
        let targets = column(items, |item| f32::from(item >= 500 && item % 7 == 0), device);
        Rows { inputs: table(items, 128, device), targets }
    };
    let train = |items: usize| {
        let loaders = (loader(later, 0..items, 500), loader(later, 0..8, 8));
        let model = Imbalanced { mlp: Mlp::new(2) };
        fit(model, auto(Bytes::mib(6)), (SgdConfig::new().init(), 1e-3), loaders)
    };
    let split = train(500).expect("its items weigh alike");
    assert!(split.plans[0].plan.len() > 1 && split.split_check == SplitCheck::Agreed);
    let error = train(3000).err().expect("those of later batches do not");
    assert!(matches!(error, TrainError::Coupled { .. }), "{error}");
}

#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Boxes::objects)]
struct Boxes {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

impl Boxes {
    fn objects(&self) -> f64 {
        self.targets.clone().sum().into_data().iter::<f64>().sum()
    }
}

/// A sum over objects and background, by the number of objects, but at least one.
#[derive(Module, Debug)]
struct Detector {
    mlp: Mlp,
}

impl Detector {
    fn output(&self, batch: Boxes) -> RegressionOutput {
        let objects = batch.objects().max(1.0) as f32;
        let output = sigmoid(self.mlp.forward(batch.inputs));
        let loss = (output.clone() - batch.targets.clone()).square().sum() / objects;
        RegressionOutput::new(loss, output, batch.targets)
    }
}

steps!(Detector, Boxes, RegressionOutput);

fn boxes(items: &[usize], device: &Device) -> Boxes {
    let targets = column(items, |item| f32::from(item < 512), device);
    Boxes { inputs: table(items, 128, device), targets }
}

#[test]
fn a_part_without_objects_is_not_left_out_in_silence() {
    let _alone = alone();
    let loaders = (loader(boxes, 0..1024, 1024), loader(boxes, 0..8, 8));
    let model = Detector { mlp: Mlp::new(1) };
    let trained = fit(model, auto(Bytes::mib(8)), (SgdConfig::new().init(), 1.0), loaders);
    let error = trained.err().expect("what has no object is divided by one");
    let is_told = matches!(error, TrainError::WeighsNothing | TrainError::Coupled { .. });
    assert!(is_told, "{error}");
}

#[test]
fn a_batch_without_objects_is_trained_on_as_burn_does() {
    let _alone = alone();
    let loaders = || (loader(boxes, 512..576, 64), loader(boxes, 0..8, 8));
    let sgd = || SgdConfig::new().init();
    let model = || Detector { mlp: Mlp::new(1) };
    let fitted = fit(model(), auto(Bytes::gib(1)), (sgd(), 1.0), loaders()).expect("it fits");
    let folder = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders();
    let of_burn = supervised::<Detector>(folder.path(), train, valid)
        .launch(burn::train::Learner::new(model(), sgd(), 1.0));
    assert!(numbers(&fitted.model) == numbers(&of_burn.model), "it is left out");
}

#[derive(Module, Debug)]
struct Heavy {
    layers: Vec<Linear>,
}

impl Heavy {
    fn output(&self, batch: Rows) -> RegressionOutput {
        let hidden = self.layers.iter().fold(batch.inputs, |x, layer| layer.forward(x));
        let output = hidden.mean_dim(1);
        let loss = (output.clone() - batch.targets.clone()).square().mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

steps!(Heavy, Rows, RegressionOutput);

fn wide(items: &[usize], device: &Device) -> Rows {
    Rows { inputs: table(items, 512, device), targets: column(items, |_| 1.0, device) }
}

#[test]
fn planning_takes_no_more_than_training() {
    let _alone = alone();
    let train = |memory: Bytes| {
        let layers = (0..8).map(|_| LinearConfig::new(512, 512).init(&device())).collect();
        let model = Heavy { layers };
        let parameters = 4 * numbers(&model).len();
        let before = HEAP.current_usage();
        MOST.store(0, Relaxed);
        let loaders = (loader(wide, 0..97, 64), loader(wide, 0..33, 33));
        let fitted = fit(model, auto(memory), (AdamConfig::new().init(), 1e-3), loaders);
        (fitted.expect("it fits"), MOST.load(Relaxed) - before + parameters)
    };
    for budget in [Bytes::gib(1), Bytes::mib(48)] {
        let (fitted, most) = train(budget);
        let planning = fitted.plans.iter().map(|report| report.planning).max().expect("two plans");
        println!("{planning} for planning, {most} bytes in steps, {} measured", fitted.measured);
        assert!(most as u64 <= planning.max(fitted.measured).get(), "{most} bytes");
        // A second optimizer's state is not made beside training's.
        assert!(fitted.measured <= budget && most as u64 <= budget.get(), "{most} bytes");
        let [_, last] = &fitted.plans[..] else { panic!("two sizes of batches") };
        assert!(last.rehearsed.is_empty() && last.planning == Bytes::ZERO, "{}", last.line());
    }
}

/// Every split has the sum of gradients beside those of a part, and a whole batch has not.
#[test]
fn what_fits_whole_alone_is_not_refused() {
    let _alone = alone();
    let train = |memory: Bytes| {
        let layers = (0..8).map(|_| LinearConfig::new(512, 512).init(&device())).collect();
        let loaders = (loader(wide, 0..64, 64), loader(wide, 0..33, 33));
        fit(Heavy { layers }, auto(memory), (AdamConfig::new().init(), 1e-3), loaders)
    };
    let fitted = train(Bytes::mib(40)).expect("it fits whole");
    let plan = &fitted.plans[0].plan;
    assert!(plan.is_whole() && fitted.measured <= plan.budget(), "{plan}, {}", fitted.measured);
    assert!(matches!(train(Bytes::mib(24)).err(), Some(TrainError::DoesNotFit(_))));
}

#[derive(Clone, Debug, MicroBatch)]
struct Signals {
    inputs: Tensor<2>,
}

#[derive(Module, Debug)]
struct Pooled {
    first: Linear,
    second: Linear,
}

impl Pooled {
    fn new() -> Self {
        let device = device();
        Self {
            first: LinearConfig::new(1, 256).init(&device),
            second: LinearConfig::new(256, 1).init(&device),
        }
    }

    fn output(&self, batch: Signals) -> RegressionOutput {
        let [items, length] = batch.inputs.dims();
        let hidden = relu(self.first.forward(batch.inputs.reshape([items, length, 1])));
        MOST.fetch_max(HEAP.current_usage(), Relaxed);
        let output: Tensor<2> = self.second.forward(hidden).mean_dim(1).squeeze_dim(1);
        RegressionOutput::new(output.clone().square().mean(), output.clone(), output)
    }
}

steps!(Pooled, Signals, RegressionOutput);

fn short(items: &[usize], device: &Device) -> Signals {
    Signals { inputs: table(items, 16, device) }
}

fn long(items: &[usize], device: &Device) -> Signals {
    Signals { inputs: table(items, 1024, device) }
}

#[test]
fn validation_on_longer_items_stays_within_the_budget() {
    let _alone = alone();
    // One long item takes 1 MiB.
    let (model, budget) = (Pooled::new(), Bytes::mib(24));
    drop(numbers(&model));
    let before = HEAP.current_usage();
    MOST.store(0, Relaxed);
    let loaders = (loader(short, 0..64, 64), loader(long, 0..64, 64));
    let builder = auto(budget).strict();
    let fitted = fit(model, builder, (SgdConfig::new().init(), 1e-3), loaders).expect("it fits");
    let most = MOST.load(Relaxed) - before;
    assert!(most as u64 <= budget.get(), "{most} bytes of {budget}");
    assert!(fitted.measured <= budget, "{} of {budget}", fitted.measured);
}

#[test]
fn validation_is_not_cut_without_need() {
    let _alone = alone();
    FEWEST.store(usize::MAX, Relaxed);
    let loaders = (loader(short, 0..65, 64), loader(short, 0..32, 32));
    let (model, sgd) = (Pooled::new(), SgdConfig::new().init());
    fit(model, auto(Bytes::gib(1)), (sgd, 1e-3), loaders).expect("it fits");
    assert_eq!(FEWEST.load(Relaxed), 32);
}

#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Spans::tokens)]
struct Spans {
    inputs: Tensor<3>,
    mask: Tensor<2>,
    targets: Tensor<2, Int>,
}

impl Spans {
    fn tokens(&self) -> f64 {
        self.mask.clone().sum().into_data().iter::<f64>().sum()
    }
}

#[derive(Module, Debug)]
struct Tagger {
    first: Linear,
    second: Linear,
}

impl Tagger {
    /// Leaves out the padding that no item of the batch needs.
    fn output(&self, batch: Spans) -> SequenceOutput {
        let [items, _, width] = batch.inputs.dims();
        let longest = batch.mask.clone().sum_dim(1).max().into_scalar::<f32>() as usize;
        let inputs = batch.inputs.slice([0..items, 0..longest, 0..width]);
        let mask = batch.mask.slice([0..items, 0..longest]);
        let targets = batch.targets.slice([0..items, 0..longest]);
        let logits = self.second.forward(relu(self.first.forward(inputs)));
        let errors: Tensor<2> = logits.clone().square().sum_dim(2).squeeze_dim(2);
        let loss = (errors * mask.clone()).sum() / mask.sum();
        SequenceOutput { loss, logits, predictions: None, targets }
    }
}

steps!(Tagger, Spans, SequenceOutput);

fn spans(items: &[usize], device: &Device) -> Spans {
    let real = |item: usize, at: usize| f32::from(at < if item < 128 { 64 } else { 48 });
    let mask: Vec<f32> =
        items.iter().flat_map(|item| (0..64).map(move |at| real(*item, at))).collect();
    Spans {
        inputs: table(items, 64 * 32, device).reshape([items.len(), 64, 32]),
        mask: Tensor::from_data(TensorData::new(mask, [items.len(), 64]), device),
        targets: Tensor::zeros([items.len(), 64], device),
    }
}

#[test]
fn outputs_of_different_lengths_are_seen_apart() {
    let _alone = alone();
    let model = Tagger {
        first: LinearConfig::new(32, 256).init(&device()),
        second: LinearConfig::new(256, 8).init(&device()),
    };
    let loaders = (loader(spans, 0..256, 256), loader(spans, 0..8, 8));
    let fitted = fit(model, auto(Bytes::mib(24)), (SgdConfig::new().init(), 1e-3), loaders);
    assert!(fitted.expect("it fits").plans[0].plan.len() > 1);
}

/// Episodes of four classes with 16 items each.
#[derive(Module, Debug)]
struct Episodes {
    mlp: Mlp,
}

impl Episodes {
    fn output(&self, batch: Rows) -> RegressionOutput {
        let output = self.mlp.forward(batch.inputs);
        let classes = output.clone().reshape([4, 16, 4]);
        let loss = (classes.clone() - classes.mean_dim(1)).square().mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

steps!(Episodes, Rows, RegressionOutput);

#[test]
fn a_step_that_needs_its_whole_batch_runs_whole() {
    let _alone = alone();
    for builder in [Learner::builder().memory(Bytes::gib(1)), auto(Bytes::gib(1))] {
        let loaders = (loader(rare, 0..128, 64), loader(rare, 0..64, 64));
        let model = Episodes { mlp: Mlp::new(4) };
        let fitted = fit(model, builder, (SgdConfig::new().init(), 1e-3), loaders);
        let report = &fitted.expect("it fits").plans[0];
        assert!(report.plan.is_whole() && report.unpredicted.is_some(), "{report}");
    }
}

#[test]
fn a_seeded_run_is_resumed_bit_for_bit() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let train = |epochs: usize, from: Option<usize>| {
        let training = training(folder.path()).num_epochs(epochs).with_default_checkpointers();
        let training = match from {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        };
        let model = Net::new(Kind::Dropout, &device());
        let builder = auto(Bytes::gib(1)).seed(3).quiet();
        let learner = builder.build(model, AdamConfig::new().init(), 1e-2);
        numbers(&learner.fit(training).map_err(|error| error.cause).expect("it fits").model)
    };
    train(1, None);
    let resumed = train(2, Some(1));
    assert!(resumed == train(2, None));
}

/// A sum over the items of a batch.
#[derive(Module, Debug)]
struct Summed {
    mlp: Mlp,
}

impl Summed {
    fn output(&self, batch: Rows) -> RegressionOutput {
        let output = self.mlp.forward(batch.inputs);
        let loss = (output.clone() - batch.targets.clone()).square().sum();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

steps!(Summed, Rows, RegressionOutput);

#[test]
fn sums_are_told_from_means() {
    let _alone = alone();
    let train = |reduction: LossReduction| {
        let loaders = (loader(rare, 0..1024, 1024), loader(rare, 0..8, 8));
        let builder = auto(Bytes::mib(8)).reduction(reduction);
        fit(Summed { mlp: Mlp::new(1) }, builder, (SgdConfig::new().init(), 1e-6), loaders)
    };
    let error = train(LossReduction::Mean).err().expect("it is a sum");
    assert!(matches!(error, TrainError::Coupled { .. }), "{error}");
    let split = train(LossReduction::Sum).expect("it fits");
    assert!(split.plans[0].plan.len() > 1 && split.split_check == SplitCheck::Agreed);
}
