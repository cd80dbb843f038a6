//! Operations of the user's own: kernels that burn does not know, on [`Lazy`](crate::Lazy).
//!
//! Outside a recording they run immediately. Inside one, `call.rs` records them like any other
//! call.

use std::fmt;

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use firebox_trace::Bytes;

use crate::kind::Kind;
use crate::record::call::forms::{Argument, Many, Returned, Slot, TensorSlot};
use crate::record::call::{CallFrame, once};
use crate::record::values::Frame;
use crate::tensor::LazyTensor;
use crate::threads::deferred;
use crate::threads::streams::on_stream;

/// An operation that burn's backend traits do not have, on tensors of [`Lazy<B>`](crate::Lazy).
///
/// To extend burn, write a trait and implement it for every backend in use. `Lazy<B>` implements
/// the trait with `CustomOp`, which runs the operation of `B` immediately or, inside a recording,
/// records it. To add a backward pass, implement the trait for `Autodiff<B>` too, as anywhere in
/// burn.
///
/// # Memory
///
/// The author states what the operation allocates in addition to its results, by
/// [`workspace`](Self::workspace). Memory models count the results as fresh memory, the inputs
/// until the operation is done, and the workspace in between. If nothing is stated, they guess, and
/// name the operation in [`Footprint::unaccounted`](firebox_trace::Footprint::unaccounted).
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::backend::Backend;
/// use burn::tensor::ops::FloatTensor;
/// use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive};
/// use firebox_lazy::{CustomOp, Lazy, StepRecorder};
/// use firebox_trace::Bytes;
///
/// trait Swish: Backend {
///     fn swish(x: FloatTensor<Self>, beta: f32) -> FloatTensor<Self>;
/// }
///
/// impl Swish for Flex {
///     fn swish(x: FloatTensor<Self>, beta: f32) -> FloatTensor<Self> {
///         // Your own kernel. This one runs on the host.
///         let x = Tensor::<Flex, 1>::from_primitive(TensorPrimitive::Float(x)).into_data();
///         let y: Vec<f32> = x.iter::<f32>().map(|x| x / (1.0 + (-beta * x).exp())).collect();
///         let y = Tensor::<Flex, 1>::from_floats(y.as_slice(), &Default::default());
///         y.into_primitive().tensor()
///     }
/// }
///
/// impl<B: Swish> Swish for Lazy<B> {
///     fn swish(x: FloatTensor<Self>, beta: f32) -> FloatTensor<Self> {
///         let form = (x.shape(), x.dtype());
///         CustomOp::new("swish")
///             .parameter(beta)
///             .workspace(Bytes::ZERO)
///             .call(x, form, move |x| B::swish(x, beta))
///     }
/// }
///
/// let x = Tensor::<Lazy<Flex>, 1>::from_floats([-1.0, 0.0, 1.0], &Default::default());
/// let recording = StepRecorder::new().record::<Flex, _>(|| {
///     let y = Lazy::<Flex>::swish(x.into_primitive().tensor(), 1.0);
///     Tensor::<Lazy<Flex>, 1>::from_primitive(TensorPrimitive::Float(y)).sum()
/// })?;
/// assert_eq!(recording.trace().calls().next().unwrap().1.name, "swish");
/// assert!((recording.run().into_scalar() - 0.4621172).abs() < 1e-6);
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "an operation does nothing until it is called"]
pub struct CustomOp {
    name: &'static str,
    parameters: Vec<String>,
    workspace: Option<Bytes>,
}

/// The shape and element type of a tensor.
pub type Form = (Shape, DType);

impl CustomOp {
    /// An operation that reports call `name`. Its name and parameters distinguish it from others.
    pub fn new(name: &'static str) -> Self {
        Self { name, parameters: Vec::new(), workspace: None }
    }

    /// Adds a parameter that is not a tensor.
    ///
    /// Everything that decides how much memory the operation needs must be a parameter, except the
    /// shapes of its inputs. Steps whose operations look alike are assumed to need the same memory.
    pub fn parameter(mut self, parameter: impl fmt::Debug) -> Self {
        self.parameters.push(format!("{parameter:?}"));
        self
    }

    /// What the operation allocates while it runs, excluding its results. Default: unknown.
    pub fn workspace(mut self, bytes: Bytes) -> Self {
        self.workspace = Some(bytes);
        self
    }

    /// Calls the operation. `run` runs it on `B`: immediately, or when this thread's recording
    /// runs.
    ///
    /// `inputs` is a tensor, an `Option` or a `Vec` of tensors, or a tuple of up to eight of these.
    /// As with burn's own methods, `run` owns its inputs and may overwrite one that nobody else
    /// holds. `results` are the shapes and element types of what `run` returns: a tensor or a tuple
    /// of two to four.
    ///
    /// The results live on the device of the first tensor.
    ///
    /// # Panics
    ///
    /// - If the call is recorded, or made on a loader thread, and there is no input tensor.
    /// - If a result has another shape or element type than stated. Panics where the operation
    ///   runs.
    pub fn call<B, I, O>(
        self,
        inputs: I,
        results: O::Forms,
        run: impl FnOnce(I::Plain) -> O::Plain + Send + 'static,
    ) -> O
    where
        B: Backend,
        I: CustomInputs<B>,
        O: CustomResults<B>,
    {
        let name = self.name;
        let forms = O::list(results);
        let Some(_until_done) = deferred::begin::<B>() else {
            let plain = on_stream::<B, _>(|| run(inputs.plain()));
            return O::wrap(as_said::<B, O>(plain, name, &forms));
        };
        let mut frame = CallFrame::<B>::open(name);
        let slots = inputs.take(&mut frame);
        assert!(frame.device.is_some(), "custom operation `{name}` has an input tensor");
        let said = forms.clone();
        let run = move |frame: &mut Frame<'_, B>| {
            as_said::<B, O>(run(I::fetch(slots, frame)), name, &said)
        };
        let parameters = self.parameters.join(", ");
        frame.close_custom(&parameters, &forms, self.workspace, once::<B, O>(run))
    }
}

/// The input tensors of a [`CustomOp`]. Implemented for tensors of `Lazy<B>`, for an `Option` or
/// `Vec` of them, and for tuples of these.
pub trait CustomInputs<B: Backend> {
    /// What the backend takes.
    type Plain;
    #[doc(hidden)]
    type Slots: Send + 'static;

    #[doc(hidden)]
    fn plain(self) -> Self::Plain;
    #[doc(hidden)]
    fn take(self, frame: &mut CallFrame<B>) -> Self::Slots;
    #[doc(hidden)]
    fn fetch(slots: Self::Slots, frame: &mut Frame<'_, B>) -> Self::Plain;
}

/// The results of a [`CustomOp`]. Implemented for a tensor of `Lazy<B>` and for tuples of two to
/// four. `Plain` is what the backend returns.
pub trait CustomResults<B: Backend>: Returned<B> {
    /// The shape and element type of each.
    type Forms;

    #[doc(hidden)]
    fn list(forms: Self::Forms) -> Vec<Form>;
    #[doc(hidden)]
    fn forms(plain: &Self::Plain) -> Self::Forms;
}

macro_rules! inputs {
    ($($tensors:ty: $plain:ty, $slots:ty;)*) => {$(
        impl<B: Backend, K: Kind<B>> CustomInputs<B> for $tensors {
            type Plain = $plain;
            type Slots = $slots;

            fn plain(self) -> Self::Plain {
                Argument::plain(self)
            }

            fn take(self, frame: &mut CallFrame<B>) -> Self::Slots {
                Argument::take(self, frame)
            }

            fn fetch(slots: Self::Slots, frame: &mut Frame<'_, B>) -> Self::Plain {
                slots.fetch(frame)
            }
        }
    )*};
}

inputs! {
    LazyTensor<B, K>: K::Primitive, TensorSlot<K>;
    Option<LazyTensor<B, K>>: Option<K::Primitive>, Option<TensorSlot<K>>;
    Vec<LazyTensor<B, K>>: Vec<K::Primitive>, Many<TensorSlot<K>>;
}

macro_rules! tuples_of_inputs {
    ($(($($name:ident $at:tt),+))*) => {$(
        impl<B: Backend, $($name: CustomInputs<B>),+> CustomInputs<B> for ($($name,)+) {
            type Plain = ($($name::Plain,)+);
            type Slots = ($($name::Slots,)+);

            fn plain(self) -> Self::Plain {
                ($(self.$at.plain(),)+)
            }

            fn take(self, frame: &mut CallFrame<B>) -> Self::Slots {
                ($(self.$at.take(frame),)+)
            }

            fn fetch(slots: Self::Slots, frame: &mut Frame<'_, B>) -> Self::Plain {
                ($($name::fetch(slots.$at, frame),)+)
            }
        }
    )*};
}

tuples_of_inputs! {
    (I0 0)
    (I0 0, I1 1)
    (I0 0, I1 1, I2 2)
    (I0 0, I1 1, I2 2, I3 3)
    (I0 0, I1 1, I2 2, I3 3, I4 4)
    (I0 0, I1 1, I2 2, I3 3, I4 4, I5 5)
    (I0 0, I1 1, I2 2, I3 3, I4 4, I5 5, I6 6)
    (I0 0, I1 1, I2 2, I3 3, I4 4, I5 5, I6 6, I7 7)
}

impl<B: Backend, K: Kind<B>> CustomResults<B> for LazyTensor<B, K> {
    type Forms = Form;

    fn list(form: Form) -> Vec<Form> {
        vec![form]
    }

    fn forms(plain: &Self::Plain) -> Form {
        (plain.shape(), plain.dtype())
    }
}

macro_rules! tuples_of_results {
    ($(($($name:ident $at:tt),+))*) => {$(
        impl<B: Backend, $($name: CustomResults<B>),+> CustomResults<B> for ($($name,)+) {
            type Forms = ($($name::Forms,)+);

            fn list(forms: Self::Forms) -> Vec<Form> {
                [$($name::list(forms.$at)),+].concat()
            }

            fn forms(plain: &Self::Plain) -> Self::Forms {
                ($($name::forms(&plain.$at),)+)
            }
        }
    )*};
}

tuples_of_results! {
    (O0 0, O1 1)
    (O0 0, O1 1, O2 2)
    (O0 0, O1 1, O2 2, O3 3)
}

/// Checks that results have the stated forms, and returns them.
fn as_said<B: Backend, O: CustomResults<B>>(
    plain: O::Plain,
    name: &str,
    said: &[Form],
) -> O::Plain {
    for ((shape, dtype), given) in said.iter().zip(O::list(O::forms(&plain))) {
        assert!(
            given.0 == *shape && given.1 == *dtype,
            "custom operation `{name}` was said to give {:?} {dtype:?}, and gave {:?} {:?}",
            shape.as_slice(),
            given.0.as_slice(),
            given.1,
        );
    }
    plain
}
