//! Parks the optimizer's state outside of the device between optimizer steps, where nothing uses
//! it.
//!
//! An optimizer step is recorded, so that it is known where each tensor is last used. It runs
//! parameter by parameter: the state of one is uploaded, used, and parked again before that of the
//! next. The training loop calls [`Parking::step`]; `planner/parked.rs` does the same to what is
//! rehearsed.

mod file;

use std::path::PathBuf;
use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::record::{DoublePrecisionSettings, Record};
use burn::tensor::TensorData;
use burn::train::Learner;
use burn::train::metric::store::EventStoreClient;
use firebox_lazy::{Parked, Recorder, park_uploads};
use firebox_plan::host_memory;
use firebox_trace::{Bytes, Category, TensorIndex};

use self::file::StateFile;
use crate::components::LazyComponents;
use crate::error::TrainError;
use crate::planner::labels::label_parameters;
use crate::run::capture::records;

/// Where the optimizer's state is between optimizer steps.
///
/// Values are the same, bit for bit: they move, and the device computes with them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

    /// Whether host memory has room for the state of an optimizer.
    ///
    /// # Errors
    ///
    /// If it has not.
    pub(crate) fn has_room_for(&self, state: Bytes, sharing: usize) -> Result<(), TrainError> {
        // Where the system does not tell, nothing is known to be wrong.
        let (Self::Host, Ok(memory)) = (self, host_memory()) else { return Ok(()) };
        let free = Bytes::new(memory.free.get() / sharing as u64);
        match state > free {
            true => Err(TrainError::NoRoomToPark { state, free }),
            false => Ok(()),
        }
    }

    /// Steps the optimizer of a learner. Its state is parked afterwards. The result of the step is
    /// whole even if there is an error from writing.
    ///
    /// # Errors
    ///
    /// If state could not be written to the disk. It is in host memory then.
    pub(crate) fn step<LC: LazyComponents>(
        &self,
        learner: &mut Learner<LC>,
        grads: GradientsParams,
    ) -> Result<(), TrainError> {
        let mut recording = Recorder::new().record::<LC::Base, _>(|| {
            learner.optimizer_step(grads);
            label_parameters(&learner.model());
        })?;
        let trace = recording.trace();
        let is_parameter = |tensor: &TensorIndex| {
            let label = trace.tensor(*tensor).label.as_deref();
            label.is_some_and(|label| label.category == Category::Parameter)
        };
        let mut state = recording.survivors();
        state.retain(|tensor| !is_parameter(tensor));
        recording.park(&state, self.keeper());
        recording.run();
        match self {
            Self::Host => Ok(()),
            Self::Disk(file) => file.check(),
        }
    }

    /// Parks what the optimizer of a learner brings along, from a checkpoint or an earlier run.
    ///
    /// # Errors
    ///
    /// If it could not be written to the disk.
    pub(crate) fn take_over<LC: LazyComponents>(
        &self,
        learner: &mut Learner<LC>,
        store: &EventStoreClient,
    ) -> Result<(), TrainError> {
        let Some(record) = records(learner, store).optimizer else { return Ok(()) };
        let Some(device) = learner_device(learner) else { return Ok(()) };
        let item = record.into_item::<DoublePrecisionSettings>();
        let load = || Record::from_item::<DoublePrecisionSettings>(item, &device);
        learner.load_optim(park_uploads(self.keeper(), load));
        match self {
            Self::Host => Ok(()),
            Self::Disk(file) => file.check(),
        }
    }
}

fn learner_device<LC: LazyComponents>(
    learner: &Learner<LC>,
) -> Option<burn::tensor::Device<LC::Base>> {
    burn::module::Module::devices(&learner.model()).into_iter().next()
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
