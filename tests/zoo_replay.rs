//! Whether three micro-steps an iteration, which is what the Learner rehearses, are enough to know the memory of any
//! number of them: for every model of the zoo, on devices without memory.
//!
//! Where a buffer goes depends on the gaps that those before it left, so that a page may be opened late. A replay goes on
//! until none is opened any more.

#![cfg(feature = "flex")]

#[path = "zoo/mod.rs"]
mod zoo;

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::tensor::DType;
use burn::train::TrainStep;
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::ir::DeviceProperties;
use firebox::{Bytes, Estimate, Lazy};
use firebox_dry::{Capability, Card, Cuda, Dry, DryRuntime, DryTwin, Wgpu};
use zoo::Zoo;
use zoo::iterations::record;

type Recording = Autodiff<Lazy<Flex>>;
type Fused<T> = Fusion<CubeBackend<DryRuntime<T>, f32, i32, u8>>;

/// How many micro-steps the Learner rehearses.
const REHEARSED: usize = 3;
/// How much more these may reserve than the whole iteration: a page of the smallest buffers.
const CHANCE: f64 = 1.02;

fn small_cuda() -> DeviceProperties {
    Card::named("3060").expect("in the table").properties()
}

/// A device as lavapipe is: no page above 128 MiB.
fn small_vulkan() -> DeviceProperties {
    let mut properties = Card::new("small", Bytes::mib(512), Capability::new(8, 6), 8).properties();
    properties.memory.alignment = 32;
    properties
}

/// Compares iterations of `REHEARSED` micro-steps with longer ones of the same batch.
fn check<B, M>(properties: DeviceProperties, pieces: usize)
where
    B: DryTwin,
    M: Zoo<Recording> + TrainStep<Input = <M as Zoo<Recording>>::Batch> + AutodiffModule<Recording>,
{
    let dry = Dry::<B>::new(properties).with_traces_of_ints(DType::I64);
    let bytes = |micro_steps| {
        let trace = record::<Recording, M>(M::ITEMS, pieces, micro_steps, &Default::default());
        let footprint = dry.replay(&trace).expect("the trace runs");
        assert_eq!(footprint.unaccounted, Vec::<String>::new(), "{}", M::NAME);
        assert_eq!(footprint.estimate, Estimate::UpperBound, "{}", M::NAME);
        footprint.peak
    };
    let (rehearsed, all) = (bytes(REHEARSED), bytes(pieces));
    println!("{} of {pieces} x {}: {rehearsed} and {all}", M::NAME, M::ITEMS);
    let ratio = rehearsed.ratio(all);
    assert!((1.0..=CHANCE).contains(&ratio), "{} of {pieces} x {}: {ratio}", M::NAME, M::ITEMS);
}

macro_rules! models {
    ($($test:ident: $model:ident;)*) => {$(
        #[test]
        fn $test() {
            check::<Fused<Cuda>, zoo::$model<Recording>>(small_cuda(), 4);
            check::<Fused<Cuda>, zoo::$model<Recording>>(small_cuda(), 8);
            check::<Fused<Wgpu>, zoo::$model<Recording>>(small_vulkan(), 8);
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
