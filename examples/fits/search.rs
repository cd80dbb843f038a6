//! Searches for the largest batch whose training step fits a card.
//!
//! Two iterations with Adam are recorded for each size tried and replayed on the card's dry device.
//! The first guess ignores pages: it follows from the bytes of live tensors at two sizes, by a
//! straight line. The search then doubles its stride until it has one size that fits and a larger
//! one that does not, and halves the range between them. It also tries a few larger sizes: one more
//! item may need much larger pages, while many more items may need smaller ones.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use firebox::dry::{Card, Cuda, Dry, DryCuda, DryDevice, DryTwin, Lease, ReplayError};
use firebox::plan::MemoryInfo;
use firebox::trace::{
    Estimate, Footprint, Heap, Mark, MemoryModel, StepRecorder, Trace, label_parameters, mark,
    rehearse,
};
use firebox::{Budget, Bytes, LazyBackend, initialize};

/// Upper limit of the search; no current card trains on more items at once.
const MOST_ITEMS: usize = 1 << 22;

/// Number of sizes tried above the first answer.
const OTHER_SIZES: usize = 3;

/// Bytes reserved per byte of live tensors. Heuristic, used only for the first guess.
const RESERVED_PER_LIVE: f64 = 1.4;

/// A model that can be created on a device, with batches of any size.
pub trait Subject<B: AutodiffBackend>: Send + Sync {
    /// The model.
    type Model: AutodiffModule<B>;
    /// A batch on the device.
    type Batch: Send;

    /// Describes the model in a few words.
    fn title(&self) -> String;
    /// A small batch size that is common in training.
    fn typical(&self) -> usize;
    /// Creates the model.
    fn model(&self, device: &B::Device) -> Self::Model;
    /// Creates a batch of `items` items.
    fn batch(&self, items: usize, device: &B::Device) -> Self::Batch;
    /// Computes the loss of a batch.
    fn loss(&self, model: &Self::Model, batch: &Self::Batch) -> Tensor<B, 1>;
}

/// Recorded training steps, by batch size. Each is recorded once for all cards.
pub struct Rehearsals<B: AutodiffBackend, S: Subject<B>> {
    subject: S,
    /// The device that holds the model. It has no memory and only creates weights and batches.
    lease: Lease<Cuda>,
    /// Bytes of live tensors at the peak, for a typical batch and for one twice its size.
    live: [Bytes; 2],
    /// A recording changes state that clones of a model share, so only one is made at a time.
    recording: Mutex<Recordings<S::Model>>,
}

struct Recordings<M> {
    model: M,
    traces: HashMap<usize, Arc<Trace>>,
}

/// The search result for one card.
pub struct Fit {
    /// The card.
    pub card: Card,
    /// Memory that training may reserve: the card's memory less its context and a margin.
    pub budget: Bytes,
    /// The largest batch that fits, or zero.
    pub batch: usize,
    /// The most bytes of tensors alive at once. For one item if not even one fits.
    pub live: Bytes,
    /// Footprint of the batch; `None` if not even one item fits.
    pub footprint: Option<Footprint>,
    /// Footprint of one item more; `None` if the search ended before asking.
    pub next: Option<Footprint>,
}

impl<B, S> Rehearsals<B, S>
where
    B: LazyBackend<Base = DryCuda> + AutodiffBackend<Device = DryDevice<Cuda>>,
    S: Subject<B>,
{
    /// Puts the model on a dry device of `card`. The choice of card does not matter, because
    /// nothing runs.
    pub fn new(subject: S, card: &Card) -> anyhow::Result<Self> {
        let lease = Lease::take(&card.properties())?;
        let model = subject.model(lease.device());
        initialize(&model);
        let recording = Mutex::new(Recordings { model, traces: HashMap::new() });
        let mut rehearsals = Self { subject, lease, live: [Bytes::ZERO; 2], recording };
        let typical = rehearsals.subject.typical();
        for times in [1, 2] {
            let trace = rehearsals.trace(times * typical)?;
            rehearsals.live[times - 1] = live(&trace);
        }
        Ok(rehearsals)
    }

    /// Number of items whose live tensors take `bytes`, by the straight line through two sizes; at
    /// least one.
    fn items_in(&self, bytes: Bytes) -> usize {
        let [one, two] = self.live.map(|bytes| bytes.get() as f64);
        let typical = self.subject.typical() as f64;
        let items = typical + (bytes.get() as f64 - one) / ((two - one) / typical);
        items.clamp(1.0, MOST_ITEMS as f64) as usize
    }

    /// Describes the model in a few words.
    pub fn title(&self) -> String {
        self.subject.title()
    }

    /// Records two iterations on a batch of `items` items. The first creates the optimizer state,
    /// the second finds it in place.
    pub fn trace(&self, items: usize) -> anyhow::Result<Arc<Trace>> {
        let mut recordings = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(trace) = recordings.traces.get(&items) {
            return Ok(trace.clone());
        }
        let batch = self.subject.batch(items, self.lease.device());
        let recorder = StepRecorder::new().refuse_reads();
        let rehearsal = rehearse::<B, _>(&recorder, &recordings.model, |model| {
            // A graph with its own leaves, as in training.
            let mut model = model.clone().fork(self.lease.device());
            let mut optimizer = AdamConfig::new().init();
            label_parameters(&model);
            for _ in 0..2 {
                let loss = self.subject.loss(&model, &batch);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                mark::<DryCuda>(Mark::Settle);
                mark::<DryCuda>(Mark::OptimizerStep);
                model = optimizer.step(1e-3, model, gradients);
                label_parameters(&model);
                mark::<DryCuda>(Mark::Settle);
                mark::<DryCuda>(Mark::IterationEnd);
            }
        })?;
        let trace = Arc::new(rehearsal.trace);
        recordings.traces.insert(items, trace.clone());
        Ok(trace)
    }
}

/// Finds a batch whose training step on backend `D` fits `card`, while one item more does not.
///
/// Heuristic: a larger batch may still fit, because not all sizes are tried.
pub fn largest_batch<D, B, S>(card: &Card, rehearsals: &Rehearsals<B, S>) -> anyhow::Result<Fit>
where
    D: DryTwin,
    B: LazyBackend<Base = DryCuda> + AutodiffBackend<Device = DryDevice<Cuda>>,
    S: Subject<B>,
{
    let free = card.memory() - card.context();
    let budget =
        Budget::free().resolve(&MemoryInfo::new(card.memory(), free, card.name().to_owned()))?;
    let model = Dry::<D>::new(card.properties());
    let mut known: HashMap<usize, Footprint> = HashMap::new();
    let mut ask = |items: usize| -> anyhow::Result<Footprint> {
        if let Entry::Vacant(unknown) = known.entry(items) {
            unknown.insert(footprint(&model, rehearsals.trace(items)?.as_ref())?);
        }
        Ok(known[&items].clone())
    };
    let start = rehearsals.items_in(budget.scale(1.0 / RESERVED_PER_LIVE));
    let mut batch = climb(start, |items| Ok::<_, anyhow::Error>(ask(items)?.peak <= budget))?;
    // A larger batch can need less memory if it opens other pages. No batch fits whose tensors
    // alone do not.
    let most = rehearsals.items_in(budget).max(batch);
    for part in (1..=OTHER_SIZES).rev() {
        let size = batch + (most - batch) * part / OTHER_SIZES;
        if size > batch + 1 && ask(size)?.peak <= budget {
            batch = climb(size, |items| {
                Ok::<_, anyhow::Error>(items <= batch || ask(items)?.peak <= budget)
            })?;
            break;
        }
    }
    let (footprint, next) = (known.remove(&batch), known.remove(&(batch + 1)));
    let live = live(rehearsals.trace(batch.max(1))?.as_ref());
    Ok(Fit { card: card.clone(), budget, batch, live, footprint, next })
}

/// The most bytes of tensors alive at once.
fn live(trace: &Trace) -> Bytes {
    Heap::simple().footprint(trace).peak
}

/// Computes the footprint of `trace`.
///
/// A step that burn cannot run on a device without memory cannot run on the card either, so its
/// footprint is infinite. CubeCL 0.10 panics on tensors so large that their elements are counted
/// with 64 bits.
fn footprint<D: DryTwin>(model: &Dry<D>, trace: &Trace) -> anyhow::Result<Footprint> {
    match model.replay(trace) {
        Err(ReplayError::Panicked(_)) => Ok(Footprint {
            peak: Bytes::MAX,
            estimate: Estimate::Heuristic,
            ..Footprint::default()
        }),
        replayed => Ok(replayed?),
    }
}

/// Finds a size that fits while the next one does not, starting from `start`. Zero if one item does
/// not fit.
pub fn climb<E>(start: usize, mut fits: impl FnMut(usize) -> Result<bool, E>) -> Result<usize, E> {
    let (mut low, mut high) = (0, MOST_ITEMS + 1);
    let mut size = start.clamp(1, MOST_ITEMS);
    let mut stride = (size / 16).max(1);
    // Doubles the stride until both ends are known.
    while low == 0 && high > 1 || high > MOST_ITEMS && low < MOST_ITEMS {
        if fits(size)? {
            low = size;
            size = (size + stride).min(MOST_ITEMS).min(high - 1);
        } else {
            high = size;
            size = size.saturating_sub(stride).max(low + 1).max(1);
        }
        stride *= 2;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use super::climb;

    #[test]
    fn the_search_ends_at_the_limit_wherever_it_starts() {
        for limit in [0, 1, 2, 7, 100, 4095, 4096] {
            for start in [1, 2, 5, 99, 100, 101, 5000] {
                let mut asked = 0;
                let found = climb(start, |size| {
                    asked += 1;
                    Ok::<_, ()>(size <= limit)
                });
                assert_eq!(found, Ok(limit), "from {start}");
                assert!(asked < 40, "{asked} questions from {start} to {limit}");
            }
        }
    }
}
