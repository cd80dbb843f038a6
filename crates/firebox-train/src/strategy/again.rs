//! An epoch is the same whether the run began with it or not: what burn's checkpoints do not hold is brought to where it would be.

use std::time::Duration;

use burn::data::dataloader::DataLoader;
use burn::lr_scheduler::LrScheduler;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearningComponentsTypes};
use firebox_lazy::LoaderGate;

use crate::capture::records;

/// How long is waited for loader threads that nobody listens to any more.
const PATIENCE: Duration = Duration::from_secs(10);

/// Takes a loader to where it is after so many epochs: one that shuffles draws a new order for each.
pub(super) fn skip_epochs<B: Backend, I>(loader: &dyn DataLoader<B, I>, epochs: usize) {
    for _ in 0..epochs {
        // A loader's thread has drawn the order before its first batch.
        drop(loader.iter().next());
        LoaderGate::until_idle(PATIENCE);
    }
}

/// Seeds the device for an epoch. The finalizer of SplitMix64 makes unlike seeds of numbers that are alike.
pub(super) fn seed_epoch<B: Backend>(device: &B::Device, seed: u64, epoch: usize) {
    let mut mixed = seed.wrapping_add((epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    B::seed(device, mixed ^ (mixed >> 31));
}

/// A scheduler where that of the learner is, which has been read from a checkpoint.
pub(super) fn restored_scheduler<LC, LR>(
    scheduler: &LR,
    learner: &Learner<LC>,
    store: &EventStoreClient,
) -> LR
where
    LC: LearningComponentsTypes<LrScheduler = LR>,
    LC::Backend: AutodiffBackend,
    LR: LrScheduler + 'static,
{
    match records(learner, store).scheduler {
        Some(record) => scheduler.clone().load_record::<LC::Backend>(record),
        None => scheduler.clone(),
    }
}
