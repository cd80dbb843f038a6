//! The operations of the decorator. Each runs immediately on the backend or, inside a recording,
//! becomes a call of the trace and of the program.
//!
//! The methods are listed by signature, and the macros below write their bodies. A test compares
//! the lists with burn's traits, so that no method falls back to a decomposition that the backend
//! does not use.

mod activation;
pub(crate) mod bool;
pub(crate) mod float;
pub(crate) mod int;
mod module;
mod quantized;
mod transaction;

/// Methods that the describing router knows. Called on the backend, or described by the router and
/// recorded.
macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            let Some(_until_done) = $crate::threads::deferred::begin::<B>() else {
                return <$ret as $crate::record::call::forms::Returned<B>>::wrap($crate::threads::streams::on_stream::<B, _>(|| {
                    B::$name($(<$ty as $crate::record::call::forms::Argument<B>>::plain($arg)),*)
                }));
            };
            let mut frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
            $(let $arg = <$ty as $crate::record::call::forms::Argument<B>>::take($arg, &mut frame);)*
            let known = frame.known();
            let described = known.is_none().then(|| {
                frame.describe();
                $crate::record::describe::Describer::<B>::$name(
                    $(<$ty as $crate::record::call::forms::Argument<B>>::describe(&$arg, &mut frame)),*
                )
            });
            let run = move |frame: &mut $crate::record::values::Frame<'_, B>| {
                B::$name($($crate::record::call::forms::Slot::<B>::fetch(&$arg, frame)),*)
            };
            match (known, described) {
                (Some(known), _) => frame.close_known::<$ret>(known, run),
                (None, Some(described)) => frame.close::<$ret>(described, run),
                (None, None) => unreachable!("what is not known was described"),
            }
        }
    )*};
}

/// Methods that the describing router does not know, or knows only by reading values. Described by
/// the shapes and element types of their results.
macro_rules! by_shape {
    ($(
        fn $name:ident($first:ident: $first_ty:ty $(, $arg:ident: $ty:ty)*) -> $ret:ty => $shapes:expr;
    )*) => {$(
        fn $name($first: $first_ty $(, $arg: $ty)*) -> $ret {
            let Some(_until_done) = $crate::threads::deferred::begin::<B>() else {
                return <$ret as $crate::record::call::forms::Returned<B>>::wrap($crate::threads::streams::on_stream::<B, _>(|| {
                    B::$name(
                        <$first_ty as $crate::record::call::forms::Argument<B>>::plain($first)
                        $(, <$ty as $crate::record::call::forms::Argument<B>>::plain($arg))*
                    )
                }));
            };
            let shapes = $shapes;
            let device = $first.device();
            let parameters = $crate::ops::parameters(&[$(&$crate::ops::Described(&$arg)),*]);
            let mut frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
            let $first = <$first_ty as $crate::record::call::forms::Argument<B>>::take($first, &mut frame);
            $(let $arg = <$ty as $crate::record::call::forms::Argument<B>>::take($arg, &mut frame);)*
            let described = frame.describe_by_shape(parameters, &device, shapes);
            let described = $crate::ops::FromShapes::from_shapes(described);
            frame.close::<$ret>(described, move |frame| {
                B::$name(
                    $crate::record::call::forms::Slot::<B>::fetch(&$first, frame)
                    $(, $crate::record::call::forms::Slot::<B>::fetch(&$arg, frame))*
                )
            })
        }
    )*};
}

/// Methods that make a tensor on a device.
macro_rules! create {
    ($kind:ident: $(
        fn $name:ident($($before:ident: $before_ty:ty),*; device; $dtype:ident: $dtype_ty:ty) -> $ret:ty;
    )*) => {$(
        fn $name($($before: $before_ty),*, device: &Device<Self>, $dtype: $dtype_ty) -> $ret {
            create!($kind: $name, device, ($($before),*; $dtype), |_frame| {
                B::$name($($before.clone()),*, &device, $dtype)
            })
        }
    )*};
    ($kind:ident: $name:ident, $device:ident, ($($before:ident),*; $dtype:ident), |$frame:ident| $run:expr) => {{
        let Some(_until_done) = $crate::threads::deferred::begin::<B>() else {
            $crate::threads::streams::meet::<B>($device);
            return $crate::tensor::LazyTensor::<B, $kind>::new($crate::threads::streams::on_stream::<B, _>(|| {
                B::$name($($before),*, $device, $dtype)
            }));
        };
        let frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
        frame.describe();
        let described =
            $crate::record::describe::Describer::<B>::$name($($before.clone()),*, $device, $dtype);
        let $device = $device.clone();
        frame.close::<$crate::tensor::LazyTensor<B, $kind>>(described, move |$frame| $run)
    }};
}

/// Methods that read the values of a tensor.
macro_rules! into_data {
    ($name:ident, $tensor:ident) => {
        fn $name(
            tensor: $tensor<Self>,
        ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
            $crate::record::parking::note_read(burn_backend::TensorMetadata::dtype(&tensor));
            let zeros = $crate::record::limits::Zeros::of(&tensor);
            let parked = tensor.node.parked().cloned();
            let read = parked.is_none().then(|| $crate::record::session::read(tensor)).flatten();
            let read = read.map(|tensor| {
                let held = $crate::threads::handover::InUse::take::<B>();
                let data = $crate::threads::streams::on_stream::<B, _>(|| B::$name(tensor));
                $crate::threads::streams::poll_on_stream::<B, _>(held, data)
            });
            async move {
                match (read, parked) {
                    (Some(data), _) => data.await,
                    (None, Some(parked)) => Ok(parked.fetch()),
                    (None, None) => Ok(zeros.data()),
                }
            }
        }
    };
}

/// Moves a tensor to a device. Records nothing if the tensor is already there.
macro_rules! move_to {
    ($name:ident, $tensor:ident, $device:ident) => {{
        if $crate::threads::deferred::is_later::<B>() && &$tensor.device() == $device {
            return $tensor;
        }
        let Some(_until_done) = $crate::threads::deferred::begin::<B>() else {
            return $crate::tensor::LazyTensor::new($crate::threads::streams::on_stream::<B, _>(
                || B::$name($tensor.into_inner(), $device),
            ));
        };
        let shape = (
            burn_backend::TensorMetadata::shape(&$tensor),
            burn_backend::TensorMetadata::dtype(&$tensor),
        );
        let mut frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
        let slot = frame.input($tensor);
        let [described] = frame.describe_by_shape(String::new(), $device, [shape]);
        let $device = $device.clone();
        frame.close(described, move |frame| {
            B::$name($crate::record::call::forms::Slot::<B>::fetch(&slot, frame), &$device)
        })
    }};
}

use by_shape;
use create;
use forward;
use into_data;
use move_to;

/// A parameter of a call, as its description shows it. Tensors are left out, because the trace
/// shows them.
struct Described<'a, T>(&'a T);

/// A [`Described`] without its type.
trait Show {
    fn show(&self) -> Option<String>;
}

impl<T: Parameter> Show for Described<'_, T> {
    fn show(&self) -> Option<String> {
        self.0.text()
    }
}

/// An argument of a method that is described by the shapes of its results.
trait Parameter {
    fn text(&self) -> Option<String>;
}

macro_rules! parameter {
    ($($ty:ty),*) => {$(
        impl Parameter for $ty {
            fn text(&self) -> Option<String> {
                Some(format!("{self:?}"))
            }
        }
    )*};
}

parameter!(bool, usize, Option<usize>, burn_std::IntDType, burn_backend::ops::GridSampleOptions);

impl<B: burn_backend::Backend, K: crate::kind::Kind<B>> Parameter for crate::LazyTensor<B, K> {
    fn text(&self) -> Option<String> {
        None
    }
}

fn parameters(parameters: &[&dyn Show]) -> String {
    parameters.iter().filter_map(|parameter| parameter.show()).collect::<Vec<_>>().join(", ")
}

/// Turns the list of a call's described tensors into the described results.
trait FromShapes<B: burn_backend::Backend, const N: usize> {
    fn from_shapes(described: [crate::record::describe::Described<B>; N]) -> Self;
}

impl<B: burn_backend::Backend> FromShapes<B, 1> for crate::record::describe::Described<B> {
    fn from_shapes([described]: [crate::record::describe::Described<B>; 1]) -> Self {
        described
    }
}

impl<B: burn_backend::Backend> FromShapes<B, 2>
    for (crate::record::describe::Described<B>, crate::record::describe::Described<B>)
{
    fn from_shapes([first, second]: [crate::record::describe::Described<B>; 2]) -> Self {
        (first, second)
    }
}
