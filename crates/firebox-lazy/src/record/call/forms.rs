//! The forms that arguments and results of a backend's methods take.
//!
//! Every argument has three: *plain* (what the backend takes), *described* (what the describing
//! router takes) and a *slot* (what the program keeps until it runs). Every result has the same
//! three. `call.rs` is generic over them.

use std::fmt::Debug;
use std::ops::Range;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, GridSampleOptions, InterpolateOptions, MaxPool1dBackward,
    MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, UnfoldOptions,
};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Backend, Distribution, Scalar};
use burn_std::{BoolDType, FloatDType, IntDType, Shape};

use crate::Lazy;
use crate::kind::Kind;
use crate::record::call::CallFrame;
use crate::record::describe::Described;
use crate::record::known::{Form, Sign};
use crate::record::values::Frame;
use crate::tensor::LazyTensor;

/// An argument of a backend method.
pub(crate) trait Argument<B: Backend> {
    /// What the backend takes.
    type Plain;
    /// What the describing router takes.
    type Described<'a>;
    /// What the program keeps.
    type Slot: Slot<B> + Send + 'static;

    fn plain(self) -> Self::Plain;
    /// Whether the argument has a tensor that a deferred call will compute.
    fn waits(&self) -> bool {
        false
    }
    /// The argument in the name of an operation that burn-ir does not have. `None` for tensors.
    fn text(&self) -> Option<String> {
        None
    }
    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot;
    fn describe<'a>(slot: &'a Self::Slot, frame: &mut CallFrame<B>) -> Self::Described<'a>;
}

/// An argument kept by the program.
pub(crate) trait Slot<B: Backend> {
    /// What the backend takes.
    type Plain<'a>
    where
        Self: 'a;

    fn fetch<'a>(&'a self, frame: &mut Frame<'_, B>) -> Self::Plain<'a>;
}

/// A result of a backend method.
pub trait Returned<B: Backend>: Sized {
    /// What the backend returns.
    type Plain;
    /// What the describing router returns.
    type Described;
    /// Where the program stores it: positions among the results of the call.
    type Slots: Copy + Send + 'static;

    fn wrap(plain: Self::Plain) -> Self;
    fn adopt(described: Self::Described, frame: &mut CallFrame<B>);
    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots);
    fn store(slots: Self::Slots, plain: Self::Plain, frame: &mut Frame<'_, B>);
}

/// The forms of the results of a call, in order. `None` for one that the call does not make.
pub type Results<'a> = std::slice::Iter<'a, Option<Form>>;

/// The slot of a tensor.
pub struct TensorSlot<K> {
    /// The tensor's position among the inputs.
    pub(crate) number: u32,
    pub(crate) kind: std::marker::PhantomData<fn() -> K>,
}

impl<B: Backend, K: Kind<B>> Slot<B> for TensorSlot<K> {
    type Plain<'a> = K::Primitive;

    fn fetch(&self, frame: &mut Frame<'_, B>) -> K::Primitive {
        K::restore(frame.fetch(self.number))
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for LazyTensor<B, K> {
    type Plain = K::Primitive;
    type Described<'a> = Described<B>;
    type Slot = TensorSlot<K>;

    fn plain(self) -> Self::Plain {
        self.into_inner()
    }

    fn waits(&self) -> bool {
        self.node.deferred().is_some()
    }

    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
        frame.input(self)
    }

    fn describe(slot: &Self::Slot, frame: &mut CallFrame<B>) -> Described<B> {
        frame.described(slot)
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for Option<LazyTensor<B, K>> {
    type Plain = Option<K::Primitive>;
    type Described<'a> = Option<Described<B>>;
    type Slot = Option<TensorSlot<K>>;

    fn plain(self) -> Self::Plain {
        self.map(LazyTensor::into_inner)
    }

    fn waits(&self) -> bool {
        self.as_ref().is_some_and(Argument::waits)
    }

    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
        frame.parameter(&self.is_some());
        self.map(|tensor| frame.input(tensor))
    }

    fn describe(slot: &Self::Slot, frame: &mut CallFrame<B>) -> Option<Described<B>> {
        slot.as_ref().map(|slot| frame.described(slot))
    }
}

impl<B: Backend, K: Kind<B>> Slot<B> for Option<TensorSlot<K>> {
    type Plain<'a> = Option<K::Primitive>;

    fn fetch(&self, frame: &mut Frame<'_, B>) -> Option<K::Primitive> {
        self.as_ref().map(|slot| slot.fetch(frame))
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for Vec<LazyTensor<B, K>> {
    type Plain = Vec<K::Primitive>;
    type Described<'a> = Vec<Described<B>>;
    type Slot = Many<TensorSlot<K>>;

    fn plain(self) -> Self::Plain {
        self.into_iter().map(LazyTensor::into_inner).collect()
    }

    fn waits(&self) -> bool {
        self.iter().any(Argument::waits)
    }

    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
        frame.parameter(&self.len());
        Many(self.into_iter().map(|tensor| frame.input(tensor)).collect())
    }

    fn describe(slot: &Self::Slot, frame: &mut CallFrame<B>) -> Vec<Described<B>> {
        slot.0.iter().map(|slot| frame.described(slot)).collect()
    }
}

/// The slots of several tensors.
pub struct Many<S>(Vec<S>);

impl<B: Backend, K: Kind<B>> Slot<B> for Many<TensorSlot<K>> {
    type Plain<'a> = Vec<K::Primitive>;

    fn fetch(&self, frame: &mut Frame<'_, B>) -> Vec<K::Primitive> {
        self.0.iter().map(|slot| slot.fetch(frame)).collect()
    }
}

impl<'s, B: Backend, T: Clone + Debug + Sign + Send + 'static> Argument<B> for &'s [T] {
    type Plain = &'s [T];
    type Described<'a> = &'a [T];
    type Slot = Vec<T>;

    fn plain(self) -> Self::Plain {
        self
    }

    fn text(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }

    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
        frame.parameter(self);
        self.to_vec()
    }

    fn describe<'a>(slot: &'a Self::Slot, _frame: &mut CallFrame<B>) -> &'a [T] {
        slot
    }
}

impl<B: Backend, T: 'static> Slot<B> for Vec<T> {
    type Plain<'a> = &'a [T];

    fn fetch<'a>(&'a self, _frame: &mut Frame<'_, B>) -> &'a [T] {
        self
    }
}

/// The slot of a parameter that is not a tensor.
pub(crate) struct Parameter<T>(T);

impl<B: Backend, T: Clone + 'static> Slot<B> for Parameter<T> {
    type Plain<'a> = T;

    fn fetch(&self, _frame: &mut Frame<'_, B>) -> T {
        self.0.clone()
    }
}

macro_rules! parameters {
    ($($ty:ty),* $(,)?) => {$(
        impl<B: Backend> Argument<B> for $ty {
            type Plain = Self;
            type Described<'a> = Self;
            type Slot = Parameter<Self>;

            fn plain(self) -> Self {
                self
            }

            fn text(&self) -> Option<String> {
                Some(format!("{self:?}"))
            }

            fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
                frame.parameter(&self);
                Parameter(self)
            }

            fn describe(slot: &Self::Slot, _frame: &mut CallFrame<B>) -> Self {
                slot.0.clone()
            }
        }
    )*};
}

parameters!(
    bool,
    usize,
    f64,
    [usize; 2],
    Option<usize>,
    Range<i64>,
    Shape,
    Scalar,
    Distribution,
    FloatDType,
    IntDType,
    BoolDType,
    IndexingUpdateOp,
    ConvOptions<1>,
    ConvOptions<2>,
    ConvOptions<3>,
    ConvTransposeOptions<1>,
    ConvTransposeOptions<2>,
    ConvTransposeOptions<3>,
    DeformConvOptions<2>,
    UnfoldOptions,
    InterpolateOptions,
    GridSampleOptions,
    AttentionModuleOptions,
);

impl<B: Backend, K: Kind<B>> Returned<B> for LazyTensor<B, K> {
    type Plain = K::Primitive;
    type Described = Described<B>;
    type Slots = u32;

    fn wrap(plain: Self::Plain) -> Self {
        Self::new(plain)
    }

    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) {
        frame.output(described);
    }

    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        frame.promise(results.next().cloned().flatten().expect("the call makes this result"))
    }

    fn store(slot: Self::Slots, plain: Self::Plain, frame: &mut Frame<'_, B>) {
        frame.store(slot, K::erase(plain));
    }
}

impl<B: Backend, K: Kind<B>> Returned<B> for Option<LazyTensor<B, K>> {
    type Plain = Option<K::Primitive>;
    type Described = Option<Described<B>>;
    type Slots = Option<u32>;

    fn wrap(plain: Self::Plain) -> Self {
        plain.map(LazyTensor::new)
    }

    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) {
        match described {
            Some(described) => frame.output(described),
            None => frame.results.push(None),
        }
    }

    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        results.next().cloned().flatten().map(|form| frame.promise(form)).unzip()
    }

    fn store(slots: Self::Slots, plain: Self::Plain, frame: &mut Frame<'_, B>) {
        if let (Some(slot), Some(plain)) = (slots, plain) {
            frame.store(slot, K::erase(plain));
        }
    }
}

macro_rules! returned_tuples {
    ($(($($name:ident $at:tt),+))*) => {$(
        impl<B: Backend, $($name: Returned<B>),+> Returned<B> for ($($name,)+) {
            type Plain = ($($name::Plain,)+);
            type Described = ($($name::Described,)+);
            type Slots = ($($name::Slots,)+);

            fn wrap(plain: Self::Plain) -> Self {
                ($($name::wrap(plain.$at),)+)
            }

            fn adopt(described: Self::Described, frame: &mut CallFrame<B>) {
                $($name::adopt(described.$at, frame);)+
            }

            fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
                let promised = ($($name::promise(results, frame),)+);
                (($(promised.$at.0,)+), ($(promised.$at.1,)+))
            }

            fn store(slots: Self::Slots, plain: Self::Plain, frame: &mut Frame<'_, B>) {
                $($name::store(slots.$at, plain.$at, frame);)+
            }
        }
    )*};
}

returned_tuples! {
    (R0 0, R1 1)
    (R0 0, R1 1, R2 2)
    (R0 0, R1 1, R2 2, R3 3)
}

/// Results that burn returns as a struct.
macro_rules! returned_struct {
    ($name:ident { $($field:ident: $returned:ty),* }) => {
        impl<B: Backend> Returned<B> for $name<Lazy<B>> {
            type Plain = $name<B>;
            type Described = $name<crate::record::describe::Describer<B>>;
            type Slots = ($(<$returned as Returned<B>>::Slots,)*);

            fn wrap(plain: Self::Plain) -> Self {
                Self { $($field: Returned::<B>::wrap(plain.$field)),* }
            }

            fn adopt(described: Self::Described, frame: &mut CallFrame<B>) {
                $(<$returned as Returned<B>>::adopt(described.$field, frame);)*
            }

            fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
                $(let $field = <$returned as Returned<B>>::promise(results, frame);)*
                (Self { $($field: $field.0),* }, ($($field.1,)*))
            }

            fn store(slots: Self::Slots, plain: Self::Plain, frame: &mut Frame<'_, B>) {
                let ($($field,)*) = slots;
                $(<$returned as Returned<B>>::store($field, plain.$field, frame);)*
            }
        }
    };
}

type FloatTensor<B> = LazyTensor<B, crate::kind::Float>;
type IntTensor<B> = LazyTensor<B, crate::kind::Int>;

returned_struct!(MaxPool1dWithIndices { output: FloatTensor<B>, indices: IntTensor<B> });
returned_struct!(MaxPool2dWithIndices { output: FloatTensor<B>, indices: IntTensor<B> });
returned_struct!(MaxPool1dBackward { x_grad: FloatTensor<B> });
returned_struct!(MaxPool2dBackward { x_grad: FloatTensor<B> });
returned_struct!(DeformConv2dBackward {
    x_grad: FloatTensor<B>,
    offset_grad: FloatTensor<B>,
    weight_grad: FloatTensor<B>,
    mask_grad: Option<FloatTensor<B>>,
    bias_grad: Option<FloatTensor<B>>
});
