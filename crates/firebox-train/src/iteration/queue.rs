//! The queue of the training thread's device: what runs while no other thread is at it, the room
//! for a batch, and the optimizer step. The Learner's loop and custom loops use it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use firebox_lazy::{StepRecorder, TrainingGuard, in_full_precision};

use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::panics::panic_message;
use crate::device::watch::Watch;
use crate::error::{During, TrainError};
use crate::planner::{Admission, Planner, Prepared};

/// The queue of a fusing device, shared by the training thread and burn's threads for metrics and
/// checkpoints.
pub(crate) struct Queue<D: DeviceMemory> {
    /// Drops the tensors that those threads leave.
    pub(crate) training: Option<TrainingGuard>,
    pub(crate) device: D::Device,
}

impl<D: DeviceMemory> Queue<D> {
    /// Runs `work` while no other thread is at the queue, then empties the queue.
    pub(crate) fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let Some(training) = &self.training else { return work() };
        training.alone(|| {
            training.collect();
            let result = work();
            self.drain();
            result
        })
    }

    /// Makes room for a batch: gives back what must be given back before it runs, and prepares its
    /// pages if the pool is firebox's.
    pub(crate) fn make_room(
        &self,
        planner: &mut Planner,
        pool: Option<&TrainingPool>,
        prepared: &Prepared,
    ) -> Result<(), TrainError> {
        self.prepare(prepared.admission);
        if let Some((pool, pages)) = pool.zip(prepared.pages) {
            planner.predict(self.alone(|| pool.prepare(pages))?);
        }
        Ok(())
    }

    /// Finishes gradients, calls `commit` once they are on the device, and then runs what changes
    /// parameters: the step of an optimizer.
    ///
    /// # Errors
    ///
    /// If `gradients` or `commit` fails, the device has failed, or `work` panics
    /// ([`TrainError::OptimizerPanicked`]). In the latter case parameters may be lost.
    pub(crate) fn update<G, R>(
        &self,
        watch: &mut Watch<D>,
        pool: Option<&TrainingPool>,
        gradients: impl FnOnce() -> Result<G, TrainError>,
        commit: impl FnOnce() -> Result<(), TrainError>,
        work: impl FnOnce(G) -> R,
    ) -> Result<R, TrainError> {
        let lasting = |lasting| pool.into_iter().for_each(|pool| pool.lasting(lasting));
        let updated = self.alone(|| {
            let gradients = gradients()?;
            watch.check()?;
            commit()?;
            // From here on, a failure loses the model.
            lasting(true);
            watch.begin(During::OptimizerStep);
            let updated = catch_unwind(AssertUnwindSafe(|| in_full_precision(|| work(gradients))))
                .map_err(|panic| TrainError::OptimizerPanicked {
                    message: panic_message(&*panic),
                })?;
            watch.check()?;
            Ok::<_, TrainError>(updated)
        });
        lasting(false);
        // A failure belongs to the update.
        let updated = updated?;
        watch.begin(During::MicroSteps);
        Ok(updated)
    }

    /// Gives back unused pages, if there is no room otherwise.
    pub(crate) fn prepare(&self, admission: Admission) {
        if admission == Admission::RunsOnceGivenBack {
            log::debug!("pages that other batches have left are given back");
            self.give_back();
        }
    }

    /// Gives back the pages that a rehearsal opened, if it ran parts of a step to read values. The
    /// next rehearsal then starts with only the pages that are held anyway, so planning needs no
    /// more than the largest rehearsal.
    pub(crate) fn after_rehearsal(&self, recorder: &StepRecorder) {
        if !recorder.refuses_reads() {
            self.give_back();
        }
    }

    /// Gives back pages that no buffer lies on.
    fn give_back(&self) {
        self.alone(|| give_back::<D>(&self.device));
    }

    /// Empties the queue.
    pub(crate) fn drain(&self) {
        if self.training.is_some() {
            D::drain(&self.device);
        }
    }
}

/// Gives back pages that no buffer lies on.
pub(crate) fn give_back<D: DeviceMemory>(device: &D::Device) {
    // wgpu frees a page only once the device no longer needs it.
    let wait = || drop(D::sync(device));
    wait();
    D::give_back(device);
    wait();
}
