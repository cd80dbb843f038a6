//! The search: the largest batch whose training step fits a card.
//!
//! Two iterations with Adam are recorded for each size that is asked about, and replayed on the card's dry device. The
//! first guess follows from the tensors alone, without pages, by a straight line through two sizes; from there the
//! search doubles its steps until it has a size that fits and a larger one that does not, and halves the range between
//! them. A few larger sizes are tried as well, because the pages of one more item can be so large that the pages of
//! many more are smaller.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use firebox::dry::{Card, Cuda, Dry, DryCuda, DryDevice, DryTwin, Lease, ReplayError};
use firebox::{
    Budget, Bytes, Estimate, Footprint, Heap, LazyBackend, MemoryInfo, MemoryModel, Recorder, Step,
    Trace, initialize, label_parameters, mark, rehearse,
};

/// No card of today trains on more items at once.
const MOST_ITEMS: usize = 1 << 22;

/// How many sizes above the first answer are tried.
const OTHER_SIZES: usize = 3;

/// What a model reserves for a byte of the tensors that are alive, for the first guess only.
const RESERVED_PER_LIVE: f64 = 1.4;

/// A model that can be made on a device, with batches of any size.
pub trait Subject<B: AutodiffBackend>: Send + Sync {
    /// The model.
    type Model: AutodiffModule<B>;
    /// A batch, on the device.
    type Batch: Send;

    /// What it is, in a few words.
    fn title(&self) -> String;
    /// A small batch as people train with.
    fn typical(&self) -> usize;
    /// The model.
    fn model(&self, device: &B::Device) -> Self::Model;
    /// A batch of `items` items.
    fn batch(&self, items: usize, device: &B::Device) -> Self::Batch;
    /// The loss of a batch.
    fn loss(&self, model: &Self::Model, batch: &Self::Batch) -> Tensor<B, 1>;
}

/// Recorded training steps, by the size of the batch. Each is recorded once, for all cards.
pub struct Rehearsals<B: AutodiffBackend, S: Subject<B>> {
    subject: S,
    /// The device that the model is on. It has no memory and runs nothing but the making of weights and batches.
    lease: Lease<Cuda>,
    /// The bytes of live tensors at the peak, for a typical batch and for one of twice its size.
    live: [Bytes; 2],
    /// A recording changes what clones of a model share, so one is made at a time.
    recording: Mutex<Recordings<S::Model>>,
}

struct Recordings<M> {
    model: M,
    traces: HashMap<usize, Arc<Trace>>,
}

/// What was found on a card.
pub struct Fit {
    /// The card.
    pub card: Card,
    /// What training may reserve there: the card's memory less its context and a margin.
    pub budget: Bytes,
    /// The largest batch that fits, or zero.
    pub batch: usize,
    /// The most bytes of its tensors that are alive at once; of one item, if not even one fits.
    pub live: Bytes,
    /// What it needs; `None` if not even one item fits.
    pub footprint: Option<Footprint>,
    /// What one item more needs; `None` if the search ended before.
    pub next: Option<Footprint>,
}

impl<B, S> Rehearsals<B, S>
where
    B: LazyBackend<Base = DryCuda> + AutodiffBackend<Device = DryDevice<Cuda>>,
    S: Subject<B>,
{
    /// Puts the model on a dry device of `card`; which card does not matter, for nothing is run.
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

    /// How many items there are where live tensors take `bytes`, by the straight line through two sizes; at least one.
    fn items_in(&self, bytes: Bytes) -> usize {
        let [one, two] = self.live.map(|bytes| bytes.get() as f64);
        let typical = self.subject.typical() as f64;
        let items = typical + (bytes.get() as f64 - one) / ((two - one) / typical);
        items.clamp(1.0, MOST_ITEMS as f64) as usize
    }

    /// What the model is.
    pub fn title(&self) -> String {
        self.subject.title()
    }

    /// Two iterations on a batch of `items` items: the optimizer's state is made in the first and there in the second.
    pub fn trace(&self, items: usize) -> anyhow::Result<Arc<Trace>> {
        let mut recordings = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(trace) = recordings.traces.get(&items) {
            return Ok(trace.clone());
        }
        let batch = self.subject.batch(items, self.lease.device());
        let recorder = Recorder::new().refuse_reads();
        let rehearsal = rehearse::<B, _>(&recorder, &recordings.model, |model| {
            // A graph with leaves of its own, as in training.
            let mut model = model.clone().fork(self.lease.device());
            let mut optimizer = AdamConfig::new().init();
            label_parameters(&model);
            for _ in 0..2 {
                let loss = self.subject.loss(&model, &batch);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                mark::<DryCuda>(Step::SETTLE);
                mark::<DryCuda>(Step::OPTIMIZER_STEP);
                model = optimizer.step(1e-3, model, gradients);
                label_parameters(&model);
                mark::<DryCuda>(Step::SETTLE);
                mark::<DryCuda>(Step::ITERATION_END);
            }
        })?;
        let trace = Arc::new(rehearsal.trace);
        recordings.traces.insert(items, trace.clone());
        Ok(trace)
    }
}

/// The largest batch found of which a training step on the backend `D` fits `card`: it fits, and one item more does not. No proof that no
/// larger batch fits: not all were tried.
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
    // What a larger batch needs can be less, where it needs other pages. None fits whose tensors alone do not.
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

/// The most bytes of tensors that are alive at once.
fn live(trace: &Trace) -> Bytes {
    Heap::simple().footprint(trace).peak
}

/// What `trace` needs. What burn cannot run on a device without memory, it cannot run on the card either: without end.
/// CubeCL 0.10 panics where a tensor is so large that its elements are counted with 64 bits.
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

/// The size that fits and whose next does not, as found from `start`; zero if one item does not fit.
pub fn climb<E>(start: usize, mut fits: impl FnMut(usize) -> Result<bool, E>) -> Result<usize, E> {
    let (mut low, mut high) = (0, MOST_ITEMS + 1);
    let mut size = start.clamp(1, MOST_ITEMS);
    let mut stride = (size / 16).max(1);
    // Until both ends were seen, in strides that double.
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
