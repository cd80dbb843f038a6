//! Memory models of GPUs that need not exist.
//!
//! A model is a whole stack of burn and CubeCL, which takes a minute or two to compile. At low
//! optimisation, rustc takes generic code from a dependency that has compiled it. The stacks are
//! compiled here once, instead of in each test. A test that needs nothing else of this crate has
//! `use firebox_testing as _`.

use std::sync::Arc;

use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use firebox::MemoryModel;
use firebox::dry::{Card, Dry, DryCuda, DryPooledCuda, DryRuntime, Wgpu};

type Plain<T> = CubeBackend<DryRuntime<T>, f32, i32, u8>;

/// The models of a card on CUDA: for burn's pools, and for ours.
pub fn cuda(card: &Card) -> [Arc<dyn MemoryModel>; 2] {
    let (burns, ours) = (Dry::<DryCuda>::new(card.properties()), card.properties());
    [Arc::new(burns), Arc::new(Dry::<DryPooledCuda>::new(ours))]
}

/// The models of a card on wgpu, with fusion and without.
pub fn wgpu(card: &Card) -> [Arc<dyn MemoryModel>; 2] {
    let properties = || card.properties();
    [
        Arc::new(Dry::<Fusion<Plain<Wgpu>>>::new(properties())),
        Arc::new(Dry::<Plain<Wgpu>>::new(properties())),
    ]
}
