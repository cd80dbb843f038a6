//! Known calls: calls that this thread has already described.
//!
//! Nearly every call of a training step was made in the previous step, with other tensors of the
//! same shapes. `call.rs` looks up its description and the shapes of its results by signature, and
//! asks burn-router only for calls that are not found.

use std::cell::RefCell;
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
use burn_std::{BoolDType, DType, FloatDType, IntDType, Shape, Slice};
use firebox_trace::Description;
use rustc_hash::{FxHashMap, FxHasher};

/// A call is forgotten if this many recordings in a row have not used it.
const KEPT: u64 = 16;

thread_local! {
    static MEMORY: RefCell<Memory> = RefCell::default();
}

/// The calls that a thread remembers, each with the number of the recording that used it last.
#[derive(Default)]
struct Memory {
    calls: FxHashMap<u64, (Arc<Known>, u64)>,
    recordings: u64,
}

impl Memory {
    /// Forgets the calls that the latest recordings have not used. If each step has other shapes,
    /// or a parameter such as a learning rate changes each time, most calls do not come again.
    fn begin(&mut self) {
        self.recordings += 1;
        let oldest = self.recordings.saturating_sub(KEPT);
        self.calls.retain(|_, (_, used)| *used >= oldest);
    }

    fn find(&mut self, signature: u64) -> Option<Arc<Known>> {
        let (call, used) = self.calls.get_mut(&signature)?;
        *used = self.recordings;
        Some(call.clone())
    }

    fn remember(&mut self, signature: u64, call: Arc<Known>) {
        self.calls.insert(signature, (call, self.recordings));
    }
}

/// The shape and element type of a tensor.
pub(crate) type Form = (Shape, DType);

/// A call that was described before.
pub(crate) struct Known {
    pub(crate) name: &'static str,
    /// The inputs, and whether the call owned them.
    pub(crate) inputs: Vec<(Form, bool)>,
    pub(crate) description: Arc<Description>,
    /// What the description hashes to.
    pub(crate) hash: u64,
    /// Whether the description has data of the host.
    pub(crate) has_data: bool,
    /// The results, in order. `None` for one that the method may return and did not.
    pub(crate) results: Vec<Option<Form>>,
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
        let description = Arc::new(Description::default());
        Arc::new(Known {
            name: "float_exp",
            inputs: vec![(form.clone(), true)],
            description,
            hash: 0,
            has_data: false,
            results: vec![Some(form)],
        })
    }

    #[test]
    fn calls_that_do_not_come_again_are_forgotten_and_those_of_the_latest_steps_are_not() {
        let mut memory = Memory::default();
        let mut made = 0;
        for _ in 0..100 {
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
        let kept = KEPT as usize + 1;
        assert_eq!(memory.calls.len(), 4 + kept * 20, "what one step did is forgotten");
    }

    #[test]
    fn a_call_that_comes_again_in_time_is_remembered() {
        let mut memory = Memory::default();
        memory.begin();
        memory.remember(0, call(1));
        for (pause, is_known) in [(KEPT, true), (KEPT, true), (KEPT + 1, false)] {
            (0..pause).for_each(|_| memory.begin());
            assert_eq!(memory.find(0).is_some(), is_known, "{pause} recordings later");
        }
    }
}
