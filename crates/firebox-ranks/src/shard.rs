//! The part of a data set that a rank trains on.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use burn_dataset::Dataset;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// The epoch of the training that runs in this process.
static EPOCH: AtomicUsize = AtomicUsize::new(0);

/// Notes that an epoch begins, from which a [`Shard`] follows the order of its items. The Learner
/// calls it. Custom training loops call it before they read a loader.
pub fn begin_epoch(epoch: usize) {
    EPOCH.store(epoch, Relaxed);
}

/// The part of a data set that rank `rank` of `world` trains on.
///
/// Every rank shuffles the whole data set in the same way, with the same seed, and takes every
/// `world`-th item. Each item is in exactly one shard, and the sizes of shards differ by at most
/// one. Every epoch has another order. The items of a rank change with it.
///
/// ```
/// use burn_dataset::{Dataset, InMemDataset};
/// use firebox_ranks::shard;
///
/// let items: Vec<u32> = (0..5).collect();
/// let parts = [0, 1].map(|rank| shard(InMemDataset::new(items.clone()), rank, 2));
/// assert_eq!(parts.each_ref().map(Dataset::len), [3, 2]);
/// let mut all: Vec<u32> = parts.iter().flat_map(Dataset::iter).collect();
/// all.sort();
/// assert_eq!(all, items);
/// ```
///
/// # Panics
///
/// If `rank` is not below `world`.
pub fn shard<D>(dataset: D, rank: usize, world: usize) -> Shard<D> {
    assert!(rank < world, "there is no rank {rank} among {world}");
    Shard { dataset, rank, world, seed: Some(0), order: Mutex::new(Order::default()) }
}

/// A part of a data set. See [`shard`].
#[derive(Debug)]
pub struct Shard<D> {
    dataset: D,
    rank: usize,
    world: usize,
    /// None if items stay in order.
    seed: Option<u64>,
    order: Mutex<Order>,
}

/// The order of all items in an epoch.
#[derive(Debug, Default)]
struct Order {
    epoch: usize,
    indices: Arc<[usize]>,
}

impl<D> Shard<D> {
    /// The seed of the orders. It must be the same on all ranks. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self.order = Mutex::default();
        self
    }

    /// Keeps the items in the order of the data set, in every epoch.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.seed = None;
        self
    }
}

impl<I, D: Dataset<I>> Dataset<I> for Shard<D> {
    fn get(&self, index: usize) -> Option<I> {
        if index >= self.len() {
            return None;
        }
        let position = index * self.world + self.rank;
        match self.seed {
            Some(seed) => self.dataset.get(self.order(seed)[position]),
            None => self.dataset.get(position),
        }
    }

    fn len(&self) -> usize {
        let all = self.dataset.len();
        all / self.world + usize::from(self.rank < all % self.world)
    }
}

impl<D> Shard<D> {
    fn order<I>(&self, seed: u64) -> Arc<[usize]>
    where
        D: Dataset<I>,
    {
        let epoch = EPOCH.load(Relaxed);
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if order.epoch != epoch || order.indices.len() != self.dataset.len() {
            let mut indices: Vec<usize> = (0..self.dataset.len()).collect();
            let mut random = StdRng::seed_from_u64(seed);
            // Unrelated seeds for one epoch after the other.
            let seed = (0..=epoch).fold(0, |_, _| random.random::<u64>());
            indices.shuffle(&mut StdRng::seed_from_u64(seed));
            *order = Order { epoch, indices: indices.into() };
        }
        order.indices.clone()
    }
}

#[cfg(test)]
mod tests {
    use burn_dataset::InMemDataset;

    use super::*;

    fn items(shard: &Shard<InMemDataset<usize>>) -> Vec<usize> {
        shard.iter().collect()
    }

    // One test, because the epoch belongs to the process.
    #[test]
    fn every_item_is_in_one_shard_and_epochs_have_other_orders() {
        for (all, world) in [(0, 1), (1, 3), (10, 3), (12, 4), (101, 7)] {
            let data: Vec<usize> = (0..all).collect();
            let parts: Vec<_> = (0..world)
                .map(|rank| shard(InMemDataset::new(data.clone()), rank, world).seed(7))
                .collect();
            let mut orders = Vec::new();
            for epoch in [1, 2, 1] {
                begin_epoch(epoch);
                let read: Vec<Vec<usize>> = parts.iter().map(items).collect();
                assert!(read.iter().all(|part| part.len().abs_diff(all / world) <= 1));
                let mut together: Vec<usize> = read.concat();
                together.sort_unstable();
                assert_eq!(together, data);
                orders.push(read);
            }
            assert_eq!(orders[0], orders[2], "an epoch has its order");
            assert!(all < 10 || orders[0] != orders[1], "{orders:?}");
        }
        let part = shard(InMemDataset::new((0..7).collect()), 1, 3).in_order();
        assert_eq!(items(&part), [1, 4]);
        assert_eq!(part.get(2), None);
    }
}
