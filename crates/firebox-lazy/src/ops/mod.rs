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
            let waits = || false $(|| <$ty as $crate::record::call::forms::Argument<B>>::waits(&$arg))*;
            let Some(_until_done) = $crate::threads::deferred::begin_unless_computed::<B>(waits) else {
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
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty => $forms:expr;)*) => {$(
        fn $name($($arg: $ty),*) -> $ret {
            let waits = || false $(|| <$ty as $crate::record::call::forms::Argument<B>>::waits(&$arg))*;
            let Some(_until_done) = $crate::threads::deferred::begin_unless_computed::<B>(waits) else {
                return <$ret as $crate::record::call::forms::Returned<B>>::wrap($crate::threads::streams::on_stream::<B, _>(|| {
                    B::$name($(<$ty as $crate::record::call::forms::Argument<B>>::plain($arg)),*)
                }));
            };
            let forms = $forms;
            let texts = [$(<$ty as $crate::record::call::forms::Argument<B>>::text(&$arg)),*];
            let parameters = texts.into_iter().flatten().collect::<Vec<_>>().join(", ");
            let mut frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
            $(let $arg = <$ty as $crate::record::call::forms::Argument<B>>::take($arg, &mut frame);)*
            let run = $crate::record::call::again::<B, $ret>(move |frame| {
                B::$name($($crate::record::call::forms::Slot::<B>::fetch(&$arg, frame)),*)
            });
            frame.close_custom(&parameters, &forms, None, run)
        }
    )*};
}

/// Methods that make a tensor on a device.
macro_rules! create {
    ($kind:ident: $(
        fn $name:ident($($before:ident: $before_ty:ty),*; device; $dtype:ident: $dtype_ty:ty) -> $ret:ty;
    )*) => {$(
        fn $name($($before: $before_ty),*, device: &Device<Self>, $dtype: $dtype_ty) -> $ret {
            create!($kind: $name, device, ($($before),*; $dtype), draws: false, |_frame| {
                B::$name($($before.clone()),*, &device, $dtype)
            })
        }
    )*};
    ($kind:ident: $name:ident, $device:ident, ($($before:ident),*; $dtype:ident), draws: $draws:literal, |$frame:ident| $run:expr) => {{
        let Some(_until_done) = $crate::threads::deferred::begin_unless_computed::<B>(|| $draws) else {
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
    ($name:ident: $kind:ident, $tensor:ident, $device:ident) => {{
        if $crate::threads::deferred::is_later::<B>() && &$tensor.device() == $device {
            return $tensor;
        }
        let Some(_until_done) = $crate::threads::deferred::begin::<B>() else {
            return $crate::tensor::LazyTensor::new($crate::threads::streams::on_stream::<B, _>(
                || B::$name($tensor.into_inner(), $device),
            ));
        };
        let form = (
            burn_backend::TensorMetadata::shape(&$tensor),
            burn_backend::TensorMetadata::dtype(&$tensor),
        );
        let mut frame = $crate::record::call::CallFrame::<B>::open(stringify!($name));
        let slot = frame.input($tensor);
        let $device = $device.clone();
        frame.device = Some($device.clone());
        let run = $crate::record::call::again::<B, $crate::LazyTensor<B, $kind>>(move |frame| {
            B::$name($crate::record::call::forms::Slot::<B>::fetch(&slot, frame), &$device)
        });
        frame.close_custom("", &[form], None, run)
    }};
}

use by_shape;
use create;
use forward;
use into_data;
use move_to;
