//! Begins a run: takes over the learner and the device, and holds loader threads back. The strategy
//! calls it once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::module::Module;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner, SupervisedTrainingEventProcessor};

use super::again::{restored_scheduler, skip_epochs};
use super::coupled::Known;
use super::update::Covered;
use super::{Asked, AutoBatch, Learning, Loaders, Position, Records, Run};
use crate::check::OfOutputs;
use crate::components::{LazyComponents, TrainBatch, ValidBatch};
use crate::device::DeviceMemory;
use crate::error::TrainError;
use crate::iteration::loading::Loading;
use crate::iteration::on_device::OnDevice;
use crate::loss_scale::LossScale;
use crate::parameters::{has_untrained, shapes_of};
use crate::ranks::Team;
use crate::ranks::exchange::exchanged_bytes;
use crate::signals::Signals;
use crate::splitter::Splitter;

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
            if epoch > 1 {
                same_shapes(&self.shapes, &shapes_of::<LC::Backend, _>(&learner.model()))?;
            }
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
        let Start { scheduler, epoch, interrupter, accumulation, saves, store, mut team } = start;
        let model = learner.model();
        let device = model.devices()[0].clone();
        let is_on_host = LC::Base::memory_model(&device).is_on_host();
        // Buffers of the host count where it is the device.
        if let Some(team) = &mut team
            && is_on_host
        {
            team.exchange = exchanged_bytes::<LC::Backend, _>(&model);
        }
        let loading = Loading::begin(is_on_host && self.settings.loaders_compute);
        loading.hold_back();
        let asked = Asked {
            interrupter,
            signals: self.settings.telling.stops_on_ctrl_c.then(Signals::catch),
            accumulation,
            saves,
            store,
        };
        let learning = Learning {
            scheduler,
            scheduler_steps: 0,
            keeps_statistics: has_untrained::<LC::Backend, _>(&model),
            batch_start: None,
            optimizer_lost: false,
            covered: Covered::default(),
            has_learned: false,
            parking: None,
            loss_scale: LossScale::of::<LC::Backend>(),
        };
        Run {
            strategy: self,
            asked,
            learner,
            learning,
            processor,
            on: OnDevice::begin(device, self.settings.others),
            loading,
            team,
            position: Position { epoch, batch: 0, steps: 0, latest: None },
            records: Records::default(),
            known: Known::default(),
            of_outputs: OfOutputs::default(),
        }
    }
}

/// Whether a checkpoint is that of a model with these shapes.
fn same_shapes(
    model: &[(String, Vec<usize>)],
    checkpoint: &[(String, Vec<usize>)],
) -> Result<(), TrainError> {
    let differs = model.iter().zip(checkpoint).find(|(model, checkpoint)| model != checkpoint);
    match differs {
        Some(((of_model, model), (path, shape))) if of_model == path => Err(
            TrainError::OtherModel(format!("its `{path}` has shape {shape:?} and not {model:?}")),
        ),
        None if model.len() == checkpoint.len() => Ok(()),
        _ => Err(TrainError::OtherModel("it has other parameters".to_owned())),
    }
}
