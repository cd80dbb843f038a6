//! The optimizer's state is parked between steps: the same bits with any optimizer, and less
//! memory.

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::activation::gelu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
use firebox::plan::PlanError;
use firebox::{Bytes, Fitted, Lazy, Learner, MicroBatch, Park, TrainError};
use firebox_testing::task::{random_state, weights};

type B = Autodiff<Lazy<Flex>>;

const WIDTH: usize = 192;
const LAYERS: usize = 5;
const ITEMS: usize = 12;
const PARAMETERS: Bytes = Bytes::new((LAYERS * WIDTH * WIDTH * 4) as u64);

#[derive(Clone, Debug, MicroBatch)]
struct Rows<B: Backend> {
    /// `[items, WIDTH]`
    rows: Tensor<B, 2>,
}

#[derive(Clone)]
struct RowBatcher;

impl<B: Backend> Batcher<B, usize, Rows<B>> for RowBatcher {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Rows<B> {
        let number = |item: usize, at: usize| ((item * 37 + at * 11) % 97) as f32 / 48.0 - 1.0;
        let row = |item: &usize| {
            let item = *item;
            (0..WIDTH).map(move |at| number(item, at))
        };
        let rows: Vec<f32> = items.iter().flat_map(row).collect();
        Rows { rows: Tensor::from_data(TensorData::new(rows, [items.len(), WIDTH]), device) }
    }
}

/// Mostly parameters.
#[derive(Module, Debug)]
struct Wide<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Wide<B> {
    fn new(device: &B::Device) -> Self {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        Self { layers: (0..LAYERS).map(layer).collect() }
    }

    fn output(&self, batch: Rows<B>) -> RegressionOutput<B> {
        let rows = batch.rows;
        let target = rows.clone().powf_scalar(2.0);
        let output = self.layers.iter().fold(rows, |x, layer| gelu(layer.forward(x)));
        let loss = (output.clone() - target.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, target)
    }
}

impl<B: AutodiffBackend> TrainStep for Wide<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> TrainOutput<Self::Output> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Wide<B> {
    type Input = Rows<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Rows<B>) -> Self::Output {
        self.output(batch)
    }
}

/// How a run differs from the usual one.
#[derive(Clone)]
struct How<'a> {
    park: Option<Park>,
    memory: Bytes,
    micro_batch: usize,
    /// Where checkpoints are, and the epochs to begin and to end with.
    checkpoints: Option<(&'a Path, usize, usize)>,
}

impl How<'_> {
    fn of(park: Option<Park>) -> Self {
        Self { park, memory: Bytes::gib(4), micro_batch: 5, checkpoints: None }
    }
}

type Model = Wide<B>;

fn train<O>(optimizer: O, how: &How<'_>) -> Result<Fitted<Wide<Lazy<Flex>>>, TrainError>
where
    O: Optimizer<Model, B> + 'static,
{
    let device = Default::default();
    B::seed(&device, 3);
    let model = Wide::<B>::new(&device);
    let own = tempfile::tempdir().expect("a folder");
    let (folder, from, to) = how.checkpoints.unwrap_or((own.path(), 1, 2));
    let loader = DataLoaderBuilder::new(RowBatcher).batch_size(ITEMS).shuffle(1);
    let loader = loader.build(InMemDataset::new((0..30).collect()));
    let valid = DataLoaderBuilder::new(RowBatcher).batch_size(ITEMS);
    let valid = valid.build(InMemDataset::new((0..ITEMS).collect()));
    let training = SupervisedTraining::new(folder, loader, valid)
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(to);
    let training = match how.checkpoints {
        Some(_) => {
            let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
            let training = training.with_file_checkpointer(recorder);
            if from > 1 { training.checkpoint(from - 1) } else { training }
        }
        None => training,
    };
    let builder = Learner::builder().auto_batch().memory(how.memory).seed(5).quiet();
    let builder = builder.micro_batch(how.micro_batch);
    let builder = match &how.park {
        Some(park) => builder.park_optimizer(park.clone()),
        None => builder,
    };
    let fitted = builder.build(model, optimizer, 1e-3).fit(training);
    fitted.map_err(|error| error.into_parts().0)
}

fn bits(fitted: &Fitted<Wide<Lazy<Flex>>>) -> Vec<u32> {
    let weights = weights::<Lazy<Flex>, _>(&fitted.model).concat();
    weights.into_iter().map(f32::to_bits).collect()
}

/// Trains with the state on the device, and parked in a file. Returns what was parked.
fn same_bits<O: Optimizer<Model, B> + 'static>(optimizer: O) -> Bytes {
    let _lock = random_state();
    let folder = tempfile::tempdir().expect("a folder");
    let park = Park::Disk(folder.path().to_owned());
    let usual = train(optimizer.clone(), &How::of(None)).expect("it fits");
    let parked = train(optimizer, &How::of(Some(park))).expect("it fits");
    assert!(bits(&usual) == bits(&parked), "the same bits");
    let report = parked.report.expect("it was planned");
    assert_eq!(report.plan.to_string(), "12 = 2 x 5 + 1 x 2");
    let before = usual.report.expect("it was planned");
    assert_eq!((before.parked, before.optimizer_state), (Bytes::ZERO, report.optimizer_state));
    assert!(report.parked <= report.optimizer_state, "{report}");
    let saved = before.predicted() - report.predicted();
    assert!(saved >= report.parked.scale(0.5), "{saved} less on the device: {report}");
    report.parked
}

#[test]
fn every_optimizer_ends_with_the_same_bits() {
    let parameters = |times: u64| PARAMETERS * times;
    assert_eq!(same_bits(AdamConfig::new().init()), parameters(2));
    let amsgrad = AdamWConfig::new().with_amsgrad(true).init();
    assert_eq!(same_bits(amsgrad), parameters(3));
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    assert_eq!(same_bits(momentum.init()), parameters(1));
    let centered = RmsPropConfig::new().with_centered(true).with_momentum(0.9);
    assert!(same_bits(centered.init()) >= parameters(2));
    let decayed = AdaGradConfig::new().with_weight_decay(Some(WeightDecayConfig::new(1e-4)));
    assert_eq!(same_bits(decayed.init()), parameters(1));
    assert_eq!(same_bits(MuonConfig::new().init()), parameters(1));
    assert_eq!(same_bits(SgdConfig::new().init()), Bytes::ZERO);
}

#[test]
fn what_does_not_fit_with_the_state_on_the_device_fits_without() {
    let _lock = random_state();
    let adam = || AdamConfig::new().init();
    let usual = train(adam(), &How::of(None)).expect("it fits");
    let needed = usual.report.expect("it was planned").predicted();
    // Two times the parameters less, of a little more than five times.
    let memory = needed - PARAMETERS;
    let refused = train(adam(), &How { memory, ..How::of(None) }).expect_err("it does not fit");
    let TrainError::Plan { cause, .. } = &refused else { panic!("{refused}") };
    let need = match &**cause {
        PlanError::DoesNotFit(error) => &error.need,
        PlanError::FixedDoesNotFit(error) => &error.misfit.need,
        cause => panic!("{cause}"),
    };
    let parked = need.parked.expect("parking was tried");
    assert!(parked.on_host && parked.peak <= memory, "{parked:?}");
    let advice = "With `.park_optimizer(Park::Disk(folder))` it fits";
    assert!(refused.to_string().contains(advice), "{refused}");
    let folder = tempfile::tempdir().expect("a folder");
    let park = Some(Park::Disk(folder.path().to_owned()));
    let fitted = train(adam(), &How { memory, ..How::of(park) }).expect("it fits");
    let used = fitted.memory.expect("known");
    assert!(used.predicted <= memory, "{} of {memory}", used.predicted);
    assert!(used.predicted + PARAMETERS.scale(1.5) < needed, "{} of {needed}", used.predicted);
    let report = fitted.report.expect("it was planned").to_string();
    assert!(report.contains("of optimizer state between steps"), "{report}");
}

#[test]
fn a_resumed_run_parks_what_the_checkpoint_brings() {
    let _lock = random_state();
    let adam = || AdamConfig::new().init();
    let (whole, parts) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("one"));
    let folder = tempfile::tempdir().expect("a folder");
    let park = Some(Park::Disk(folder.path().to_owned()));
    let run = |park: &Option<Park>, checkpoints| {
        let how = How { checkpoints: Some(checkpoints), ..How::of(park.clone()) };
        train(adam(), &how).expect("it fits")
    };
    let uninterrupted = run(&None, (whole.path(), 1, 3));
    let first = run(&park, (parts.path(), 1, 1));
    let resumed = run(&park, (parts.path(), 2, 3));
    assert!(bits(&uninterrupted) == bits(&resumed), "the same bits");
    let predicted = |fitted: &Fitted<Wide<Lazy<Flex>>>| fitted.memory.expect("known").predicted;
    // The state counts as parked from the first batch on.
    let (first, resumed) = (predicted(&first), predicted(&resumed));
    assert!(resumed <= first.scale(1.02), "{resumed} after {first}");
    // A run without parking goes on from it as well.
    let (longer, back) = (run(&None, (whole.path(), 4, 4)), run(&None, (parts.path(), 4, 4)));
    assert!(bits(&longer) == bits(&back), "the same bits");
}

#[test]
fn where_host_memory_is_the_device_parking_there_changes_nothing() {
    let _lock = random_state();
    let usual = train(AdamConfig::new().init(), &How::of(None)).expect("it fits");
    let parked = train(AdamConfig::new().init(), &How::of(Some(Park::Host))).expect("it fits");
    assert!(bits(&usual) == bits(&parked), "the same bits");
    assert_eq!(parked.report.expect("it was planned").parked, Bytes::ZERO);
}

#[test]
fn a_folder_that_is_not_there_is_an_error_before_training() {
    let _lock = random_state();
    let park = Park::Disk("/nowhere/at/all".into());
    let error = train(AdamConfig::new().init(), &How::of(Some(park))).expect_err("it is not there");
    let text = error.to_string();
    assert!(matches!(error, TrainError::NotParked { .. }), "{text}");
    assert!(text.contains("/nowhere/at/all") && text.contains("another folder"), "{text}");
}
