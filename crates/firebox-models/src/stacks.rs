//! The models, as trait objects.

use std::sync::Arc;

use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use firebox_pool::Pooled;
use firebox_trace::MemoryModel;

use firebox_dry::{Card, Cuda, Dry, DryRuntime, Wgpu};

type Fused<R> = Fusion<CubeBackend<R, f32, i32, u8>>;
type Plain<T> = CubeBackend<DryRuntime<T>, f32, i32, u8>;

/// The models of a card on CUDA: for burn's pools, and for ours.
pub fn cuda(card: &Card) -> [Arc<dyn MemoryModel>; 2] {
    let (burns, ours) = (Dry::<Fused<DryRuntime<Cuda>>>::new(card.properties()), card.properties());
    [Arc::new(burns), Arc::new(Dry::<Fused<Pooled<DryRuntime<Cuda>>>>::new(ours))]
}

/// The models of a card on wgpu, with fusion and without.
pub fn wgpu(card: &Card) -> [Arc<dyn MemoryModel>; 2] {
    let properties = || card.properties();
    [
        Arc::new(Dry::<Fusion<Plain<Wgpu>>>::new(properties())),
        Arc::new(Dry::<Plain<Wgpu>>::new(properties())),
    ]
}
