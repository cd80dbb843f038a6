//! Makes an epoch the same in a resumed run: restores what burn's checkpoints do not hold. Called
//! by the training loop before the first epoch and at the start of each.

use std::time::Duration;

use burn::data::dataloader::DataLoader;
use burn::lr_scheduler::LrScheduler;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearningComponentsTypes};
use firebox_lazy::LoaderGate;

use crate::run::capture::records;

/// How long to wait for loader threads whose batches nobody receives any more.
const PATIENCE: Duration = Duration::from_secs(10);

/// Advances a loader by `epochs` epochs. A loader that shuffles draws a new order for each.
pub(super) fn skip_epochs<B: Backend, I>(loader: &dyn DataLoader<B, I>, epochs: usize) {
    for _ in 0..epochs {
        // A loader's thread draws the order before its first batch.
        drop(loader.iter().next());
        LoaderGate::until_idle(PATIENCE);
    }
}

/// Seeds the device for an epoch. The finalizer of SplitMix64 turns similar numbers into unrelated
/// seeds, also for the ranks.
pub(super) fn seed_epoch<B: Backend>(device: &B::Device, seed: u64, epoch: usize, rank: usize) {
    let number = (rank as u64) << 32 | epoch as u64;
    let mut mixed = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    B::seed(device, mixed ^ (mixed >> 31));
}

/// A scheduler in the state of the learner's, which was read from a checkpoint.
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
