//! The backends that can be decorated and trained on.
//!
//! The compiler checks GPU backends, under the features that provide them. With burn's fusion they
//! are `Fusion<CubeBackend<…>>`.

use burn::tensor::backend::AutodiffBackend;
use firebox::LazyBackend;

use crate::{Again, Keep, LazyFlex, LazyNdArray};

/// Compiles only for backends that a Learner can train on.
fn trains<B>()
where
    B: AutodiffBackend + LazyBackend,
    B::InnerBackend: LazyBackend<Base = <B as LazyBackend>::Base>,
{
}

#[test]
fn decorated_backends_are_backends() {
    trains::<Keep<LazyFlex>>();
    trains::<Again<LazyFlex>>();
    trains::<Keep<LazyNdArray>>();
    trains::<Again<LazyNdArray>>();
    #[cfg(feature = "cuda")]
    trains::<Keep<firebox::Lazy<burn::backend::Cuda>>>();
    #[cfg(feature = "wgpu")]
    trains::<Keep<firebox::Lazy<burn::backend::Wgpu>>>();
    #[cfg(feature = "vulkan")]
    trains::<Keep<firebox::Lazy<burn::backend::Vulkan>>>();
    if !cfg!(any(feature = "cuda", feature = "wgpu", feature = "vulkan")) {
        println!("not compiled: `Lazy` over fusion backends (features cuda, wgpu, vulkan)");
    }
}
