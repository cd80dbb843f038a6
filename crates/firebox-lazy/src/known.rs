//! Calls that were described before.
//!
//! Nearly every call of a training step was made in the step before, with other tensors of the same shapes. Its
//! description, and the shapes of its results, are looked up by its signature instead of being asked for again.

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

/// How many calls a thread remembers. It forgets all of them when there are more, as where a parameter, such as a
/// learning rate, is another one in each step.
const CAPACITY: usize = 8192;

thread_local! {
    static KNOWN: RefCell<FxHashMap<u64, Arc<Known>>> = RefCell::default();
}

/// The shape and the element type of a tensor.
pub(crate) type Form = (Shape, DType);

/// A call that was described before.
pub(crate) struct Known {
    pub(crate) name: &'static str,
    /// The inputs, and whether the call owned them.
    pub(crate) inputs: Vec<(Form, bool)>,
    pub(crate) description: Description,
    /// The results, in order; `None` for one that a method may give and did not.
    pub(crate) results: Vec<Option<Form>>,
}

/// The call of this signature.
pub(crate) fn find(signature: u64) -> Option<Arc<Known>> {
    KNOWN.with_borrow(|known| known.get(&signature).cloned())
}

/// Remembers a call by its signature.
pub(crate) fn remember(signature: u64, call: Arc<Known>) {
    KNOWN.with_borrow_mut(|known| {
        if known.len() >= CAPACITY {
            known.clear();
        }
        known.insert(signature, call);
    });
}

/// Forgets the calls that this thread remembers of its recordings: after steps on many shapes were recorded that will not
/// come again. They are described once more if they do.
pub fn forget_calls() {
    KNOWN.take();
}

/// A parameter of a call, as far as its signature is concerned.
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

/// Types without a hash, by the text of their `Debug`, in which no two values look alike.
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

/// Hashes what is written to it.
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
