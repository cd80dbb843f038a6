//! Values that wait outside of the device, and where they are put. `parks.rs` parks tensors of a
//! recording.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use burn_backend::{DType, TensorData};
use firebox_trace::TensorIndex;

/// Values outside of a device: in host memory ([`TensorData`] is one), in a file.
pub trait Parked: Send + Sync {
    /// The values. They leave their place if nobody else holds it.
    ///
    /// # Panics
    ///
    /// If they cannot be had.
    fn fetch(self: Arc<Self>) -> TensorData;
}

impl Parked for TensorData {
    fn fetch(self: Arc<Self>) -> TensorData {
        Arc::unwrap_or_clone(self)
    }
}

/// Finds a place for values outside of the device.
pub(crate) type Keep = Rc<dyn Fn(TensorData) -> Arc<dyn Parked>>;

/// What a session parks.
pub(crate) struct Parking {
    pub(crate) keep: Keep,
    /// The tensors, each with the step behind which it is parked. In order, the last one first.
    pub(crate) due: Vec<(usize, TensorIndex)>,
}

thread_local! {
    static UPLOADS: RefCell<Option<Keep>> = const { RefCell::new(None) };
    /// The types of tensors that this thread has read, if somebody wants to know.
    static READ: RefCell<Option<Vec<DType>>> = const { RefCell::new(None) };
}

/// Runs `work`. Returns what it returns, and the types of the tensors that it has read, each once.
pub fn types_read<R>(work: impl FnOnce() -> R) -> (R, Vec<DType>) {
    let before = READ.replace(Some(Vec::new()));
    let result = work();
    let types = READ.replace(before);
    (result, types.unwrap_or_default())
}

/// Notes that a tensor of this type is read.
pub(crate) fn note_read(dtype: DType) {
    READ.with_borrow_mut(|types| {
        if let Some(types) = types.as_mut().filter(|types| !types.contains(&dtype)) {
            types.push(dtype);
        }
    });
}

/// Parks what `load` makes of host data on this thread, instead of uploading it. `keep` finds a
/// place for it.
///
/// ```
/// use std::sync::Arc;
///
/// use burn::backend::Flex;
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Lazy, park_uploads};
///
/// let load = || Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
/// let parked = park_uploads(|data| Arc::new(data), load);
/// assert_eq!((parked * 2.0).into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
/// ```
pub fn park_uploads<R>(
    keep: impl Fn(TensorData) -> Arc<dyn Parked> + 'static,
    load: impl FnOnce() -> R,
) -> R {
    struct Before(Option<Keep>);

    impl Drop for Before {
        fn drop(&mut self) {
            UPLOADS.set(self.0.take());
        }
    }

    let _before = Before(UPLOADS.replace(Some(Rc::new(keep))));
    load()
}

/// What finds a place for what is uploaded on this thread, if anything does.
pub(crate) fn keeper_of_uploads() -> Option<Keep> {
    UPLOADS.with_borrow(Clone::clone)
}
