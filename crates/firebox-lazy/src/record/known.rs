//! Known calls: calls that this thread has already described.
//!
//! Nearly every call of a training step was made in the previous step, with other tensors of the
//! same shapes. `call.rs` looks up its description and the shapes of its results by signature, and
//! asks burn-router only for calls that are not found.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    GridSampleOptions, InterpolateOptions, UnfoldOptions,
};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Distribution, Scalar};
use burn_ir::OperationIr;
use burn_std::{BoolDType, DType, FloatDType, IntDType, Shape, Slice};
use firebox_trace::{Bytes, Description};
use rustc_hash::{FxHashMap, FxHasher};

/// The most bytes of calls that a thread remembers, its latest recording included.
const MOST: usize = 32 << 20;

thread_local! {
    static MEMORY: RefCell<Memory> = RefCell::default();
}

/// The calls that a thread remembers, each with the number of the recording that used it last.
struct Memory {
    calls: FxHashMap<u64, (Arc<Known>, u64)>,
    bytes: usize,
    /// How many bytes of earlier calls a recording starts with at most. The calls of the recording
    /// before it stay even if they take more. If each step has other shapes, or a parameter such as
    /// a learning rate changes each time, most calls do not come again.
    capacity: usize,
    recordings: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self { calls: FxHashMap::default(), bytes: 0, capacity: MOST, recordings: 0 }
    }
}

impl Memory {
    /// If the calls take more than the capacity, forgets those unused for the longest time.
    fn begin(&mut self) {
        self.recordings += 1;
        if self.bytes <= self.capacity {
            return;
        }
        let mut bytes: BTreeMap<u64, usize> = BTreeMap::new();
        for (call, used) in self.calls.values() {
            *bytes.entry(*used).or_default() += call.bytes();
        }
        let mut latest = bytes.into_iter().rev();
        let (mut oldest, mut kept) = latest.next().unwrap_or_default();
        for (used, bytes) in latest {
            if kept + bytes > self.capacity {
                break;
            }
            (oldest, kept) = (used, kept + bytes);
        }
        self.calls.retain(|_, (_, used)| *used >= oldest);
        self.calls.shrink_to_fit();
        self.bytes = kept;
    }

    fn find(&mut self, signature: u64) -> Option<Arc<Known>> {
        let (call, used) = self.calls.get_mut(&signature)?;
        *used = self.recordings;
        Some(call.clone())
    }

    fn remember(&mut self, signature: u64, call: Arc<Known>) {
        if self.bytes > MOST {
            self.calls.clear();
            self.bytes = 0;
        }
        self.bytes += call.bytes();
        if let Some((earlier, _)) = self.calls.insert(signature, (call, self.recordings)) {
            self.bytes -= earlier.bytes();
        }
    }
}

/// The shape and element type of a tensor.
pub(crate) type Form = (Shape, DType);

/// A call that was described before.
pub(crate) struct Known {
    pub(crate) name: &'static str,
    /// The inputs, and whether the call owned them.
    pub(crate) inputs: Vec<(Form, bool)>,
    pub(crate) description: Description,
    /// The results, in order. `None` for one that the method may return and did not.
    pub(crate) results: Vec<Option<Form>>,
}

impl Known {
    /// The bytes it takes on the host. Heuristic.
    fn bytes(&self) -> usize {
        let shapes = self.inputs.len() + self.results.len() + 2 * self.description.operations.len();
        size_of::<Self>()
            + self.description.operations.len() * size_of::<OperationIr>()
            + shapes * (size_of::<(Form, bool)>() + 64)
    }
}

/// Limits how many bytes of calls this thread remembers from its recordings. Default: 32 MiB, which
/// is also the most.
///
/// The calls of the latest recording stay even if they take more than `bytes`.
pub fn remember_calls_within(bytes: Bytes) {
    let capacity = usize::try_from(bytes.get()).unwrap_or(usize::MAX).min(MOST);
    MEMORY.with_borrow_mut(|memory| memory.capacity = capacity);
}

/// Starts a recording on this thread.
pub(crate) fn begin() {
    MEMORY.with_borrow_mut(Memory::begin);
}

/// The call with this signature.
pub(crate) fn find(signature: u64) -> Option<Arc<Known>> {
    MEMORY.with_borrow_mut(|memory| memory.find(signature))
}

/// Remembers a call by its signature.
pub(crate) fn remember(signature: u64, call: Arc<Known>) {
    MEMORY.with_borrow_mut(|memory| memory.remember(signature, call));
}

/// Forgets the calls that this thread remembers from its recordings.
///
/// Use it after recording steps on many shapes that will not come again. If they do, their calls
/// are described once more.
pub fn forget_calls() {
    MEMORY.take();
}

/// The contribution of a call's parameter to the signature.
pub(crate) trait Sign {
    fn sign(&self, signature: &mut FxHasher);
}

macro_rules! by_hash {
    ($($ty:ty),* $(,)?) => {$(
        impl Sign for $ty {
            fn sign(&self, signature: &mut FxHasher) {
                self.hash(signature);
            }
        }
    )*};
}

by_hash!(
    bool,
    usize,
    [usize; 2],
    Option<usize>,
    Range<i64>,
    Shape,
    Slice,
    ConvOptions<1>,
    ConvOptions<2>,
    ConvOptions<3>,
    ConvTransposeOptions<1>,
    ConvTransposeOptions<2>,
    ConvTransposeOptions<3>,
    DeformConvOptions<2>,
);

/// Signs types that have no hash by their `Debug` text, which differs between any two values.
macro_rules! by_text {
    ($($ty:ty),* $(,)?) => {$(
        impl Sign for $ty {
            fn sign(&self, signature: &mut FxHasher) {
                write!(Text(signature), "{self:?}").expect("hashing does not fail");
            }
        }
    )*};
}

by_text!(
    Distribution,
    FloatDType,
    IntDType,
    BoolDType,
    IndexingUpdateOp,
    UnfoldOptions,
    InterpolateOptions,
    GridSampleOptions,
    AttentionModuleOptions,
);

/// Hashes the text written to it.
struct Text<'a>(&'a mut FxHasher);

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

impl Sign for f64 {
    fn sign(&self, signature: &mut FxHasher) {
        signature.write_u64(self.to_bits());
    }
}

impl Sign for Scalar {
    fn sign(&self, signature: &mut FxHasher) {
        match self {
            Self::Float(value) => (0, value.to_bits()).hash(signature),
            Self::Int(value) => (1, value).hash(signature),
            Self::UInt(value) => (2, value).hash(signature),
            Self::Bool(value) => (3, value).hash(signature),
        }
    }
}

impl<T: Sign> Sign for [T] {
    fn sign(&self, signature: &mut FxHasher) {
        signature.write_usize(self.len());
        self.iter().for_each(|value| value.sign(signature));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(rows: usize) -> Arc<Known> {
        let form = (Shape::new([rows, 8]), DType::F32);
        let description = Description::default();
        Arc::new(Known {
            name: "float_exp",
            inputs: vec![(form.clone(), true)],
            description,
            results: vec![Some(form)],
        })
    }

    #[test]
    fn calls_that_do_not_come_again_are_forgotten_and_those_of_the_latest_steps_are_not() {
        let capacity = 100 * call(1).bytes();
        let mut memory = Memory { capacity, ..Memory::default() };
        let mut made = 0;
        for _ in 0..2000 {
            memory.begin();
            for every in 0..4 {
                if memory.find(every).is_none() {
                    memory.remember(every, call(every as usize));
                    made += 1;
                }
            }
            for once in 0..20 {
                let signature = 1000 + memory.recordings * 20 + once;
                assert!(memory.find(signature).is_none());
                memory.remember(signature, call(once as usize));
            }
        }
        assert_eq!(made, 4, "what every step does is remembered");
        let latest = 20 * call(1).bytes();
        assert!(memory.bytes <= capacity + latest, "{} of {capacity}", memory.bytes);
        assert!(memory.bytes > capacity / 2, "{} of {capacity}", memory.bytes);
        let bytes: usize = memory.calls.values().map(|(call, _)| call.bytes()).sum();
        assert_eq!(memory.bytes, bytes);
    }

    #[test]
    fn a_recording_of_too_many_calls_is_bounded_as_well() {
        let mut memory = Memory::default();
        memory.begin();
        for signature in 0..200_000 {
            memory.remember(signature, call(1));
        }
        assert!(memory.bytes <= MOST + call(1).bytes(), "{}", memory.bytes);
    }
}
