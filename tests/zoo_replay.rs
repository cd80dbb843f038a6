//! Tests whether three micro-steps of a size per iteration, as the Learner rehearses, predict the
//! memory of any number of them.
//!
//! The test replays every model of the zoo on devices without memory. For nine of ten models the
//! memory is equal to the byte. A buffer's place depends on the gaps that earlier buffers left, so
//! a page may open late. With pages of 128 MiB, ResNet-18 reserves 288 MiB with three micro-steps
//! of 250 items and 296 MiB with eight. The Learner adds a page where the pool of smallest pages is
//! full.
//!
//! The Learner splits a batch into sizes that differ by one item, or into one size and a rest.
//! Other splits are not predicted as closely. An autoencoder on a CUDA card, with five micro-steps
//! of 400 items and four of 266, is predicted at 246 MiB and reserves 293 MiB.
//!
//! `cargo test --workspace --test zoo_replay -- --ignored` also replays models of many operations
//! on devices other than a CUDA card.

#![cfg(feature = "flex")]

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::train::TrainStep;
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::ir::DeviceProperties;
use firebox::trace::{Estimate, MemoryModel, Trace};
use firebox::{Bytes, Lazy};
use firebox_dry::{Capability, Card, Cuda, Dry, DryRuntime, DryTwin, Wgpu};
use firebox_testing::zoo::iterations::{parts, record};
use firebox_testing::zoo::{self, Zoo};
use firebox_trace::Question;

type Recording = Autodiff<Lazy<Flex>>;
type Fused<T> = Fusion<CubeBackend<DryRuntime<T>, f32, i32, u8>>;

/// Number of micro-steps that the Learner rehearses.
const REHEARSED: usize = 3;
/// Allowed difference from the whole iteration, in the one model that differs: a page of the
/// smallest buffers.
const CHANCE: f64 = 0.03;

fn small_cuda() -> DeviceProperties {
    Card::named("3060").expect("in the table").properties()
}

/// A device like lavapipe: no page above 128 MiB.
fn small_vulkan() -> DeviceProperties {
    let mut properties = Card::new("small", Bytes::mib(512), Capability::new(8, 6), 8).properties();
    properties.memory.alignment = 32;
    properties
}

/// Compares iterations of `REHEARSED` micro-steps of each size with full ones, given as
/// `(micro-steps, items)`.
fn check<B, M>(properties: DeviceProperties, runs: &[(usize, usize)])
where
    B: DryTwin,
    M: Zoo<Recording> + TrainStep<Input = <M as Zoo<Recording>>::Batch> + AutodiffModule<Recording>,
{
    let dry = Dry::<B>::new(properties).with_traces_of_ints(DType::I64);
    let batch = runs.iter().map(|(count, items)| count * items).sum();
    let bytes = |most: usize| {
        let sizes = runs.iter().flat_map(|(count, items)| vec![*items; (*count).min(most)]);
        let trace = record::<Recording, M>(batch, &parts(sizes), &Default::default());
        let footprint = dry.replay(&trace).expect("the trace runs");
        let [least, kept] = at_least(&dry, &trace);
        let paging = footprint.paging.as_ref().expect("a GPU has pages");
        println!("{}: at least {least} of {}, {kept} recomputed", M::NAME, paging.in_use);
        assert!(kept <= least && least <= footprint.peak, "{}: {kept}, {least}", M::NAME);
        assert_eq!(footprint.unaccounted, Vec::<String>::new(), "{}", M::NAME);
        assert_eq!(footprint.estimate, Estimate::Heuristic, "{}", M::NAME);
        footprint.peak
    };
    let (rehearsed, all) = (bytes(REHEARSED), bytes(usize::MAX));
    println!("{} of {runs:?}: {rehearsed} and {all}", M::NAME);
    let by_chance = if M::NAME == "resnet" { CHANCE } else { 0.0 };
    let differs = (rehearsed.ratio(all) - 1.0).abs();
    assert!(differs <= by_chance, "{} of {runs:?}: {differs}", M::NAME);
}

/// What a trace needs at least, and what it needs at least if tensors are recomputed.
fn at_least<B: DryTwin>(dry: &Dry<B>, trace: &Trace) -> [Bytes; 2] {
    let bound = dry.answer(&Question { enough: Bytes::ZERO, ..Question::new(trace) });
    assert_eq!(bound.estimate, Estimate::LowerBound);
    assert_eq!(bound.categories.total(), bound.peak);
    [bound.peak, dry.at_least(trace)]
}

/// The setups in which every model is replayed.
fn on_cuda<M>()
where
    M: Zoo<Recording> + TrainStep<Input = <M as Zoo<Recording>>::Batch> + AutodiffModule<Recording>,
{
    check::<Fused<Cuda>, M>(small_cuda(), &[(8, M::ITEMS)]);
}

/// Further setups. Models of many operations skip them unless asked for.
fn elsewhere<M>()
where
    M: Zoo<Recording> + TrainStep<Input = <M as Zoo<Recording>>::Batch> + AutodiffModule<Recording>,
{
    check::<Fused<Wgpu>, M>(small_vulkan(), &[(8, M::ITEMS)]);
    check::<Fused<Wgpu>, M>(small_vulkan(), &[(5, M::ITEMS), (4, M::ITEMS * 2 / 3)]);
    // As for a batch that cannot be split evenly.
    check::<Fused<Cuda>, M>(small_cuda(), &[(5, M::ITEMS), (4, M::ITEMS - 1)]);
}

macro_rules! models {
    ($($test:ident: $model:ident $(, $ignored:literal)?;)*) => {$(
        mod $test {
            use super::{Recording, zoo};

            #[test]
            fn on_cuda() {
                super::on_cuda::<zoo::$model<Recording>>();
            }

            #[test]
            $(#[ignore = $ignored])?
            fn elsewhere() {
                super::elsewhere::<zoo::$model<Recording>>();
            }
        }
    )*};
}

models! {
    mlp: Mlp;
    cnn: Cnn;
    resnet: ResNet, "two minutes";
    unet: UNet, "half a minute";
    encoder: Encoder, "a minute";
    gpt: Gpt, "a minute";
    lstm: Recurrent, "two minutes";
    autoencoder: Autoencoder, "half a minute";
    siamese: Siamese, "half a minute";
    reader: Reader;
}
