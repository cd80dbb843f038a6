//! Tests saved traces: what a trace recorded on the CPU says about a card equals what planning with
//! the model itself says, at sizes that were not recorded; and files.

#![cfg(feature = "flex")]

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use firebox::dry::{Card, Cuda, DryPooledCuda, Lease};
use firebox::plan::{InstantiateError, LoadError, SavedPlanner, SavedTrace};
use firebox::{Bytes, Lazy, Learner, MicroBatch, PlanReport, Sizing, TrainError, TrainingBackend};
use firebox_testing::task::{Net, PointBatcher, points};
use firebox_testing::zoo::{self, Zoo};

type Host = Autodiff<Lazy<Flex>>;
type Twin = Autodiff<Lazy<DryPooledCuda>>;

/// Items of the batch that is recorded.
const RECORDED: usize = 24;

/// Batches and micro-batches that are planned: whole, equal parts, a smaller last part of several
/// items and of one.
const PLANNED: [(usize, usize); 3] = [(37, 37), (37, 11), (31, 10)];

/// Models are recorded one after the other. burn-autodiff loses gradients of concatenated tensors
/// while another thread runs a backward pass.
static ALONE: Mutex<()> = Mutex::new(());

/// A model of the zoo that the Learner trains on backend `B`.
trait Subject<B: AutodiffBackend>:
    Zoo<B>
    + TrainStep<Input = <Self as Zoo<B>>::Batch>
    + AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>
    + std::fmt::Display
    + 'static
{
}

impl<B: AutodiffBackend, M> Subject<B> for M where
    M: Zoo<B>
        + TrainStep<Input = <M as Zoo<B>>::Batch>
        + AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>
        + std::fmt::Display
        + 'static
{
}

fn batch<B: AutodiffBackend, M: Subject<B>>(
    items: usize,
    device: &B::Device,
) -> <M as Zoo<B>>::Batch {
    M::batch(&(0..items).collect::<Vec<_>>(), device)
}

/// The plan that the model itself gives.
fn planned<B, M>(items: usize, micro_batch: usize, device: &B::Device) -> PlanReport
where
    B: TrainingBackend,
    M: Subject<B>,
{
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(14)).quiet();
    // A saved trace knows no outputs of whole batches.
    let builder = builder.micro_batch(micro_batch).metrics_see_parts();
    let learner = builder.build(M::new(device), AdamConfig::new().init(), 1e-3);
    learner.plan(&batch::<B, M>(items, device)).expect("it fits")
}

fn saved<M: Subject<Host>>(items: usize) -> Result<SavedTrace, TrainError> {
    let device = Default::default();
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(14));
    let learner = builder.build(M::new(&device), AdamConfig::new().init(), 1e-3);
    learner.trace(&batch::<Host, M>(items, &device))
}

fn planner(trace: &SavedTrace, card: &Card) -> SavedPlanner {
    SavedPlanner::new(card.name(), card.model(trace.about().int), Bytes::gib(14))
}

fn check<H: Subject<Host>, T: Subject<Twin>>() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let saved = saved::<H>(RECORDED).expect("it follows rules");
    let file = saved.to_bytes();
    println!("{}: {} in the file", H::NAME, Bytes::new(file.len() as u64));
    let saved = SavedTrace::from_bytes(&file).expect("it was just written");
    let card = Card::named("T4").expect("in the table");
    let lease = Lease::<Cuda>::take(&card.properties()).expect("a device is free");
    for (items, micro_batch) in PLANNED {
        let planner = planner(&saved, &card).sizing(Sizing::Fixed(micro_batch.into()));
        let ours = planner.plan(&saved, items).expect("it fits");
        let theirs = planned::<Twin, T>(items, micro_batch, lease.device());
        let of = |report: &PlanReport| {
            let PlanReport { plan, modules, paging, .. } = report.clone();
            (plan.split(), plan.peak(), modules, paging)
        };
        assert_eq!(of(&ours), of(&theirs), "{} of {items} by {micro_batch}", H::NAME);
    }
}

macro_rules! models {
    ($($(#[$attribute:meta])? $test:ident: $model:ident;)*) => {$(
        #[test]
        $(#[$attribute])?
        fn $test() {
            check::<zoo::$model<Host>, zoo::$model<Twin>>();
        }
    )*};
}

// The others take half a minute each: `cargo test -p firebox-tests --test saved -- --ignored`.
models! {
    mlp: Mlp;
    gpt: Gpt;
    #[ignore = "slow"] reader: Reader;
    #[ignore = "slow"] resnet: ResNet;
    #[ignore = "slow"] cnn: Cnn;
    #[ignore = "slow"] unet: UNet;
    #[ignore = "slow"] encoder: Encoder;
    #[ignore = "slow"] lstm: Recurrent;
    #[ignore = "slow"] autoencoder: Autoencoder;
    #[ignore = "slow"] siamese: Siamese;
}

#[test]
fn a_small_batch_tells_about_few_splits() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let trace = saved::<zoo::Mlp<Host>>(4).expect("it follows rules");
    let planner = planner(&trace, &Card::named("T4").expect("in the table"));
    planner.plan(&trace, 1000).expect("whole batches are known");
    let by = |size: usize| planner.clone().sizing(Sizing::Fixed(size.into())).plan(&trace, 1000);
    let error = by(300).expect_err("no such split was recorded");
    assert!(
        matches!(error, TrainError::Saved(InstantiateError::NotRecorded { items: 4, .. })),
        "{error}"
    );
    let enough = error.to_string();
    let enough = enough.split("on a batch of ").last().and_then(|rest| rest.split(' ').next());
    let enough: usize = enough.expect("a number").parse().expect("a number");
    let trace = saved::<zoo::Mlp<Host>>(enough).expect("it follows rules");
    planner.sizing(Sizing::Fixed(300.into())).plan(&trace, 1000).expect("now it is known");
}

/// Trains three batches, with the trace saved to `path`.
fn trained(path: &Path) -> Result<usize, TrainError> {
    let folder = tempfile::tempdir().expect("a folder");
    let device = Default::default();
    let loader = DataLoaderBuilder::new(PointBatcher).batch_size(32);
    let validating = DataLoaderBuilder::new(PointBatcher).batch_size(32);
    let training = SupervisedTraining::new(
        folder.path(),
        loader.build(InMemDataset::new(points(96))),
        validating.build(InMemDataset::new(points(32))),
    )
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(1);
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .save_trace(path)
        .quiet()
        .build(Net::<Host>::new(&device), AdamConfig::new().init(), 1e-2)
        .fit(training);
    fitted.map(|fitted| fitted.plans.len()).map_err(|error| error.into_parts().0)
}

#[test]
fn training_saves_a_trace_or_says_why_not() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("step.trace");
    assert!(trained(&path).expect("it fits") > 0);
    let trace = SavedTrace::load(&path).expect("it was written");
    assert_eq!((trace.about().items, trace.about().model.as_str()), (32, "Net"));
    planner(&trace, &Card::named("T4").expect("in the table")).plan(&trace, 4096).expect("it fits");
    let error = trained(&folder.path().join("none/step.trace")).expect_err("there is no folder");
    assert!(matches!(error, TrainError::TraceNotWritten { .. }), "{error}");
}

#[test]
fn files_that_are_none_of_ours_are_named() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = saved::<zoo::Mlp<Host>>(3).expect("it follows rules").to_bytes();
    let load = |bytes: &[u8]| SavedTrace::from_bytes(bytes).expect_err("it is not valid");
    assert!(matches!(load(b""), LoadError::Foreign));
    assert!(matches!(load(&[0; 4096]), LoadError::Foreign));
    for end in 14..bytes.len() {
        assert!(matches!(load(&bytes[..end]), LoadError::Truncated { .. }), "{end}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(load(&longer), LoadError::Damaged));
    for format in [bytes[14] - 1, bytes[14] + 1] {
        let mut other = bytes.clone();
        other[14] = format;
        assert!(matches!(load(&other), LoadError::OtherFormat { .. }));
    }
    for at in (62..bytes.len()).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(matches!(load(&damaged), LoadError::Damaged), "{at}");
    }
}
