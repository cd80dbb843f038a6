//! Tensors whose values wait outside of the device: parked behind the last step of a recording that
//! uses them, and brought back by the next call that does.
//!
//! The Learner parks the optimizer's state here, which nothing uses during micro-steps.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use burn_backend::{Backend, TensorData, TensorMetadata};
use firebox_trace::{Bytes, Category, Label, OpIndex, Origin, Step, TensorIndex};

use crate::kind::Kind;
use crate::record::inputs::values_of;
use crate::record::recording::Recording;
use crate::record::session::Session;
use crate::record::values::{Instruction, push};
use crate::tensor::LazyTensor;

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
    keep: Keep,
    /// The tensors, each with the step behind which it is parked. In order, the last one first.
    due: Vec<(usize, TensorIndex)>,
}

thread_local! {
    static UPLOADS: RefCell<Option<Keep>> = const { RefCell::new(None) };
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

/// The tensor of host data that is to be parked. `Err` if it is to be uploaded.
pub(crate) fn parked_upload<B: Backend, K: Kind<B>>(
    data: TensorData,
    device: &B::Device,
    call: &'static str,
) -> Result<LazyTensor<B, K>, TensorData> {
    match UPLOADS.with_borrow(Clone::clone) {
        Some(keep) => {
            let form = (data.shape.clone(), data.dtype);
            Ok(LazyTensor::parked(form, device.clone(), call, keep(data)))
        }
        None => Err(data),
    }
}

impl<B: Backend> Session<B> {
    /// Uploads a parked tensor for this session. It stays parked for its other owners.
    pub(crate) fn bring_back<K: Kind<B>>(
        &mut self,
        tensor: &LazyTensor<B, K>,
        parked: Arc<dyn Parked>,
    ) -> TensorIndex {
        let at = OpIndex(self.trace.steps.len() as u32);
        let output = self.add(tensor.shape(), tensor.dtype(), Origin::Made(at));
        self.label(output, Label { category: Category::OptimizerState, name: String::new() });
        let device = tensor.device();
        self.instruct(Instruction::Once(Box::new(move |frame| {
            frame.store(0, K::erase(K::from_data(parked.fetch(), &device)));
        })));
        push(&mut self.trace.steps, Step::Upload { output, host: Bytes::ZERO });
        output
    }

    /// Parks what is due behind step `at`.
    pub(crate) fn park_behind(&mut self, at: usize) {
        let Some(parking) = &mut self.parking else { return };
        while let Some((_, tensor)) = parking.due.pop_if(|(due, _)| *due <= at) {
            let waiting = self.born[tensor.0 as usize].take();
            if let Some(waiting) = waiting.and_then(|waiting| waiting.upgrade())
                && let Some(value) = self.values.remove(tensor)
            {
                // Without this owner, values that can be moved are not copied.
                match values_of::<B>(*value) {
                    Some(data) => waiting.park((parking.keep)(data)),
                    None => panic!("a tensor that is to be parked cannot be read from the device"),
                }
            }
        }
    }
}

impl<B: Backend, T> Recording<B, T> {
    /// The tensors that the recording makes and somebody still holds.
    pub fn survivors(&self) -> Vec<TensorIndex> {
        self.parts.as_ref().map(|(_, session)| session.survivors()).unwrap_or_default()
    }

    /// Parks these [survivors](Self::survivors) when the recording runs, each behind the last step
    /// that uses it: `keep` finds a place for its values, and its memory on the device is free.
    ///
    /// A later call uploads it again for itself, in a recording right before its first use. Whoever
    /// reads a parked tensor gets its values without the device. Tensors that are no survivors, or
    /// are quantized, are left alone.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use burn::backend::Flex;
    /// use burn::tensor::Tensor;
    /// use firebox_lazy::{Lazy, Recorder};
    ///
    /// let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
    /// let mut recording = Recorder::new().record::<Flex, _>(|| x.clone() * 3.0)?;
    /// recording.park(&recording.survivors(), |data| Arc::new(data));
    /// let parked = recording.run();
    /// assert_eq!((parked + x).into_data().to_vec::<f32>().unwrap(), [4.0, 8.0]);
    /// # Ok::<(), firebox_lazy::RecordError>(())
    /// ```
    pub fn park(
        &mut self,
        tensors: &[TensorIndex],
        keep: impl Fn(TensorData) -> Arc<dyn Parked> + 'static,
    ) {
        let Some((_, session)) = &mut self.parts else { return };
        let last = session.trace.last_uses(0..session.trace.steps.len());
        let is_plain = |tensor: &&TensorIndex| {
            let info = session.trace.tensor(**tensor);
            !matches!(info.dtype, burn_std::DType::QFloat(_))
        };
        let tensors = tensors.iter().filter(is_plain);
        let mut due: Vec<(usize, TensorIndex)> =
            tensors.filter_map(|tensor| Some((last.get(tensor)?.0 as usize, *tensor))).collect();
        due.sort_unstable_by(|one, other| other.cmp(one));
        session.parking = Some(Parking { keep: Rc::new(keep), due });
    }
}
