//! The decorator computes what the backend computes: the same programs on `Flex`, on `Lazy<Flex>` at once, and on
//! `Lazy<Flex>` recorded and then run, equal bit for bit in values and gradients.

mod dtypes;
mod lifetimes;
mod methods;
#[path = "../models/mod.rs"]
mod models;
mod modules;
mod recording;
mod tensors;

use std::sync::{Mutex, MutexGuard};

use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::DType;
use firebox::{Lazy, Recorder};

/// The backend.
pub type Plain = Autodiff<Flex>;
/// The backend, decorated.
pub type Decorated = Autodiff<Lazy<Flex>>;

/// What a program computes: tensors of any rank, flattened, with names.
pub type Outputs<B> = Vec<(&'static str, Tensor<B, 1>)>;

/// Flex has one random generator for the process: programs that use it run one at a time.
pub fn random_state() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The bits of a tensor.
pub type Bits = (DType, Vec<usize>, Vec<u8>);

/// The bits of data.
pub fn bits(data: TensorData) -> Bits {
    (data.dtype, data.shape.to_vec(), data.bytes.to_vec())
}

/// The values of all outputs.
pub fn values<B: Backend>(outputs: Outputs<B>) -> Vec<(&'static str, Bits)> {
    outputs.into_iter().map(|(name, tensor)| (name, bits(tensor.into_data()))).collect()
}

/// Checks a program on the three backends against each other.
macro_rules! check {
    ($program:path) => {
        $crate::check!($program, $crate::Plain, $crate::Decorated)
    };
    ($program:path, $plain:ty, $decorated:ty) => {{
        let _lock = $crate::random_state();
        let device = Default::default();
        let seed = || <burn::backend::Flex as burn::tensor::backend::Backend>::seed(&device, 7);
        seed();
        let expected = $crate::values($program(&device) as $crate::Outputs<$plain>);
        seed();
        let eager = $crate::values($program(&device) as $crate::Outputs<$decorated>);
        $crate::compare("at once", &expected, eager);
        seed();
        let recorded = $crate::recorded(|| $program(&device) as $crate::Outputs<$decorated>);
        $crate::compare("recorded", &expected, recorded);
    }};
}
pub(crate) use check;

/// Records a program, runs the recording, and gives its values.
pub fn recorded<B: Backend>(program: impl FnOnce() -> Outputs<B>) -> Vec<(&'static str, Bits)> {
    let recording =
        Recorder::new().record::<Flex, _>(program).expect("recordings do not nest here");
    recording.trace().check().expect("the trace is sound");
    values(recording.run())
}

/// Checks values against each other, bit for bit.
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
