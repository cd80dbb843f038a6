//! Begins a run: takes over the learner and the device, and holds loader threads back. The strategy
//! calls it once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::module::Module;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner, SupervisedTrainingEventProcessor};
use firebox_lazy::{LoaderGate, TrainingGuard};
use firebox_trace::Bytes;

use super::again::{restored_scheduler, skip_epochs};
use super::coupled::Known;
use super::update::Covered;
use super::{AutoBatch, Loaders, Run};
use crate::components::{LazyComponents, TrainBatch, ValidBatch};
use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::watch::Watch;
use crate::error::TrainError;
use crate::gradients::has_untrained;
use crate::loss_scale::LossScale;
use crate::ranks::Team;
use crate::ranks::exchange::exchanged_bytes;
use crate::signals::Signals;
use crate::splitter::Splitter;
use crate::step_use::StepLog;

/// What a run begins with, besides the learner.
pub(super) struct Start<S> {
    pub(super) scheduler: S,
    /// The first epoch.
    pub(super) epoch: usize,
    pub(super) interrupter: Interrupter,
    /// How many loader batches one optimizer step takes.
    pub(super) accumulation: usize,
    /// Whether burn writes checkpoints.
    pub(super) saves: bool,
    pub(super) store: Arc<EventStoreClient>,
    /// The ranks, if there are several.
    pub(super) team: Option<Team>,
}

/// What a run takes up before its loop.
pub(super) struct TakenUp<S> {
    /// The first epoch.
    pub(super) epoch: usize,
    pub(super) scheduler: S,
    /// The ranks, if there are several.
    pub(super) team: Option<Team>,
    /// What went wrong.
    pub(super) ready: std::thread::Result<Result<(), TrainError>>,
}

impl<LC, ST, SV> AutoBatch<LC, ST, SV>
where
    LC: LazyComponents,
    ST: Splitter<TrainBatch<LC>>,
    SV: Splitter<ValidBatch<LC>>,
{
    /// Gives all ranks one state, takes loaders to the first epoch, and restores the scheduler.
    /// Runs before loader threads are held back: the loader threads of skipped epochs end by
    /// themselves.
    pub(super) fn take_up(
        &self,
        learner: &mut Learner<LC>,
        (train, valid): Loaders<'_, LC>,
        store: &EventStoreClient,
        accumulation: usize,
        (epoch, epochs): (usize, usize),
    ) -> TakenUp<LC::LrScheduler> {
        let mut team = self.settings.ranks.clone().map(Team::new);
        let mut first = epoch;
        let ready = catch_unwind(AssertUnwindSafe(|| {
            let epochs = (epoch, epochs);
            first = self.start_together(team.as_mut(), learner, store, accumulation, epochs)?;
            let skips = if self.settings.seed.is_some() { first - 1 } else { 0 };
            skip_epochs(train, skips);
            skip_epochs(valid, skips);
            Ok(())
        }));
        let scheduler = match first == 1 && team.as_ref().is_none_or(Team::is_root) {
            true => self.scheduler.clone(),
            false => restored_scheduler(&self.scheduler, learner, store),
        };
        TakenUp { epoch: first, scheduler, team, ready }
    }
}

impl<LC: LazyComponents, ST, SV> AutoBatch<LC, ST, SV> {
    /// A run that begins.
    pub(super) fn begin(
        &self,
        learner: Learner<LC>,
        processor: SupervisedTrainingEventProcessor<LC>,
        start: Start<LC::LrScheduler>,
    ) -> Run<'_, LC, ST, SV> {
        let Start { scheduler, epoch, interrupter, accumulation, saves, store, team } = start;
        let model = learner.model();
        let device = model.devices()[0].clone();
        let gate = LoaderGate::enter();
        // Until the first batch is planned, loader threads make no more than the training thread
        // waits for.
        gate.limit(Bytes::new(1));
        Run {
            strategy: self,
            scheduler,
            scheduler_steps: 0,
            learner,
            processor,
            interrupter,
            accumulation,
            saves,
            store,
            // Buffers of the host count where it is the device.
            exchange: match team.is_some() && LC::Base::memory_model(&device).is_on_host() {
                true => exchanged_bytes::<LC::Backend, _>(&model),
                false => Bytes::ZERO,
            },
            team,
            training: LC::Base::FUSES.then(TrainingGuard::enter::<LC::Base>),
            gate,
            loader_limit: Bytes::ZERO,
            loader_items: 0,
            latest: None,
            steps_of_epoch: 0,
            unmeasured: 0,
            watch: Watch::new(device.clone()),
            position: (epoch, 0),
            batch_start: None,
            optimizer_lost: false,
            covered: Covered::default(),
            has_learned: false,
            loss_scale: LossScale::of::<LC::Backend>(),
            parking: None,
            trace_is_saved: false,
            log: StepLog::default(),
            keeps_statistics: has_untrained::<LC::Backend, _>(&model),
            known: Known::default(),
            pool: LC::Base::own_pool(&device).map(|pool| {
                let of = device.clone();
                let drain = move || LC::Base::drain(&of);
                TrainingPool::begin(pool, drain, self.settings.others).into()
            }),
            signals: self.settings.stops_on_ctrl_c.then(Signals::catch),
            device,
        }
    }
}
