//! The gate with burn's own data loader: it limits what loader threads prepare, nothing hangs, and
//! the threads prepare the same batches as without it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::Flex;
use burn::backend::flex::FlexDevice;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use firebox_lazy::{Lazy, LazyBackend, LoaderGate, LoaderGuard, StepRecorder, bytes_made};
use firebox_trace::Bytes;

type B = Lazy<Flex>;

const BATCH_SIZE: usize = 64;
const FEATURES: usize = 16;

/// How long the training thread spends on a batch. Much longer than it takes to make one.
const PAUSE: Duration = Duration::from_millis(1);

/// What the gate counts for a batch: its host data and its three calls.
const BATCH: Bytes = Bytes::new(4 * (BATCH_SIZE * FEATURES + BATCH_SIZE) as u64 + 3 * 1024);

/// Serializes the tests, because the gate would count loader threads of two tests together.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts batches independently of the gate.
#[derive(Debug, Default)]
struct Tally {
    alive: [AtomicUsize; 8],
    /// The most batches that one worker had alive at once.
    most: AtomicUsize,
}

/// A batch that is alive.
#[derive(Debug)]
struct Alive {
    tally: Arc<Tally>,
    worker: usize,
}

impl Alive {
    fn new(tally: Arc<Tally>) -> Self {
        let thread = thread::current();
        let worker = thread.name().and_then(|name| name.strip_prefix("dataloader-"));
        let worker = worker.and_then(|worker| worker.parse().ok()).expect("a loader thread");
        let alive: &AtomicUsize = &tally.alive[worker];
        tally.most.fetch_max(alive.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        Self { tally, worker }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.tally.alive[self.worker].fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Clone, Debug)]
struct Batch {
    features: Tensor<B, 2>,
    targets: Tensor<B, 1>,
    alive: Arc<Alive>,
}

impl Batch {
    /// The number of the worker, and the values.
    fn content(&self) -> (usize, Vec<f32>) {
        let read = |data: TensorData| data.to_vec::<f32>().expect("floats");
        let mut values = read(self.features.to_data());
        values.extend(read(self.targets.to_data()));
        (self.alive.worker, values)
    }
}

#[derive(Clone)]
struct Batches(Arc<Tally>);

impl Batcher<B, usize, Batch> for Batches {
    fn batch(
        &self,
        items: Vec<usize>,
        device: &<B as burn::tensor::backend::BackendTypes>::Device,
    ) -> Batch {
        let features: Vec<f32> = items
            .iter()
            .flat_map(|item| (0..FEATURES).map(move |i| (item * FEATURES + i) as f32))
            .collect();
        let features = Tensor::<B, 1>::from_floats(features.as_slice(), device);
        let targets: Vec<f32> = items.iter().map(|item| *item as f32).collect();
        Batch {
            features: features.reshape([items.len(), FEATURES]),
            targets: Tensor::from_floats(targets.as_slice(), device),
            alive: Arc::new(Alive::new(self.0.clone())),
        }
    }
}

/// A loader of `batches` full batches, unshuffled, and its tally.
fn loader(workers: usize, batches: usize) -> (Arc<dyn DataLoader<B, Batch>>, Arc<Tally>) {
    let tally = Arc::new(Tally::default());
    let loader = DataLoaderBuilder::new(Batches(tally.clone()))
        .batch_size(BATCH_SIZE)
        .num_workers(workers)
        .build(InMemDataset::new((0..batches * BATCH_SIZE).collect()));
    (loader, tally)
}

/// What a training thread received.
#[derive(Default)]
struct Epoch {
    /// The batches, sorted by the worker that made them. Which worker is faster is chance, but the
    /// batches of one worker have an order.
    batches: Vec<(usize, Vec<f32>)>,
    /// The longest wait for a batch.
    longest_wait: Duration,
}

/// Runs one epoch of a training thread that spends `pause` on a batch.
fn epoch(guard: &LoaderGuard, loader: &dyn DataLoader<B, Batch>, pause: Duration) -> Epoch {
    let mut batches = loader.iter();
    let mut epoch = Epoch::default();
    loop {
        let start = Instant::now();
        let Some(batch) = guard.waiting(|| batches.next()) else { break };
        epoch.longest_wait = epoch.longest_wait.max(start.elapsed());
        thread::sleep(pause);
        epoch.batches.push(batch.content());
    }
    epoch.batches.sort_by_key(|(worker, _)| *worker);
    epoch
}

/// Waits for something that loader threads do on their own.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn on_loader_thread<R: Send + 'static>(
    worker: usize,
    run: impl FnOnce() -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let name = format!("dataloader-{worker}");
    thread::Builder::new().name(name).spawn(run).expect("a thread")
}

/// The most batches and the most bytes that one worker had alive in three epochs under a limit of
/// two batches. `None` if the machine was so busy that a wait for a batch opened the gate.
fn most_under_a_limit(workers: usize, expected: &[(usize, Vec<f32>)]) -> Option<(usize, Bytes)> {
    let guard = LoaderGate::enter();
    guard.limit(BATCH.scale(2.0));
    let (loader, tally) = loader(workers, 64);
    let mut longest_wait = Duration::ZERO;
    for _ in 0..3 {
        let epoch = epoch(&guard, &*loader, PAUSE);
        assert_eq!(epoch.batches, expected);
        longest_wait = longest_wait.max(epoch.longest_wait);
    }
    assert_eq!((guard.workers(), guard.live()), (workers, Bytes::ZERO));
    let most = tally.most.load(Ordering::SeqCst);
    (longest_wait < Duration::from_millis(20)).then_some((most, guard.peak_of_worker()))
}

#[test]
fn a_limit_bounds_what_loader_threads_prepare_and_changes_nothing_else() {
    let _alone = alone();
    for workers in [2, 4] {
        let guard = LoaderGate::enter();
        let (free, tally) = loader(workers, 64);
        let expected = epoch(&guard, &*free, PAUSE).batches;
        assert_eq!(expected.len(), 64);
        assert!(tally.most.load(Ordering::SeqCst) > 5, "without a limit: {tally:?}");
        assert!(guard.peak_of_worker() > BATCH.scale(5.0), "{}", guard.peak_of_worker());
        drop(guard);

        let measured = (0..20).find_map(|_| most_under_a_limit(workers, &expected));
        let (most, peak) = measured.expect("one run in twenty without a wait of 20 ms");
        println!("{workers} workers: at most {most} batches, {peak} each");
        // Two, plus one in the making. The lower bounds show that the limit is used.
        assert!((2..=3).contains(&most), "{workers} workers: {most} batches");
        assert!(peak >= BATCH.scale(2.0) && peak <= BATCH.scale(3.0), "{peak}");
    }
}

#[test]
fn one_worker_keeps_its_order() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    guard.limit(BATCH);
    let (loader, _) = loader(1, 20);
    let contents = epoch(&guard, &*loader, Duration::ZERO).batches;
    let first_targets = contents.iter().map(|(_, values)| values[BATCH_SIZE * FEATURES] as usize);
    assert!(first_targets.eq((0..20).map(|batch| batch * BATCH_SIZE)));
}

#[test]
fn batches_above_the_limit_and_batches_that_are_kept_hang_nobody() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    guard.limit(Bytes::new(1));
    let (loader, _) = loader(2, 12);
    assert_eq!(epoch(&guard, &*loader, Duration::ZERO).batches.len(), 12);
    let mut batches = loader.iter();
    let kept: Vec<Batch> = std::iter::from_fn(|| guard.waiting(|| batches.next())).collect();
    assert_eq!((kept.len(), guard.live()), (12, BATCH.scale(12.0)));
    kept[3].content();
    assert_eq!(guard.live(), BATCH.scale(11.0), "what has its values counts no more");
}

#[test]
fn an_iterator_that_is_dropped_early_hangs_nobody() {
    let _alone = alone();
    for limit in [Bytes::new(1), BATCH.scale(2.0)] {
        let guard = LoaderGate::enter();
        guard.limit(limit);
        let (loader, tally) = loader(4, 40);
        let mut batches = loader.iter();
        for _ in 0..3 {
            assert!(guard.waiting(|| batches.next()).is_some());
        }
        drop(batches);
        assert_eq!(epoch(&guard, &*loader, Duration::ZERO).batches.len(), 40, "the next epoch");
        drop(loader.iter());
        drop((guard, loader));
        // The threads hold the batcher.
        eventually("the loader threads end", || Arc::strong_count(&tally) == 1);
        eventually("their tensors end", || LoaderGate::enter().live() == Bytes::ZERO);
    }
}

#[test]
fn a_panic_while_waiting_closes_the_gate_again() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    guard.limit(Bytes::ZERO);
    let next = || guard.waiting(|| panic!("no batch"));
    assert!(catch_unwind(AssertUnwindSafe(next)).is_err());
    let made = Arc::new(AtomicUsize::new(0));
    let worker = on_loader_thread(0, {
        let made = made.clone();
        move || {
            let tensor = Tensor::<B, 1>::from_data([0.0; 8], &Default::default());
            made.store(1, Ordering::SeqCst);
            tensor.into_data()
        }
    });
    if cfg!(target_os = "linux") {
        eventually("the thread is seen", || guard.workers() == 1);
    }
    thread::sleep(Duration::from_millis(100));
    assert_eq!(made.load(Ordering::SeqCst), 0, "the thread is held back");
    drop(guard);
    worker.join().expect("it goes on").assert_eq(&TensorData::zeros::<f32, _>([8]), true);
}

#[test]
fn a_recording_knows_what_loader_threads_asked_for() {
    let _alone = alone();
    let make = || Tensor::<B, 1>::from_floats([1.0, 2.0], &Default::default()).mul_scalar(2.0);
    let trace = |tensor: Tensor<B, 1>| {
        let recording = StepRecorder::new().record::<Flex, _>(|| tensor.exp()).expect("it records");
        let trace = recording.trace().clone();
        assert_eq!(recording.run().into_data().to_vec::<f32>().expect("floats").len(), 2);
        trace
    };
    let asked = || on_loader_thread(3, make).join().expect("it asks for a tensor");
    assert!(B::lazy_float(&asked().into_primitive().tensor()).is_prepared());
    let [own, other] = [make(), asked()].map(trace);
    assert_eq!([&own, &other].map(|trace| trace.tensors[0].prepared), [false, true]);
    assert_eq!(own.structural_hash(), other.structural_hash(), "the structure is the same");
}

#[test]
fn what_waits_is_counted_until_it_is_needed() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    let before = guard.live();
    let tensor = on_loader_thread(0, || {
        let tensor =
            Tensor::<B, 1>::from_floats(vec![0.5; 1 << 18].as_slice(), &Default::default());
        let read = tensor.clone().max().into_scalar();
        assert_eq!(read, 0.5);
        tensor
    });
    let tensor = tensor.join().expect("it asks for a tensor");
    let waits = guard.live() - before;
    assert!((Bytes::mib(1)..Bytes::mib(1) + Bytes::kib(8)).contains(&waits), "{waits}");
    assert_eq!(tensor.sum().into_scalar(), (1 << 17) as f32);
    assert_eq!(guard.live(), before);
}

#[test]
fn loader_threads_compute_where_they_may_and_draw_nothing() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    guard.compute();
    let make = || {
        let device = Default::default();
        let parts = [1.0, 2.0].map(|value| Tensor::<B, 1>::from_floats([value; 1 << 16], &device));
        let noise = Tensor::<B, 1>::random([1 << 17], Distribution::Default, &device);
        let joined = Tensor::cat(parts.to_vec(), 0);
        (joined.clone(), joined + noise, Tensor::<B, 1>::zeros([4], &device))
    };
    let (joined, noisy, zeros) = on_loader_thread(0, make).join().expect("it asks for tensors");
    let lazy = |tensor: &Tensor<B, 1>| B::lazy_float(&tensor.clone().into_primitive().tensor());
    let forms = [&joined, &noisy, &zeros].map(lazy).map(|it| (it.is_prepared(), it.is_promise()));
    assert_eq!(forms, [(true, false), (true, true), (true, false)]);
    // What is drawn is drawn here, in the order of this thread.
    let draw = || Tensor::<B, 1>::random([4], Distribution::Default, &Default::default());
    B::seed(&Default::default(), 7);
    let here = draw().into_data();
    B::seed(&Default::default(), 7);
    let there = on_loader_thread(1, draw).join().expect("it asks for a tensor");
    there.into_data().assert_eq(&here, true);

    // Both parts, and what they are joined to.
    let (half, small) = (Bytes::kib(256), Bytes::kib(8));
    let peak = guard.peak_of_worker();
    assert!(peak >= half * 4 && peak < half * 4 + small, "{peak}");
    assert!((half * 2..half * 2 + small).contains(&guard.live()), "{}", guard.live());
    let sum = joined.sum().into_scalar();
    assert_eq!(sum, 3.0 * f32::from(u16::MAX) + 3.0);
    // The sum that waits for the noise holds the parts' join, which counts no more.
    assert!(guard.live() < small, "{}", guard.live());
    assert!((noisy.mean().into_scalar() - 2.0).abs() < 0.1);
    drop(zeros);
    assert_eq!(guard.live(), Bytes::ZERO);

    let second = LoaderGate::enter();
    let (joined, ..) = on_loader_thread(0, make).join().expect("it asks for tensors");
    assert!(lazy(&joined).is_promise(), "nobody knows for whom it works");
    drop((joined, second));
    eventually("their tensors end", || guard.live() == Bytes::ZERO);
}

#[test]
fn a_batch_that_is_computed_counts_what_making_it_takes() {
    let _alone = alone();
    let guard = LoaderGate::enter();
    guard.compute();
    let item = Bytes::kib(64);
    let (items, batches) = (8, 4);
    let loader = DataLoaderBuilder::<B, f32, Tensor<B, 2>>::new(Stacked)
        .batch_size(items)
        .num_workers(1)
        .build(InMemDataset::new(vec![1.0; items * batches]));
    let mut stacks = loader.iter();
    let mut sum = 0.0;
    while let Some(stack) = guard.waiting(|| stacks.next()) {
        sum += stack.sum().into_scalar();
    }
    assert_eq!(sum, (items * batches * (1 << 14)) as f32);
    let largest = guard.largest_batch();
    assert!(largest >= item * 2 * items as u64, "items and their stack: {largest}");
    assert!(largest <= guard.peak_of_worker(), "{largest}");
}

#[test]
fn what_making_a_batch_takes_is_known_before_the_step() {
    let _alone = alone();
    let (item, items) = (Bytes::kib(64), 8);
    let loader = |workers| {
        DataLoaderBuilder::<B, f32, Tensor<B, 2>>::new(Stacked)
            .batch_size(items)
            .num_workers(workers)
            .build(InMemDataset::new(vec![1.0; items]))
    };
    let guard = LoaderGate::enter();
    for workers in [0, 1] {
        let loader = loader(workers);
        let mut stacks = loader.iter();
        let stack = guard.waiting(|| stacks.next()).expect("one batch");
        let glance = StepRecorder::new().glance();
        // As a range of all items does.
        let cloned = glance.record::<Flex, _>(|| stack.clone());
        let to_make = cloned.expect("nothing else records").bytes_to_make();
        let both = [bytes_made(), to_make];
        // Items and their stack. An item and the view of it that is stacked are counted together.
        let (exact, made) = (item * 2 * items as u64, both[0].max(both[1]));
        assert!(made >= exact && made <= exact + item, "{workers} workers: {both:?}");
        assert_eq!(both[workers.min(1) ^ 1], Bytes::ZERO, "{workers} workers");
        assert_eq!(stack.sum().into_scalar(), (items << 14) as f32);
    }
    assert!(guard.waiting(|| Some(bytes_made())) == Some(Bytes::ZERO), "a batch of its own");
}

/// Stacks an item of 64 KiB for each number.
#[derive(Clone)]
struct Stacked;

impl Batcher<B, f32, Tensor<B, 2>> for Stacked {
    fn batch(&self, items: Vec<f32>, device: &FlexDevice) -> Tensor<B, 2> {
        let item = |item| Tensor::<B, 1>::from_floats(vec![item; 1 << 14].as_slice(), device);
        Tensor::stack(items.into_iter().map(item).collect(), 0)
    }
}
