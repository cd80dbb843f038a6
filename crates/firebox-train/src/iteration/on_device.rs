//! The device of a training loop, with what firebox does there for as long as the loop runs.

use std::sync::Arc;

use firebox_lazy::TrainingGuard;

use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::watch::Watch;
use crate::iteration::queue::Queue;
use crate::ready::OtherTensors;

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

    pub(crate) fn device(&self) -> &D::Device {
        &self.queue.device
    }
}
