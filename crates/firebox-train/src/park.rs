//! Parks the optimizer's state outside of the device between optimizer steps, where nothing uses
//! it.
//!
//! An optimizer step is recorded, so that it is known where each tensor is last used. It runs
//! parameter by parameter: the state of one is uploaded, used, and parked again before that of the
//! next. The training loop calls [`Parking::step`], loops of the user's own [`update`].
//! `planner/parked.rs` does the same to what is rehearsed.

mod file;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::{AutodiffBackend, Backend, BackendTypes};
use burn::tensor::{DType, Element, Tensor, TensorData, TensorPrimitive};
use burn::train::Learner;
use burn::train::metric::store::EventStoreClient;
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use firebox_lazy::{LazyBackend, Parked, Recording, StepRecorder, park_uploads, types_read};
use firebox_plan::host_memory;
use firebox_trace::{Bytes, Category, TensorIndex, Trace};

use self::file::StateFile;
use crate::components::LazyComponents;
use crate::error::TrainError;
use crate::planner::labels::label_parameters;
use crate::run::capture::records;

/// Where the optimizer's state is between optimizer steps.
///
/// Values are the same, bit for bit: they move, and the device computes with them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Park {
    /// In host memory. Changes nothing where the device computes in host memory.
    Host,
    /// In a file in this folder, which must exist. The file has no name, and is gone when the
    /// process ends. Its pages are the system's cache, not memory of the process.
    Disk(PathBuf),
}

/// A place for the optimizer's state.
#[derive(Clone, Debug)]
pub(crate) enum Parking {
    Host,
    Disk(Arc<StateFile>),
}

impl Parking {
    /// # Errors
    ///
    /// If no file can be made.
    pub(crate) fn open(park: &Park) -> Result<Self, TrainError> {
        Ok(match park {
            Park::Host => Self::Host,
            Park::Disk(folder) => Self::Disk(Arc::new(StateFile::create(folder)?)),
        })
    }

    fn keeper(&self) -> impl Fn(TensorData) -> Arc<dyn Parked> + 'static {
        let place = self.clone();
        move |data| match &place {
            Self::Host => Arc::new(data),
            Self::Disk(file) => file.keep(data),
        }
    }

    /// Checks that there is room for the state of an optimizer, where `sharing` ranks park in the
    /// same host memory. Of a disk, nothing is known before it is full.
    ///
    /// # Errors
    ///
    /// If host memory has no room.
    pub(crate) fn has_room_for(&self, state: Bytes, sharing: usize) -> Result<(), TrainError> {
        // Where the system does not tell, nothing is known to be wrong.
        let (Self::Host, Ok(memory)) = (self, host_memory()) else { return Ok(()) };
        let free = Bytes::new(memory.free.get() / sharing as u64);
        match state > free {
            true => Err(TrainError::NoRoomToPark { state, free }),
            false => Ok(()),
        }
    }

    /// Steps the optimizer of a learner. Its state is parked afterwards. The step is whole even if
    /// there is an error.
    ///
    /// # Errors
    ///
    /// If state could not be written to the disk. It is in host memory then.
    ///
    /// # Panics
    ///
    /// If the optimizer panics, or state cannot be read. The model is what it was.
    pub(crate) fn step<LC: LazyComponents>(
        &self,
        learner: &mut Learner<LC>,
        grads: GradientsParams,
    ) -> Result<(), TrainError> {
        // As in burn's own step, the old model is alive until there is a new one.
        let before = learner.model();
        let stepped = catch_unwind(AssertUnwindSafe(|| self.record_and_run(learner, grads)));
        if let Err(panic) = stepped {
            learner.load_model(before.into_record());
            resume_unwind(panic);
        }
        self.check()
    }

    /// Whether all that was parked is where it belongs.
    fn check(&self) -> Result<(), TrainError> {
        match self {
            Self::Host => Ok(()),
            Self::Disk(file) => file.check(),
        }
    }

    fn record_and_run<LC: LazyComponents>(
        &self,
        learner: &mut Learner<LC>,
        grads: GradientsParams,
    ) {
        self.record_and_park::<LC::Base, _>(|| {
            let grads = of_step::<LC::Backend, _>(&learner.model(), grads);
            learner.optimizer_step(grads);
            label_parameters(&learner.model());
        });
    }

    /// Records an optimizer step, which labels parameters, and runs it. What it leaves that is none
    /// is parked.
    fn record_and_park<B: Backend, R>(&self, step: impl FnOnce() -> R) -> R {
        let recording = StepRecorder::new().record::<B, _>(step);
        let mut recording = recording.expect("an optimizer steps outside of recordings");
        self.park(&mut recording);
        recording.run()
    }

    /// Parks what a recorded optimizer step leaves that is no parameter.
    fn park<B: Backend, R>(&self, recording: &mut Recording<B, R>) {
        let trace = recording.trace();
        let is_parameter = |tensor: &TensorIndex| {
            let label = trace.tensor(*tensor).label.as_deref();
            label.is_some_and(|label| label.category == Category::Parameter)
        };
        let mut state = recording.survivors();
        state.retain(|tensor| !is_parameter(tensor));
        recording.park(&state, self.keeper());
    }

    /// Parks what the optimizer of a learner brings along, from a checkpoint or an earlier run.
    /// Returns the bytes. State of another type than 32 bit would be converted on the way: it stays
    /// where it is until the first step.
    ///
    /// # Errors
    ///
    /// If it could not be written to the disk.
    pub(crate) fn take_over<LC: LazyComponents>(
        &self,
        learner: &mut Learner<LC>,
        store: &EventStoreClient,
    ) -> Result<Bytes, TrainError> {
        let devices = learner.model().devices();
        let (Some(record), Some(device)) = (records(learner, store).optimizer, devices.first())
        else {
            return Ok(Bytes::ZERO);
        };
        let (item, types) = types_read(|| record.into_item::<FullPrecisionSettings>());
        let is_plain = <<LC::Base as BackendTypes>::FloatElem as Element>::dtype() == DType::F32;
        if !is_plain || types.iter().any(|dtype| *dtype != DType::F32) {
            return Ok(Bytes::ZERO);
        }
        let load = || Record::from_item::<FullPrecisionSettings>(item, device);
        let (record, parked) = self.park_loaded(load)?;
        learner.load_optim(record);
        Ok(parked)
    }

    /// Parks what `load` would upload. Returns what it returns, and the bytes.
    ///
    /// # Errors
    ///
    /// If it could not be written to the disk.
    pub(crate) fn park_loaded<R>(
        &self,
        load: impl FnOnce() -> R,
    ) -> Result<(R, Bytes), TrainError> {
        let parked = Rc::new(Cell::new(0));
        let (keep, count) = (self.keeper(), parked.clone());
        let keep = move |data: TensorData| {
            count.set(count.get() + data.bytes.len() as u64);
            keep(data)
        };
        let loaded = park_uploads(keep, load);
        self.check()?;
        Ok((loaded, Bytes::new(parked.get())))
    }
}

/// Records what changes parameters in a loop of the user's own, asks `admit`, and runs it. With a
/// place to park, what it makes and leaves, but for the parameters of `model`, is parked
/// afterwards. Also returns whether that could be written: the change is whole even if it could
/// not.
///
/// # Errors
///
/// Those of `admit`. The model is what it was.
///
/// # Panics
///
/// If `work` panics, or state cannot be read. The model is what it was.
pub(crate) fn update<B, M, R>(
    parking: Option<&Parking>,
    model: &mut M,
    work: impl FnOnce(&mut M) -> R,
    admit: impl FnOnce(&Trace) -> Result<(), TrainError>,
) -> Result<(R, Result<(), TrainError>), TrainError>
where
    B: LazyBackend,
    M: Module<B>,
{
    let before = model.clone();
    let updated = catch_unwind(AssertUnwindSafe(|| {
        let recording = StepRecorder::new().record::<B::Base, _>(|| {
            label_parameters(&before);
            let result = work(model);
            label_parameters(model);
            result
        });
        let mut recording = recording.expect("parameters are updated outside of recordings");
        match parking {
            Some(parking) => parking.park(&mut recording),
            None => admit(recording.trace())?,
        }
        Ok(recording.run())
    }));
    match updated {
        Ok(Ok(result)) => Ok((result, parking.map_or(Ok(()), Parking::check))),
        Ok(Err(error)) => {
            *model = before;
            Err(error)
        }
        Err(panic) => {
            *model = before;
            resume_unwind(panic)
        }
    }
}

/// Gradients as tensors of the step that is being recorded, so that they can be parked: the first
/// velocity of an optimizer with momentum is the first gradient. They stay where they are.
pub(crate) fn of_step<B, M>(model: &M, grads: GradientsParams) -> GradientsParams
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    struct OfStep {
        grads: GradientsParams,
        own: GradientsParams,
    }

    impl<B: AutodiffBackend> ModuleVisitor<B> for OfStep {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let grad = self.grads.remove::<B::InnerBackend, D>(param.id);
            if let Some(TensorPrimitive::Float(grad)) = grad.map(Tensor::into_primitive) {
                let shape = grad.shape();
                let own = B::InnerBackend::float_reshape(grad, shape);
                let own = Tensor::<B::InnerBackend, D>::from_primitive(TensorPrimitive::Float(own));
                self.own.register::<B::InnerBackend, D>(param.id, own);
            }
        }
    }

    let mut of_step = OfStep { grads, own: GradientsParams::new() };
    model.visit(&mut of_step);
    of_step.own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_must_have_room_for_the_state() {
        assert!(Parking::Host.has_room_for(Bytes::kib(1), 1).is_ok());
        let error = Parking::Host.has_room_for(Bytes::gib(1 << 30), 1).expect_err("too much");
        let text = error.to_string();
        assert!(text.contains("of host memory are free: park it on a disk"), "{text}");
        let folder = tempfile::tempdir().expect("a folder");
        let disk = Parking::open(&Park::Disk(folder.path().into())).expect("it can be made");
        assert!(disk.has_room_for(Bytes::gib(1 << 30), 1).is_ok());
    }
}

#[cfg(all(test, feature = "flex"))]
mod failing {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, Optimizer};
    use burn::tensor::backend::Backend;
    use burn::train::{InferenceStep, LearningComponentsMarker, TrainOutput, TrainStep};
    use firebox_lazy::Lazy;

    use super::*;

    type B = Autodiff<Lazy<Flex>>;

    #[derive(Module, Debug)]
    struct Net<B: Backend> {
        layer: Linear<B>,
    }

    impl<B: AutodiffBackend> TrainStep for Net<B> {
        type Input = Tensor<B, 2>;
        type Output = ();

        fn step(&self, rows: Tensor<B, 2>) -> TrainOutput<()> {
            let loss = self.layer.forward(rows).powf_scalar(2.0).mean();
            TrainOutput::new(self, loss.backward(), ())
        }
    }

    impl<B: Backend> InferenceStep for Net<B> {
        type Input = Tensor<B, 2>;
        type Output = ();

        fn step(&self, _: Tensor<B, 2>) {}
    }

    #[test]
    fn a_step_that_fails_leaves_the_model_as_it_was() {
        fn learner<O: Optimizer<Net<B>, B> + 'static>(
            optim: O,
        ) -> Learner<LearningComponentsMarker<B, f64, Net<B>, O>> {
            let layer = LinearConfig::new(8, 8).init(&Default::default());
            Learner::new(Net { layer }, optim, 1e-3)
        }

        let folder = tempfile::tempdir().expect("a folder");
        let parking = Parking::open(&Park::Disk(folder.path().into())).expect("it can be made");
        let mut learner = learner(AdamConfig::new().init());
        let rows = || Tensor::<B, 2>::ones([4, 8], &Default::default());
        let values = |model: &Net<B>| model.layer.weight.val().into_data();
        learner.lr_step();
        let start = values(&learner.model());
        let grads = learner.train_step(rows()).grads;
        parking.step(&mut learner, grads).expect("there is room");
        let first = values(&learner.model());
        assert_ne!(start, first);
        let Parking::Disk(file) = &parking else { panic!("it was opened on a disk") };
        file.cut_off();
        let grads = learner.train_step(rows()).grads;
        let step = AssertUnwindSafe(|| parking.step(&mut learner, grads));
        assert!(catch_unwind(step).is_err(), "the state cannot be read");
        assert_eq!(values(&learner.model()), first);
        // It can go on learning.
        assert!(!learner.train_step(rows()).grads.is_empty());
    }
}
