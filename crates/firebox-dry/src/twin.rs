//! Which dry backend stands for which real one. It follows from the type, and is never chosen by
//! hand.
//!
//! Replays run on the twin.

use burn_backend::{Backend, Element};
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::Fusion;
use burn_fusion::client::GlobalFusionClient;
use burn_ir::BackendIr;
use burn_std::{BoolStore, DType};
use firebox_pool::Pooled;

use crate::device::DryDevice;
use crate::runtime::DryRuntime;
use crate::target::Target;

/// A CubeCL runtime that [`DryRuntime`] can stand for.
///
/// cubecl-cuda's runtime with the feature `cuda`, cubecl-wgpu's with the feature `wgpu`. Dry
/// runtimes stand for themselves.
pub trait Mirrored: CubeRuntime {
    /// The target that the dry runtime mirrors.
    type Target: Target;
    /// Whether buffers lie on firebox's pool.
    const POOLED: bool;
}

/// The same runtime with firebox's pool.
impl<R: Mirrored> Mirrored for Pooled<R> {
    type Target = R::Target;
    const POOLED: bool = true;
}

#[cfg(feature = "cuda")]
impl Mirrored for cubecl::cuda::CudaRuntime {
    type Target = crate::target::Cuda;
    const POOLED: bool = false;
}

#[cfg(feature = "wgpu")]
impl Mirrored for cubecl::wgpu::WgpuRuntime {
    type Target = crate::target::Wgpu;
    const POOLED: bool = false;
}

impl<T: Target> Mirrored for DryRuntime<T> {
    type Target = T;
    const POOLED: bool = false;
}

/// A backend for whose memory a dry backend stands: burn's CUDA and wgpu backends, with and without
/// fusion.
///
/// ```
/// use burn_cubecl::CubeBackend;
/// use burn_fusion::Fusion;
/// use firebox_dry::{Cuda, DryRuntime, DryTwin};
/// fn same<A: 'static, B: 'static>() -> bool {
///     std::any::TypeId::of::<A>() == std::any::TypeId::of::<B>()
/// }
/// // burn's `Cuda<f32, i32>` has the same twin.
/// type Dry = Fusion<CubeBackend<DryRuntime<Cuda>, f32, i32, u8>>;
/// assert!(same::<<Dry as DryTwin>::Twin, Dry>());
/// ```
#[diagnostic::on_unimplemented(
    message = "no device without memory stands for `{Self}`",
    note = "it has to be burn's CUDA backend (with the feature `cuda`) or its wgpu backend (with the feature `wgpu`)"
)]
pub trait DryTwin: Backend {
    /// The kind of device.
    type Target: Target;
    /// The same backend without memory: with fusion if the original has it, and with the same
    /// element types.
    type Twin: BackendIr<Device = DryDevice<Self::Target>>;

    /// Runs what the twin has queued for this thread on `device`. Does not wait for the device.
    fn drain(device: &DryDevice<Self::Target>);

    /// Whether buffers lie on firebox's pool.
    const POOLED: bool;

    /// How the backend stores booleans.
    fn bool_store() -> BoolStore {
        match <Self::BoolElem as Element>::dtype() {
            DType::U32 => BoolStore::U32,
            DType::U8 => BoolStore::U8,
            _ => BoolStore::Native,
        }
    }
}

impl<R, F, I, B> DryTwin for CubeBackend<R, F, I, B>
where
    R: Mirrored,
    F: FloatElement,
    I: IntElement,
    B: BoolElement,
{
    type Target = R::Target;
    type Twin = CubeBackend<DryRuntime<R::Target>, F, I, B>;
    const POOLED: bool = R::POOLED;

    fn drain(_device: &DryDevice<Self::Target>) {}
}

impl<R, F, I, B> DryTwin for Fusion<CubeBackend<R, F, I, B>>
where
    R: Mirrored,
    F: FloatElement,
    I: IntElement,
    B: BoolElement,
{
    type Target = R::Target;
    type Twin = Fusion<CubeBackend<DryRuntime<R::Target>, F, I, B>>;
    const POOLED: bool = R::POOLED;

    fn drain(device: &DryDevice<Self::Target>) {
        GlobalFusionClient::<FusionCubeRuntime<DryRuntime<R::Target>>>::load(device).sync(|| ());
    }
}
