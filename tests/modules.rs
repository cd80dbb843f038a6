//! Tests how much of the bytes at the peak is attributed to modules, for every model of the zoo.
//! The batch belongs to none, and does not count.

#![cfg(feature = "flex")]

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::train::{InferenceStep, TrainStep};
use firebox::trace::Category;
use firebox::{Bytes, Lazy, Learner, MicroBatch, PlanReport};
use firebox_testing::zoo::{self, Zoo};

type B = Autodiff<Lazy<Flex>>;

/// Items of a batch.
const ITEMS: usize = 24;

/// The least share of the bytes at the peak that belongs to a module.
const LEAST: f64 = 0.95;

/// A model of the zoo that the Learner trains.
trait Subject:
    Zoo<B>
    + TrainStep<Input = <Self as Zoo<B>>::Batch>
    + AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>
    + std::fmt::Display
    + 'static
{
}

impl<M> Subject for M where
    M: Zoo<B>
        + TrainStep<Input = <M as Zoo<B>>::Batch>
        + AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>
        + std::fmt::Display
        + 'static
{
}

fn plan<M: Subject>(micro_batch: usize) -> PlanReport {
    let device = Default::default();
    let numbers: Vec<usize> = (0..ITEMS).collect();
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(8)).quiet();
    let learner =
        builder.micro_batch(micro_batch).build(M::new(&device), AdamConfig::new().init(), 1e-3);
    learner.plan(&M::batch(&numbers, &device)).expect("it fits")
}

fn check<M: Subject>() {
    for micro_batch in [ITEMS, 5] {
        let report = plan::<M>(micro_batch);
        let total: Bytes = report.modules.iter().map(|held| held.bytes).sum();
        let known = report.modules.iter().filter(|held| held.module.is_some());
        let unknown = total - known.map(|held| held.bytes).sum::<Bytes>();
        let share = 1.0 - (unknown - report.categories.get(Category::Input)).ratio(total);
        println!("{} in {micro_batch}: {share:.3}", M::NAME);
        println!("  {} at {}", report.operation, total);
        for held in &report.modules {
            println!("  {:?} {}", held.module, held.bytes);
        }
        assert!(share >= LEAST, "{}: {share:.3}", M::NAME);
    }
}

/// What a module holds at the peak.
fn held(report: &PlanReport, module: &str) -> Bytes {
    let held = report.modules.iter().find(|held| held.module.as_deref() == Some(module));
    held.map_or(Bytes::ZERO, |held| held.bytes)
}

/// Attention without parameters of its own belongs to the attention, not to one of its projections.
/// The logits belong to the head, and gradients and Adam's moments to their parameters.
#[test]
fn operations_without_parameters_belong_to_what_contains_them() {
    let report = plan::<zoo::Gpt<B>>(ITEMS);
    // Heads × length × length scores of an attention, and what softmax and dropout make of them.
    let scores = Bytes::kib(2 * 64 * 64 * 4 / 1024) * ITEMS as u64;
    for layer in ["layers.layers.0.mha", "layers.layers.1.mha"] {
        assert!(held(&report, layer) >= scores * 2, "{layer}: {}", held(&report, layer));
    }
    let logits = Bytes::kib(64 * 96 * 4 / 1024) * ITEMS as u64;
    assert!(held(&report, "head") >= logits, "{}", held(&report, "head"));
    // The parameter and two moments of 96 × 32 numbers.
    let tokens = Bytes::kib(3 * 96 * 32 * 4 / 1024);
    assert!(held(&report, "tokens") >= tokens, "{}", held(&report, "tokens"));
}

macro_rules! models {
    ($($test:ident: $model:ident;)*) => {$(
        #[test]
        fn $test() {
            check::<zoo::$model<B>>();
        }
    )*};
}

models! {
    mlp: Mlp;
    cnn: Cnn;
    resnet: ResNet;
    unet: UNet;
    encoder: Encoder;
    gpt: Gpt;
    lstm: Recurrent;
    autoencoder: Autoencoder;
    siamese: Siamese;
    reader: Reader;
}
