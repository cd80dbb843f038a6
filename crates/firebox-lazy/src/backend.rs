//! The decorator as a backend, and how it is found below the user's backend type.
//!
//! The operations themselves are in `ops`.

use std::fmt;
use std::marker::PhantomData;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;
use burn_backend::backend::BackendTypes;
use burn_backend::{Backend, DType, DTypeUsageSet, ExecutionError, TensorData};

use crate::kind::{Bool, Float, Int, Quantized};
use crate::record::session;
use crate::tensor::LazyTensor;
use crate::threads::deferred::is_later;
use crate::threads::streams::{meet, on_stream};

/// A backend that can record its operations instead of running them.
///
/// Outside a recording every operation runs immediately on `B`: same values, same gradients, same
/// order, same reuse of memory. Inside a [`StepRecorder::record`](crate::StepRecorder::record)
/// scope, the recording thread's operations are added to a [`Trace`](firebox_trace::Trace) and run
/// later, or never.
///
/// Use it below `Autodiff`: `Autodiff<Lazy<Flex>>` in place of `Autodiff<Flex>`. Its device is the
/// device of `B`.
///
/// # Differences from `B`
///
/// - Quantized tensors cannot be recorded.
/// - `memory_persistent_allocations` is not forwarded: which pool a parameter lands in would depend
///   on a race.
/// - `memory_cleanup` is not forwarded inside recordings.
/// - `staging` is not forwarded inside recordings and on threads of burn's data loader.
///
/// # Loader threads
///
/// What a thread of burn's data loader asks for is recorded with its host data. The first other
/// thread that needs it computes it, random numbers included. With
/// [`LoaderGuard::compute`](crate::LoaderGuard::compute) the thread computes what draws nothing.
///
/// If a loader thread reads a value, the value is computed there, on a
/// [stream](crate::stream_of_worker) that is the same in every epoch. What the thread still holds
/// of it goes back to the host. Quantized tensors are computed on the loader thread immediately.
pub struct Lazy<B>(PhantomData<B>);

impl<B> Clone for Lazy<B> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<B> Default for Lazy<B> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<B> fmt::Debug for Lazy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lazy")
    }
}

impl<B: Backend> BackendTypes for Lazy<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = LazyTensor<B, Float>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = LazyTensor<B, Int>;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = LazyTensor<B, Bool>;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = LazyTensor<B, Quantized>;
}

impl<B: Backend> Backend for Lazy<B> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }

    fn memory_cleanup(device: &Self::Device) {
        if !session::records::<B>() {
            on_stream::<B, _>(|| B::memory_cleanup(device));
        }
    }

    fn name(device: &Self::Device) -> String {
        format!("lazy<{}>", B::name(device))
    }

    fn seed(device: &Self::Device, seed: u64) {
        if session::records::<B>() {
            let device = device.clone();
            if session::draws_are_fixed::<B>() {
                return;
            }
            session::with::<B, _>(|session| {
                session.push_effect(move |frame| match frame.substitute() {
                    Some(generator) => generator.seed(seed),
                    None => B::seed(&device, seed),
                });
            });
        } else {
            meet::<B>(device);
            on_stream::<B, _>(|| B::seed(device, seed));
        }
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        meet::<B>(device);
        on_stream::<B, _>(|| B::sync(device))
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        if !is_later::<B>() {
            on_stream::<B, _>(|| B::staging(data, device));
        }
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

/// The backends whose operations can be recorded: [`Lazy<B>`], [`Half<Lazy<B>>`](crate::Half), and
/// `Autodiff` of either.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot record its operations",
    label = "not a lazy backend",
    note = "put `Lazy` around the innermost backend: `Autodiff<Lazy<Flex>>` instead of `Autodiff<Flex>`"
)]
pub trait LazyBackend: Backend<Device = <Self::Base as BackendTypes>::Device> {
    /// The decorated backend, which runs the operations.
    type Base: Backend;

    /// The decorator's tensor below a float tensor of this backend.
    fn lazy_float(tensor: &Self::FloatTensorPrimitive) -> LazyTensor<Self::Base, Float>;
    /// The decorator's tensor below an integer tensor of this backend.
    fn lazy_int(tensor: &Self::IntTensorPrimitive) -> LazyTensor<Self::Base, Int>;
    /// The decorator's tensor below a boolean tensor of this backend.
    fn lazy_bool(tensor: &Self::BoolTensorPrimitive) -> LazyTensor<Self::Base, Bool>;

    /// The type of 16 bit that the backend computes in where it can, see [`Half`](crate::Half).
    fn narrow() -> Option<DType> {
        None
    }

    /// Frees what automatic differentiation still holds of the graphs of `leaves` that nobody can
    /// run backwards any more.
    fn forget_graphs(_device: &Self::Device, _leaves: Vec<Self::FloatTensorPrimitive>) {}
}

impl<B: Backend> LazyBackend for Lazy<B> {
    type Base = B;

    fn lazy_float(tensor: &Self::FloatTensorPrimitive) -> LazyTensor<B, Float> {
        tensor.clone()
    }

    fn lazy_int(tensor: &Self::IntTensorPrimitive) -> LazyTensor<B, Int> {
        tensor.clone()
    }

    fn lazy_bool(tensor: &Self::BoolTensorPrimitive) -> LazyTensor<B, Bool> {
        tensor.clone()
    }
}

impl<L: LazyBackend, C: CheckpointStrategy> LazyBackend for Autodiff<L, C> {
    type Base = L::Base;

    fn lazy_float(tensor: &Self::FloatTensorPrimitive) -> LazyTensor<L::Base, Float> {
        L::lazy_float(&tensor.primitive)
    }

    fn lazy_int(tensor: &Self::IntTensorPrimitive) -> LazyTensor<L::Base, Int> {
        L::lazy_int(tensor)
    }

    fn lazy_bool(tensor: &Self::BoolTensorPrimitive) -> LazyTensor<L::Base, Bool> {
        L::lazy_bool(tensor)
    }

    fn narrow() -> Option<DType> {
        L::narrow()
    }

    /// burn-autodiff frees such graphs at the end of a backward pass through them. This runs one
    /// that reaches all `leaves` and computes a single number.
    fn forget_graphs(device: &Self::Device, leaves: Vec<Self::FloatTensorPrimitive>) {
        let number = Tensor::<Self, 1>::ones([1], device).require_grad().into_primitive().tensor();
        let value = number.primitive.clone();
        let join =
            |left: Self::FloatTensorPrimitive, right: Self::FloatTensorPrimitive| match Nothing
                .prepare::<C>([left.node, right.node])
                .compute_bound()
                .stateful()
            {
                OpsKind::Tracked(prepared) => prepared.finish((), value.clone()),
                OpsKind::UnTracked(prepared) => prepared.finish(value.clone()),
            };
        // In pairs, because burn-autodiff's recursion is as deep as the graph.
        let mut nodes = vec![number];
        nodes.extend(leaves);
        while nodes.len() > 1 {
            let mut rest = nodes.into_iter();
            nodes = std::iter::from_fn(|| {
                let left = rest.next()?;
                Some(match rest.next() {
                    Some(right) => join(left, right),
                    None => left,
                })
            })
            .collect();
        }
        nodes.into_iter().for_each(|root| drop(root.backward()));
    }
}

/// An operation whose backward pass does nothing.
#[derive(Debug)]
struct Nothing;

impl<B: Backend> Backward<B, 2> for Nothing {
    type State = ();

    fn backward(self, _: Ops<(), 2>, _: &mut Gradients, _: &mut Checkpointer) {}
}
