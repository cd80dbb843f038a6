//! Parks tensors: behind the last step of a recording that uses them, their values leave the
//! device.
//! The next call that takes them uploads them.
//!
//! The Learner parks the optimizer's state so, which nothing uses during micro-steps.

use std::rc::Rc;
use std::sync::Arc;

use burn_backend::{Backend, TensorData, TensorMetadata};
use burn_std::DType;
use firebox_trace::{Bytes, Category, Label, OpIndex, Origin, Step, TensorIndex};

use crate::kind::Kind;
use crate::record::inputs::values_of;
use crate::record::parking::{Parked, Parking};
use crate::record::recording::Recording;
use crate::record::session::Session;
use crate::record::values::{Instruction, push};
use crate::tensor::LazyTensor;

impl<B: Backend> Session<B> {
    /// Uploads a parked tensor for this session alone. It stays parked for its other owners.
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
        self.parks.brought.push(output);
        output
    }

    /// Parks what is due behind step `at`, and ends what was brought back until then.
    pub(crate) fn park_behind(&mut self, at: usize) {
        let Some(parking) = &mut self.parks.parking else { return };
        while let Some((_, tensor)) = parking.due.pop_if(|(due, _)| *due <= at) {
            let waiting = self.born[tensor.0 as usize].take();
            let Some(value) = self.values.remove(tensor) else { continue };
            if let Some(waiting) = waiting.and_then(|waiting| waiting.upgrade()) {
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
    /// reads a parked tensor alone gets its values without the device. Tensors that are no
    /// survivors, or are quantized, are left alone. So are all if the recording is
    /// [rewritten](Self::rewrite).
    ///
    /// What this recording brings back leaves the device behind its last use as well, even if
    /// somebody else holds the parked tensor.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use burn::backend::Flex;
    /// use burn::tensor::Tensor;
    /// use firebox_lazy::{Lazy, StepRecorder};
    ///
    /// let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
    /// let mut recording = StepRecorder::new().record::<Flex, _>(|| x.clone() * 3.0)?;
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
        if session.program.rewriting.is_some() {
            return;
        }
        let last = session.trace.last_uses(0..session.trace.steps.len());
        let is_plain = |tensor: &&TensorIndex| {
            let info = session.trace.tensor(**tensor);
            !matches!(info.dtype, DType::QFloat(_))
        };
        let tensors = tensors.iter().filter(is_plain).chain(&session.parks.brought);
        let mut due: Vec<(usize, TensorIndex)> =
            tensors.filter_map(|tensor| Some((last.get(tensor)?.0 as usize, *tensor))).collect();
        due.sort_unstable_by(|one, other| other.cmp(one));
        session.parks.parking = Some(Parking { keep: Rc::new(keep), due });
    }
}
