//! Begins a run: takes over the learner and the device, and holds loader threads back. The strategy
//! calls it once.

use std::marker::PhantomData;

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{
    InferenceStep, Interrupter, Learner, SupervisedTrainingEventProcessor, TrainStep,
};
use firebox_lazy::{LazyBackend, LoaderGate, TrainingGuard};
use firebox_trace::Bytes;

use super::coupled::Known;
use super::{AutoBatch, Components, Run};
use crate::device::DeviceMemory;
use crate::device::own_pool::TrainingPool;
use crate::device::watch::Watch;
use crate::gradients::has_untrained;
use crate::signals::Signals;

impl<B, LR, M, O, ST, SV> AutoBatch<B, LR, M, O, ST, SV>
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    LR: LrScheduler + 'static,
    M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
    M::InnerModule: InferenceStep,
    O: Optimizer<M, B> + 'static,
{
    /// A run that begins.
    pub(super) fn begin(
        &self,
        learner: Learner<Components<B, LR, M, O>>,
        processor: SupervisedTrainingEventProcessor<Components<B, LR, M, O>>,
        scheduler: LR,
        starting_epoch: usize,
    ) -> Run<'_, B, LR, M, O, ST, SV> {
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
            interrupter: Interrupter::new(),
            accumulation: 1,
            saves: false,
            training: <B as LazyBackend>::Base::FUSES
                .then(TrainingGuard::enter::<<B as LazyBackend>::Base>),
            gate,
            loader_limit: Bytes::ZERO,
            loader_items: 0,
            latest: None,
            unmeasured: 0,
            watch: Watch::new(device.clone()),
            position: (starting_epoch, 0),
            batch_start: None,
            optimizer_lost: false,
            keeps_statistics: has_untrained::<B, M>(&model),
            known: Known::default(),
            pool: <B as LazyBackend>::Base::own_pool(&device)
                .map(|pool| TrainingPool::begin(pool, self.settings.others).into()),
            signals: self.settings.stops_on_ctrl_c.then(Signals::catch),
            device,
            phantom: PhantomData,
        }
    }
}
