//! One call while it is recorded: how arguments and results of a backend's methods are turned into their three
//! forms.
//!
//! Every argument of a method has a *plain* form (what the backend takes), a *described* form (what the describing
//! router takes) and a *slot* (what the program keeps until it runs). Every result has the same three.

use std::ops::Range;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, GridSampleOptions, InterpolateOptions, MaxPool1dBackward,
    MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, UnfoldOptions,
};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Backend, Distribution, Scalar, TensorMetadata};
use burn_ir::{
    BaseOperationIr, CustomOpIr, OperationIr, ShapeOpIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::{BoolDType, DType, FloatDType, IntDType, Shape};
use firebox_trace::{Call, TensorIndex, Use};

use crate::Lazy;
use crate::describe::{Described, DescriptionClient};
use crate::kind::Kind;
use crate::session::{self, Session, Values};
use crate::tensor::LazyTensor;

/// A call that is being recorded.
pub(crate) struct CallFrame<B: Backend> {
    name: &'static str,
    inputs: Vec<Use>,
    outputs: Vec<TensorIndex>,
    /// The numbers of the outputs in the description.
    local_outputs: Vec<u64>,
    /// Second owners of the described inputs that the call does not own.
    shared: Vec<Described<B>>,
}

fn session<B: Backend, R>(f: impl FnOnce(&mut Session<B>) -> R) -> R {
    session::with(f).expect("calls are recorded inside a recording")
}

impl<B: Backend> CallFrame<B> {
    /// Starts to record a call.
    pub(crate) fn open(name: &'static str) -> Self {
        session::<B, _>(Session::open_call);
        Self {
            name,
            inputs: Vec::new(),
            outputs: Vec::new(),
            local_outputs: Vec::new(),
            shared: Vec::new(),
        }
    }

    /// Takes a tensor as the next input.
    pub(crate) fn input<K: Kind<B>>(
        &mut self,
        tensor: LazyTensor<B, K>,
    ) -> (Described<B>, TensorSlot<K>) {
        let (shape, dtype, device) = (tensor.shape(), tensor.dtype(), tensor.device());
        let (used, id) = session::<B, _>(|session| (session.take(tensor), session.next_local()));
        debug_assert_eq!(id.value(), self.inputs.len() as u64, "inputs are numbered first");
        self.inputs.push(used);
        let described = Described::new(id, shape, dtype, DescriptionClient::new(device));
        if !used.last {
            self.shared.push(described.clone());
        }
        (described, TensorSlot { used, kind: std::marker::PhantomData })
    }

    /// Makes a described tensor the next output.
    pub(crate) fn output<K: Kind<B>>(
        &mut self,
        described: Described<B>,
    ) -> (LazyTensor<B, K>, TensorIndex) {
        let device = described.client.device.clone();
        let mut ir = described.into_ir();
        session::<B, _>(|session| {
            if ir.id.value() < self.inputs.len() as u64 {
                // The description hands an input through; the result is another tensor all the same.
                let shape = ir.shape.clone();
                let alias = ShapeOpIr::reshape(ir.clone(), shape, || session.next_local());
                ir = alias.out.clone();
                session.describe(OperationIr::BaseFloat(BaseOperationIr::Reshape(alias)));
            }
            self.local_outputs.push(ir.id.value());
            let (tensor, index) = session.promise((ir.shape, ir.dtype), device, self.name);
            self.outputs.push(index);
            (tensor, index)
        })
    }

    /// Ends the call: `run` will run it on the backend.
    pub(crate) fn close<R: Returned<B>>(
        mut self,
        described: R::Described,
        run: impl FnOnce(&mut Values<B>) -> R::Plain + Send + 'static,
    ) -> R {
        let (result, slots) = R::adopt(described, &mut self);
        session::<B, _>(|session| {
            let call = Call {
                name: self.name.into(),
                inputs: self.inputs,
                outputs: self.outputs,
                description: session.close_call(self.local_outputs),
            };
            session.push_call(call, move |values| {
                let plain = run(values);
                R::store(slots, plain, values);
            });
        });
        drop(self.shared);
        result
    }

    /// Describes a call that burn-ir has no operation for, by the shapes of its results.
    pub(crate) fn describe_by_shape<const N: usize>(
        &mut self,
        parameters: String,
        device: &B::Device,
        outputs: [(Shape, DType); N],
    ) -> [Described<B>; N] {
        session::<B, _>(|session| {
            let status = |last| if last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly };
            let inputs = self.inputs.iter().enumerate().map(|(number, input)| {
                let info = session.trace.tensor(input.tensor);
                TensorIr {
                    id: TensorId::new(number as u64),
                    shape: info.shape.clone(),
                    status: status(input.last),
                    dtype: info.dtype,
                }
            });
            let inputs: Vec<_> = inputs.collect();
            let outputs = outputs.map(|(shape, dtype)| {
                let id = session.next_local();
                TensorIr::uninit(id, shape, dtype)
            });
            session.describe(OperationIr::Custom(CustomOpIr {
                id: format!("{}({parameters})", self.name),
                inputs,
                outputs: outputs.to_vec(),
            }));
            outputs.map(|ir| {
                Described::new(ir.id, ir.shape, ir.dtype, DescriptionClient::new(device.clone()))
            })
        })
    }
}

/// An argument of a backend's method.
pub(crate) trait Argument<B: Backend> {
    /// What the backend takes.
    type Plain;
    /// What the describing router takes.
    type Described;
    /// What the program keeps.
    type Slot: Slot<B> + Send + 'static;

    fn plain(self) -> Self::Plain;
    fn record(self, frame: &mut CallFrame<B>) -> (Self::Described, Self::Slot);
}

/// An argument that the program keeps.
pub(crate) trait Slot<B: Backend> {
    /// What the backend takes.
    type Plain<'a>
    where
        Self: 'a;

    fn fetch<'a>(&'a mut self, values: &mut Values<B>) -> Self::Plain<'a>;
}

/// A result of a backend's method.
pub(crate) trait Returned<B: Backend>: Sized {
    /// What the backend gives.
    type Plain;
    /// What the describing router gives.
    type Described;
    /// Where the program puts it.
    type Slots: Send + 'static;

    fn wrap(plain: Self::Plain) -> Self;
    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) -> (Self, Self::Slots);
    fn store(slots: Self::Slots, plain: Self::Plain, values: &mut Values<B>);
}

/// The slot of a tensor.
pub(crate) struct TensorSlot<K> {
    used: Use,
    kind: std::marker::PhantomData<fn() -> K>,
}

impl<B: Backend, K: Kind<B>> Slot<B> for TensorSlot<K> {
    type Plain<'a> = K::Primitive;

    fn fetch(&mut self, values: &mut Values<B>) -> K::Primitive {
        K::restore(values.fetch(self.used))
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for LazyTensor<B, K> {
    type Plain = K::Primitive;
    type Described = Described<B>;
    type Slot = TensorSlot<K>;

    fn plain(self) -> Self::Plain {
        self.into_inner()
    }

    fn record(self, frame: &mut CallFrame<B>) -> (Self::Described, Self::Slot) {
        frame.input(self)
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for Option<LazyTensor<B, K>> {
    type Plain = Option<K::Primitive>;
    type Described = Option<Described<B>>;
    type Slot = Option<TensorSlot<K>>;

    fn plain(self) -> Self::Plain {
        self.map(LazyTensor::into_inner)
    }

    fn record(self, frame: &mut CallFrame<B>) -> (Self::Described, Self::Slot) {
        self.map(|tensor| frame.input(tensor)).unzip()
    }
}

impl<B: Backend, K: Kind<B>> Slot<B> for Option<TensorSlot<K>> {
    type Plain<'a> = Option<K::Primitive>;

    fn fetch(&mut self, values: &mut Values<B>) -> Option<K::Primitive> {
        self.as_mut().map(|slot| slot.fetch(values))
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for Vec<LazyTensor<B, K>> {
    type Plain = Vec<K::Primitive>;
    type Described = Vec<Described<B>>;
    type Slot = Many<TensorSlot<K>>;

    fn plain(self) -> Self::Plain {
        self.into_iter().map(LazyTensor::into_inner).collect()
    }

    fn record(self, frame: &mut CallFrame<B>) -> (Self::Described, Self::Slot) {
        let (described, slots) = self.into_iter().map(|tensor| frame.input(tensor)).unzip();
        (described, Many(slots))
    }
}

/// The slots of several tensors.
pub(crate) struct Many<S>(Vec<S>);

impl<B: Backend, K: Kind<B>> Slot<B> for Many<TensorSlot<K>> {
    type Plain<'a> = Vec<K::Primitive>;

    fn fetch(&mut self, values: &mut Values<B>) -> Vec<K::Primitive> {
        self.0.iter_mut().map(|slot| slot.fetch(values)).collect()
    }
}

impl<'s, B: Backend, T: Clone + Send + 'static> Argument<B> for &'s [T] {
    type Plain = &'s [T];
    type Described = &'s [T];
    type Slot = Vec<T>;

    fn plain(self) -> Self::Plain {
        self
    }

    fn record(self, _frame: &mut CallFrame<B>) -> (Self::Described, Self::Slot) {
        (self, self.to_vec())
    }
}

impl<B: Backend, T: 'static> Slot<B> for Vec<T> {
    type Plain<'a> = &'a [T];

    fn fetch<'a>(&'a mut self, _values: &mut Values<B>) -> &'a [T] {
        self
    }
}

/// The slot of a parameter that is no tensor.
pub(crate) struct Parameter<T>(Option<T>);

impl<B: Backend, T: 'static> Slot<B> for Parameter<T> {
    type Plain<'a> = T;

    fn fetch(&mut self, _values: &mut Values<B>) -> T {
        self.0.take().expect("a call runs once")
    }
}

macro_rules! parameters {
    ($($ty:ty),* $(,)?) => {$(
        impl<B: Backend> Argument<B> for $ty {
            type Plain = Self;
            type Described = Self;
            type Slot = Parameter<Self>;

            fn plain(self) -> Self {
                self
            }

            fn record(self, _frame: &mut CallFrame<B>) -> (Self, Self::Slot) {
                (self.clone(), Parameter(Some(self)))
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
    type Slots = TensorIndex;

    fn wrap(plain: Self::Plain) -> Self {
        Self::new(plain)
    }

    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        frame.output(described)
    }

    fn store(slot: Self::Slots, plain: Self::Plain, values: &mut Values<B>) {
        values.store(slot, K::erase(plain));
    }
}

impl<B: Backend, K: Kind<B>> Returned<B> for Option<LazyTensor<B, K>> {
    type Plain = Option<K::Primitive>;
    type Described = Option<Described<B>>;
    type Slots = Option<TensorIndex>;

    fn wrap(plain: Self::Plain) -> Self {
        plain.map(LazyTensor::new)
    }

    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        described.map(|described| frame.output(described)).unzip()
    }

    fn store(slots: Self::Slots, plain: Self::Plain, values: &mut Values<B>) {
        if let (Some(slot), Some(plain)) = (slots, plain) {
            values.store(slot, K::erase(plain));
        }
    }
}

impl<B: Backend, R1: Returned<B>, R2: Returned<B>> Returned<B> for (R1, R2) {
    type Plain = (R1::Plain, R2::Plain);
    type Described = (R1::Described, R2::Described);
    type Slots = (R1::Slots, R2::Slots);

    fn wrap(plain: Self::Plain) -> Self {
        (R1::wrap(plain.0), R2::wrap(plain.1))
    }

    fn adopt(described: Self::Described, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        let (first, first_slots) = R1::adopt(described.0, frame);
        let (second, second_slots) = R2::adopt(described.1, frame);
        ((first, second), (first_slots, second_slots))
    }

    fn store(slots: Self::Slots, plain: Self::Plain, values: &mut Values<B>) {
        R1::store(slots.0, plain.0, values);
        R2::store(slots.1, plain.1, values);
    }
}

/// Results that burn puts into a struct of their own.
macro_rules! returned_struct {
    ($name:ident { $($field:ident: $returned:ty),* }) => {
        impl<B: Backend> Returned<B> for $name<Lazy<B>> {
            type Plain = $name<B>;
            type Described = $name<crate::describe::Describer<B>>;
            type Slots = ($(<$returned as Returned<B>>::Slots,)*);

            fn wrap(plain: Self::Plain) -> Self {
                Self { $($field: Returned::<B>::wrap(plain.$field)),* }
            }

            fn adopt(described: Self::Described, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
                $(let $field = <$returned as Returned<B>>::adopt(described.$field, frame);)*
                (Self { $($field: $field.0),* }, ($($field.1,)*))
            }

            fn store(slots: Self::Slots, plain: Self::Plain, values: &mut Values<B>) {
                let ($($field,)*) = slots;
                $(<$returned as Returned<B>>::store($field, plain.$field, values);)*
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
