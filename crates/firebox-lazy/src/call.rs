//! One call while it is recorded: how arguments and results of a backend's methods are turned into their three
//! forms.
//!
//! Every argument of a method has a *plain* form (what the backend takes), a *described* form (what the describing
//! router takes) and a *slot* (what the program keeps until it runs). Every result has the same three.

use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, GridSampleOptions, InterpolateOptions, MaxPool1dBackward,
    MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices, UnfoldOptions,
};
use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Backend, Distribution, Scalar};
use burn_ir::{
    BaseOperationIr, CustomOpIr, OperationIr, ShapeOpIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::{BoolDType, DType, FloatDType, IntDType, Shape};
use firebox_trace::{Call, DescriptionIndex, TensorIndex, Use};
use rustc_hash::FxHasher;

use crate::Lazy;
use crate::describe::{Described, DescriptionClient};
use crate::kind::Kind;
use crate::known::{Form, Known, Sign};
use crate::session::{self, Session, Values};
use crate::tensor::LazyTensor;

/// A call that is being recorded.
pub(crate) struct CallFrame<B: Backend> {
    name: &'static str,
    inputs: Vec<Use>,
    outputs: Vec<TensorIndex>,
    /// The device of the first input.
    device: Option<B::Device>,
    /// The hash of the method, its parameters, and the shapes, element types and owners of its inputs.
    signature: FxHasher,
    /// Whether the call was looked for by its signature.
    looked_up: bool,
    /// What the call makes.
    results: Vec<Option<Form>>,
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
        let mut signature = FxHasher::default();
        TypeId::of::<B>().hash(&mut signature);
        name.hash(&mut signature);
        Self {
            name,
            inputs: Vec::new(),
            outputs: Vec::new(),
            device: None,
            signature,
            looked_up: false,
            results: Vec::new(),
            local_outputs: Vec::new(),
            shared: Vec::new(),
        }
    }

    /// Takes a tensor as the next input.
    pub(crate) fn input<K: Kind<B>>(&mut self, tensor: LazyTensor<B, K>) -> TensorSlot<K> {
        if self.device.is_none() {
            self.device = Some(tensor.device());
        }
        let number = self.inputs.len() as u32;
        let signature = &mut self.signature;
        let used = session::<B, _>(|session| {
            let used = session.take(tensor);
            let info = session.trace.tensor(used.tensor);
            info.shape.hash(signature);
            info.dtype.hash(signature);
            used.last.hash(signature);
            used
        });
        self.inputs.push(used);
        TensorSlot { used, number, kind: std::marker::PhantomData }
    }

    /// Takes a parameter that is no tensor.
    pub(crate) fn parameter<T: Sign + ?Sized>(&mut self, parameter: &T) {
        parameter.sign(&mut self.signature);
    }

    /// The same call, if it was described before.
    pub(crate) fn known(&mut self) -> Option<(DescriptionIndex, Arc<Known>)> {
        self.looked_up = true;
        let signature = self.signature.finish();
        session::<B, _>(|session| {
            let found = session.known_call(signature)?;
            let alike = |(input, (form, last)): (&Use, &(Form, bool))| {
                let info = session.trace.tensor(input.tensor);
                input.last == *last && info.shape == form.0 && info.dtype == form.1
            };
            let same = found.1.name == self.name
                && found.1.inputs.len() == self.inputs.len()
                && self.inputs.iter().zip(&found.1.inputs).all(alike);
            same.then_some(found)
        })
    }

    /// Starts to describe the call.
    pub(crate) fn describe(&self) {
        session::<B, _>(|session| session.open_call(self.inputs.len()));
    }

    /// An input as the describing router takes it.
    fn described<K>(&mut self, slot: &TensorSlot<K>) -> Described<B> {
        let device = self.device.clone().expect("there is an input");
        let (shape, dtype) = session::<B, _>(|session| session.form(slot.used.tensor));
        let id = TensorId::new(slot.number.into());
        let described = Described::new(id, shape, dtype, DescriptionClient::new(device));
        if !slot.used.last {
            self.shared.push(described.clone());
        }
        described
    }

    /// Makes a described tensor the next output.
    pub(crate) fn output<K: Kind<B>>(
        &mut self,
        described: Described<B>,
    ) -> (LazyTensor<B, K>, TensorIndex) {
        let device = described.client.device.clone();
        let mut ir = described.into_ir();
        if ir.id.value() < self.inputs.len() as u64 {
            // The description hands an input through; the result is another tensor all the same.
            session::<B, _>(|session| {
                let shape = ir.shape.clone();
                let alias = ShapeOpIr::reshape(ir.clone(), shape, || session.next_local());
                ir = alias.out.clone();
                session.describe(OperationIr::BaseFloat(BaseOperationIr::Reshape(alias)));
            });
        }
        self.local_outputs.push(ir.id.value());
        self.results.push(Some((ir.shape.clone(), ir.dtype)));
        self.promise((ir.shape, ir.dtype), device)
    }

    /// Makes a new tensor the next output.
    fn promise<K: Kind<B>>(
        &mut self,
        form: Form,
        device: B::Device,
    ) -> (LazyTensor<B, K>, TensorIndex) {
        let (tensor, index) = session::<B, _>(|session| session.promise(form, device, self.name));
        self.outputs.push(index);
        (tensor, index)
    }

    /// Ends a call that was described: `run` will run it on the backend.
    pub(crate) fn close<R: Returned<B>>(
        mut self,
        described: R::Described,
        run: impl FnOnce(&mut Values<B>) -> R::Plain + Send + 'static,
    ) -> R {
        let (result, slots) = R::adopt(described, &mut self);
        session::<B, _>(|session| {
            let description = session.close_call(std::mem::take(&mut self.local_outputs));
            if self.looked_up {
                let known = Arc::new(self.remembered(session, description));
                session.remember_call(self.signature.finish(), description, known);
            }
            self.finish::<R>(session, description, slots, run);
        });
        drop(self.shared);
        result
    }

    fn remembered(&mut self, session: &Session<B>, description: DescriptionIndex) -> Known {
        let inputs = self.inputs.iter();
        Known {
            name: self.name,
            inputs: inputs.map(|input| (session.form(input.tensor), input.last)).collect(),
            description: session.trace.descriptions[description.0 as usize].clone(),
            results: std::mem::take(&mut self.results),
        }
    }

    /// Ends a call that is known.
    pub(crate) fn close_known<R: Returned<B>>(
        mut self,
        (description, known): (DescriptionIndex, Arc<Known>),
        run: impl FnOnce(&mut Values<B>) -> R::Plain + Send + 'static,
    ) -> R {
        let (result, slots) = R::promise(&mut known.results.iter(), &mut self);
        session::<B, _>(|session| self.finish::<R>(session, description, slots, run));
        result
    }

    fn finish<R: Returned<B>>(
        &mut self,
        session: &mut Session<B>,
        description: DescriptionIndex,
        slots: R::Slots,
        run: impl FnOnce(&mut Values<B>) -> R::Plain + Send + 'static,
    ) {
        let call = Call {
            name: self.name.into(),
            inputs: std::mem::take(&mut self.inputs),
            outputs: std::mem::take(&mut self.outputs),
            description,
        };
        session.push_call(call, move |values| {
            let plain = run(values);
            R::store(slots, plain, values);
        });
    }

    /// Describes a call that burn-ir has no operation for, by the shapes of its results.
    pub(crate) fn describe_by_shape<const N: usize>(
        &mut self,
        parameters: String,
        device: &B::Device,
        outputs: [(Shape, DType); N],
    ) -> [Described<B>; N] {
        self.describe();
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
    type Described<'a>;
    /// What the program keeps.
    type Slot: Slot<B> + Send + 'static;

    fn plain(self) -> Self::Plain;
    fn take(self, frame: &mut CallFrame<B>) -> Self::Slot;
    fn describe<'a>(slot: &'a Self::Slot, frame: &mut CallFrame<B>) -> Self::Described<'a>;
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
    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots);
    fn store(slots: Self::Slots, plain: Self::Plain, values: &mut Values<B>);
}

/// What a known call makes.
pub(crate) type Results<'a> = std::slice::Iter<'a, Option<Form>>;

/// The slot of a tensor.
pub(crate) struct TensorSlot<K> {
    used: Use,
    /// Its position among the inputs.
    number: u32,
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
    type Described<'a> = Described<B>;
    type Slot = TensorSlot<K>;

    fn plain(self) -> Self::Plain {
        self.into_inner()
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

    fn fetch(&mut self, values: &mut Values<B>) -> Option<K::Primitive> {
        self.as_mut().map(|slot| slot.fetch(values))
    }
}

impl<B: Backend, K: Kind<B>> Argument<B> for Vec<LazyTensor<B, K>> {
    type Plain = Vec<K::Primitive>;
    type Described<'a> = Vec<Described<B>>;
    type Slot = Many<TensorSlot<K>>;

    fn plain(self) -> Self::Plain {
        self.into_iter().map(LazyTensor::into_inner).collect()
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
pub(crate) struct Many<S>(Vec<S>);

impl<B: Backend, K: Kind<B>> Slot<B> for Many<TensorSlot<K>> {
    type Plain<'a> = Vec<K::Primitive>;

    fn fetch(&mut self, values: &mut Values<B>) -> Vec<K::Primitive> {
        self.0.iter_mut().map(|slot| slot.fetch(values)).collect()
    }
}

impl<'s, B: Backend, T: Clone + Sign + Send + 'static> Argument<B> for &'s [T] {
    type Plain = &'s [T];
    type Described<'a> = &'a [T];
    type Slot = Vec<T>;

    fn plain(self) -> Self::Plain {
        self
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
            type Described<'a> = Self;
            type Slot = Parameter<Self>;

            fn plain(self) -> Self {
                self
            }

            fn take(self, frame: &mut CallFrame<B>) -> Self::Slot {
                frame.parameter(&self);
                Parameter(Some(self))
            }

            fn describe(slot: &Self::Slot, _frame: &mut CallFrame<B>) -> Self {
                slot.0.clone().expect("a call is described before it runs")
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

    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        let form = results.next().cloned().flatten().expect("the call makes this result");
        let device = frame.device.clone().expect("a known call has an input");
        frame.promise(form, device)
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
        if described.is_none() {
            frame.results.push(None);
        }
        described.map(|described| frame.output(described)).unzip()
    }

    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        let form = results.next().expect("the call may make this result").clone();
        let device = frame.device.clone().expect("a known call has an input");
        form.map(|form| frame.promise(form, device)).unzip()
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

    fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
        let (first, first_slots) = R1::promise(results, frame);
        let (second, second_slots) = R2::promise(results, frame);
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

            fn promise(results: &mut Results<'_>, frame: &mut CallFrame<B>) -> (Self, Self::Slots) {
                $(let $field = <$returned as Returned<B>>::promise(results, frame);)*
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
