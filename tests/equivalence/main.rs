//! The decorator computes the same values as the backend.
//!
//! The same programs run in four ways: on a backend, on its decoration at once, recorded and then
//! run on its decoration, and requested by a loader thread. Values and gradients must be equal bit
//! for bit. The backends are Flex and NdArray, under automatic differentiation with and without
//! recompute.

mod backends;
mod dtypes;
mod lifetimes;
mod methods;
mod modules;
mod recording;
mod tensors;

use std::sync::{Mutex, MutexGuard};

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ndarray::NdArray;
use firebox::trace::{StepRecorder, Trace};
use firebox::{Lazy, LazyBackend};

/// Flex with the decorator.
pub type LazyFlex = Lazy<Flex>;
/// NdArray with the decorator.
pub type LazyNdArray = Lazy<NdArray>;
/// Automatic differentiation that keeps every activation.
pub type Keep<B> = Autodiff<B>;
/// Automatic differentiation that recomputes cheap activations.
pub type Again<B> = Autodiff<B, BalancedCheckpointing>;

/// Results of a program: named tensors of any rank, flattened.
pub type Outputs<B> = Vec<(&'static str, Tensor<B, 1>)>;

/// Locks Flex's random generator. The process has only one, so programs that use it run one at a
/// time.
pub fn random_state() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Element type, shape and bytes of a tensor.
pub type Bits = (DType, Vec<usize>, Vec<u8>);

/// Returns the bits of `data`.
pub fn bits(data: TensorData) -> Bits {
    (data.dtype, data.shape.to_vec(), data.bytes.to_vec())
}

/// Returns the bits of all outputs.
pub fn values<B: Backend>(outputs: Outputs<B>) -> Vec<(&'static str, Bits)> {
    outputs.into_iter().map(|(name, tensor)| (name, bits(tensor.into_data()))).collect()
}

/// Checks a program on two backends under automatic differentiation, with both recompute
/// strategies. Given a backend and its decoration, checks only that pair.
macro_rules! check {
    ($program:path) => {
        $crate::check!($program, $crate::Keep<$crate::Flex>, $crate::Keep<$crate::LazyFlex>);
        $crate::check!($program, $crate::Keep<$crate::NdArray>, $crate::Keep<$crate::LazyNdArray>);
        $crate::check!($program, $crate::Again<$crate::Flex>, $crate::Again<$crate::LazyFlex>);
        $crate::check!(
            $program,
            $crate::Again<$crate::NdArray>,
            $crate::Again<$crate::LazyNdArray>
        );
    };
    ($program:path, $plain:ty, $decorated:ty) => {
        $crate::compare_on::<$plain, $decorated>(
            stringify!($decorated),
            |device| $program(device),
            |device| $program(device),
        )
    };
}
pub(crate) use check;

/// Runs a program on a backend and on its decoration, and compares the results.
///
/// The decoration runs it at once, recorded and then run, and requested by a loader thread.
#[track_caller]
pub fn compare_on<P, D>(
    name: &str,
    plain: impl Fn(&P::Device) -> Outputs<P>,
    decorated: impl Fn(&D::Device) -> Outputs<D> + Sync,
) where
    P: Backend<Device = D::Device>,
    D: LazyBackend,
{
    let _lock = random_state();
    let device = Default::default();
    let seed = || D::Base::seed(&device, 7);
    seed();
    let expected = values(plain(&device));
    seed();
    compare(&format!("{name}, at once"), &expected, values(decorated(&device)));
    let record = || {
        seed();
        let recording = StepRecorder::new().record::<D::Base, _>(|| decorated(&device));
        let recording = recording.expect("recordings do not nest here");
        recording.trace().check().expect("the trace is sound");
        recording
    };
    // The second recording takes known calls instead of describing them.
    let [described, known] = [record(), record()];
    let structures = [described.trace(), known.trace()].map(Trace::structural_hash);
    assert_eq!(structures[0], structures[1], "{name}");
    compare(&format!("{name}, recorded"), &expected, values(described.run()));
    seed();
    compare(&format!("{name}, recorded again"), &expected, values(known.run()));

    // Random numbers for a loader thread are drawn in the order in which they are needed.
    D::Base::seed(&device, 8);
    if values(plain(&device)) == expected {
        let run = || decorated(&Default::default());
        let asked = std::thread::scope(|scope| {
            let loader = std::thread::Builder::new().name("dataloader-7".into());
            loader.spawn_scoped(scope, run).expect("a thread").join().expect("it asks")
        });
        compare(&format!("{name}, on a loader thread"), &expected, values(asked));
    }
}

/// Compares values bit for bit.
#[track_caller]
pub fn compare(how: &str, expected: &[(&'static str, Bits)], found: Vec<(&'static str, Bits)>) {
    assert!(!expected.is_empty());
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(found) {
        assert_eq!(expected.0, found.0);
        assert_eq!(expected.1.0, found.1.0, "{how}: `{}` has another element type", expected.0);
        assert_eq!(expected.1.1, found.1.1, "{how}: `{}` has another shape", expected.0);
        assert!(expected.1.2 == found.1.2, "{how}: `{}` differs", expected.0);
    }
}
