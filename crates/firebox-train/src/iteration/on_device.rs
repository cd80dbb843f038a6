//! The device of a training loop, with what firebox does there for as long as the loop runs.

use std::sync::Arc;

use firebox_lazy::TrainingGuard;

use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::watch::Watch;
use crate::error::TrainError;
use crate::iteration::queue::{Queue, give_back};
use crate::planner::{Admission, Planner, Prepared};
use crate::ready::OtherTensors;

/// How many batches after a new plan are compared with its prediction. An optimizer's state exists
/// from the second batch on.
const MEASURED_BATCHES: usize = 3;

pub(crate) struct OnDevice<D: DeviceMemory> {
    pub(crate) queue: Queue<D>,
    /// The device's pool if it is firebox's. In use from the first plan on.
    pub(crate) pool: Option<Arc<TrainingPool>>,
    pub(crate) watch: Watch<D>,
}

impl<D: DeviceMemory> OnDevice<D> {
    /// `others` is what the device's allocator holds for other tensors of the program.
    pub(crate) fn begin(device: D::Device, others: OtherTensors) -> Self {
        let pool = D::own_pool(&device).map(|pool| {
            let of = device.clone();
            TrainingPool::begin(pool, move || D::drain(&of), others).into()
        });
        Self {
            pool,
            watch: Watch::new(device.clone()),
            queue: Queue { training: D::FUSES.then(TrainingGuard::enter::<D>), device },
        }
    }

    /// Takes over a plan that was made: gives back what planning opened. Returns how many batches
    /// are to be compared with it.
    pub(crate) fn after_planning(&self, planner: &Planner) -> usize {
        if planner.has_run_steps() {
            give_back::<D>(self.device());
        }
        if let Some(pool) = &self.pool {
            // A part of an optimizer step may have run while planning.
            pool.lasting(false);
        }
        MEASURED_BATCHES
    }

    /// Makes room for a batch. Returns whether pages were given back.
    pub(crate) fn make_room(
        &self,
        planner: &mut Planner,
        prepared: &Prepared,
    ) -> Result<bool, TrainError> {
        self.queue.make_room(planner, self.pool.as_deref(), prepared)?;
        Ok(prepared.admission == Admission::RunsOnceGivenBack)
    }

    pub(crate) fn device(&self) -> &D::Device {
        &self.queue.device
    }
}
