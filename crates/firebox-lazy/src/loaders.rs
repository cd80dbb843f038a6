//! The gate of loader threads: how much they may prepare ahead of the training thread.
//!
//! burn's `MultiThreadDataLoader` lets its threads queue up to 100 whole batches, and has no option for fewer. But all that they ask
//! for passes through [`Lazy`](crate::Lazy), which keeps its host data until it is needed, counts it, and can let them wait.
//!
//! The gate is one for the process, because burn hands nothing to the threads that it starts but their name.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn_backend::{Backend, StreamId, TensorData};
use firebox_trace::Bytes;

use crate::deferred;
use crate::kind::Kind;
use crate::progress;
use crate::session::{self, is_recording};
use crate::streams::{current_worker, meet, on_stream, stream_of_worker};
use crate::tensor::LazyTensor;
use crate::threads;

/// How long the training thread waits for a batch before worker threads beyond their limit may go on. Its batch may have
/// arrived already while it has not woken up; a wait this long says that without them there will be none.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long a program that is being recorded may stand still before loader threads go on: it may wait for one of them.
const STANDSTILL: Duration = Duration::from_millis(250);

/// The gate that loader threads pass when they make a tensor of host data.
///
/// A loader thread is any with the name `dataloader-<worker>`. What counts is the host data that such a thread has given to
/// [`Lazy`](crate::Lazy), and a kibibyte for each call, until another thread needs the tensor or nobody holds it any more.
///
/// A thread that is held back goes on where a step that is being recorded makes no call for a quarter of a second: the step may wait
/// for it, as one does that pulls from a loader of its own.
#[derive(Clone, Copy, Debug)]
pub struct LoaderGate;

impl LoaderGate {
    /// Starts to watch loader threads, until the guard is dropped.
    ///
    /// Loader threads do not know for whom they work. While several guards live in the process, nothing is held back.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
    /// use burn::data::dataset::InMemDataset;
    /// use burn::prelude::*;
    /// use firebox_lazy::{Lazy, LoaderGate};
    /// use firebox_trace::Bytes;
    ///
    /// #[derive(Clone)]
    /// struct Batches;
    ///
    /// impl<B: Backend> Batcher<B, f32, Tensor<B, 1>> for Batches {
    ///     fn batch(&self, items: Vec<f32>, device: &B::Device) -> Tensor<B, 1> {
    ///         Tensor::from_floats(items.as_slice(), device)
    ///     }
    /// }
    ///
    /// let guard = LoaderGate::enter();
    /// guard.limit(Bytes::kib(2));
    /// // 32 batches of 1 KiB each.
    /// let loader = DataLoaderBuilder::<Lazy<Flex>, f32, Tensor<Lazy<Flex>, 1>>::new(Batches)
    ///     .batch_size(256)
    ///     .num_workers(2)
    ///     .build(InMemDataset::new(vec![1.0; 32 * 256]));
    ///
    /// let mut batches = loader.iter();
    /// let mut sum = 0.0;
    /// while let Some(batch) = guard.waiting(|| batches.next()) {
    ///     sum += batch.sum().into_scalar();
    /// }
    /// assert_eq!(sum, 32.0 * 256.0);
    /// assert_eq!(guard.workers(), 2);
    /// assert!(guard.peak_of_worker() >= Bytes::kib(1));
    /// assert_eq!(guard.live(), Bytes::ZERO);
    /// ```
    pub fn enter() -> LoaderGuard {
        let mut state = state();
        let number = state.enter();
        CHANGED.notify_all();
        LoaderGuard { number }
    }

    /// Waits until no loader thread is alive, at most so long. Only on Linux: elsewhere threads cannot be listed.
    pub fn until_idle(patience: Duration) {
        let since = Instant::now();
        while threads::highest_loader().is_some() && since.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Holds loader threads back while it lives: see [`LoaderGate::enter`].
#[derive(Debug)]
pub struct LoaderGuard {
    number: u64,
}

impl LoaderGuard {
    /// Lets a loader thread wait, before it makes a tensor of host data, while it has `bytes_per_worker` or more that nobody has needed
    /// yet. Default: no limit.
    ///
    /// Such a thread overshoots by the tensor that it was let in for, and by what its batch is made of after that. Give
    /// at least the bytes of one batch: with less, a batch of several tensors is only finished once the training thread
    /// has waited for it for 20 ms.
    pub fn limit(&self, bytes_per_worker: Bytes) {
        state().guards.insert(self.number, Some(bytes_per_worker));
        CHANGED.notify_all();
    }

    /// Starts loader threads: `start` is the loader's `iter`. On Linux this waits, for a second at most, until they have their
    /// names, so that [`workers`](Self::workers) counts them all.
    ///
    /// # Panics
    ///
    /// If `start` panics.
    pub fn starting<R>(&self, start: impl FnOnce() -> R) -> R {
        threads::starting(start)
    }

    /// Waits for a batch: `next` is the loader iterator's `next`.
    ///
    /// If `next` takes longer than 20 ms, nobody is held back any more until it is done, and so somebody makes the
    /// batch, however large it is and whoever holds earlier ones. Without this call a training thread can wait forever.
    ///
    /// # Panics
    ///
    /// If `next` panics.
    pub fn waiting<R>(&self, next: impl FnOnce() -> R) -> R {
        struct Waiting;
        impl Drop for Waiting {
            fn drop(&mut self) {
                state().stop_waiting();
            }
        }
        state().start_waiting(Instant::now());
        CHANGED.notify_all();
        let _until_done = Waiting;
        next()
    }

    /// How many loader threads there are: one more than the highest number of those that made a tensor since the guard
    /// was taken and, on Linux, of those that are alive. A thread may be too young to have its name, unless
    /// [`starting`](Self::starting) has waited for it.
    pub fn workers(&self) -> usize {
        // In this order: one that ends in between is known by what it made.
        let alive = threads::highest_loader();
        let made = state().workers.iter().filter(|(_, worker)| worker.seen).map(|(n, _)| *n).max();
        made.max(alive).map_or(0, |highest| usize::from(highest) + 1)
    }

    /// The most that one loader thread ever had that nobody had needed yet, since the guard was taken. With several guards,
    /// since the first of them was.
    pub fn peak_of_worker(&self) -> Bytes {
        state().workers.values().map(|worker| worker.peak).max().unwrap_or_default()
    }

    /// What all loader threads have made that nobody has needed yet.
    pub fn live(&self) -> Bytes {
        state().workers.values().map(|worker| worker.live).sum()
    }
}

impl Drop for LoaderGuard {
    fn drop(&mut self) {
        state().guards.remove(&self.number);
        CHANGED.notify_all();
    }
}

/// The streams of the loader threads that have computed something in this process, because they read values.
///
/// Between epochs, with no loader iterator alive, pages that they do not use can be given back on each:
/// `stream.executes(|| client.memory_cleanup())`.
///
/// ```
/// use burn::{backend::Flex, tensor::Tensor};
/// use firebox_lazy::{Lazy, loader_streams, stream_of_worker};
///
/// let read = || Tensor::<Lazy<Flex>, 1>::zeros([8], &Default::default()).sum().into_scalar();
/// let worker = std::thread::Builder::new().name("dataloader-5".into()).spawn(read)?;
/// assert_eq!(worker.join().expect("it reads a value"), 0.0);
/// assert_eq!(loader_streams(), [stream_of_worker(5)]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn loader_streams() -> Vec<StreamId> {
    let state = state();
    let readers = state.workers.iter().filter(|(_, worker)| worker.reads);
    readers.map(|(number, _)| stream_of_worker(*number)).collect()
}

/// Makes a tensor of host data: a loader thread passes the gate first.
pub(crate) fn upload<B: Backend, K: Kind<B>>(
    data: TensorData,
    device: &B::Device,
    call: &'static str,
) -> LazyTensor<B, K> {
    if !is_recording()
        && let Some(worker) = current_worker()
    {
        pass(worker);
    }
    let Some(_until_done) = deferred::begin::<B>() else {
        meet::<B>(device);
        return LazyTensor::new(on_stream::<B, _>(|| K::from_data(data, device)));
    };
    session::with(|session| session.upload::<K>(data, device, call)).expect("it has begun")
}

/// What a call takes of the host that is written down by itself, without its data. 840 to 870 bytes were measured.
const CALL: Bytes = Bytes::new(1024);

/// What a loader thread has written down and nobody has needed yet, with its host data: counted while this lives.
#[derive(Debug)]
pub(crate) struct Loaded {
    worker: u16,
    bytes: Bytes,
}

impl Loaded {
    /// A call with so much host data.
    pub(crate) fn new(worker: u16, data: Bytes) -> Self {
        let bytes = data + CALL;
        state().add(worker, bytes);
        Self { worker, bytes }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        state().remove(self.worker, self.bytes);
        CHANGED.notify_all();
    }
}

/// Notes that a loader thread computes something, to read it.
pub(crate) fn note_reader(worker: u16) {
    state().workers.entry(worker).or_default().reads = true;
}

static STATE: Mutex<State> = Mutex::new(State::new());
static CHANGED: Condvar = Condvar::new();

/// No code of others runs under this lock, and what it protects is right after every statement: poison says nothing.
fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until the worker may make a tensor.
fn pass(worker: u16) {
    let mut state = state();
    let mut seen = (progress::calls(), Instant::now());
    loop {
        let time = match state.verdict(worker, Instant::now()) {
            Verdict::Pass => return,
            Verdict::Wait => STANDSTILL,
            Verdict::WaitFor(time) => time,
        };
        let woken = CHANGED.wait_timeout(state, time);
        state = woken.unwrap_or_else(PoisonError::into_inner).0;
        let calls = progress::calls();
        if calls != seen.0 {
            seen = (calls, Instant::now());
        } else if calls.is_some() && seen.1.elapsed() >= STANDSTILL {
            log::debug!("loader thread {worker} goes on: the step may wait for it");
            return;
        }
    }
}

/// Whether a worker may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    /// Not before something changes, or the step that is recorded stands still.
    Wait,
    /// When nothing changes for so long.
    WaitFor(Duration),
}

/// What is known of guards and workers.
#[derive(Debug)]
struct State {
    /// The guards that live, and their limits.
    guards: BTreeMap<u64, Option<Bytes>>,
    next_guard: u64,
    /// How many calls of [`LoaderGuard::waiting`] go on, and since when there was always one.
    waiting: usize,
    waiting_since: Option<Instant>,
    workers: BTreeMap<u16, Worker>,
}

/// The host data that a worker made.
#[derive(Debug, Default)]
struct Worker {
    live: Bytes,
    peak: Bytes,
    /// Whether it made one since the guard was taken.
    seen: bool,
    /// Whether it ever computed something, to read it.
    reads: bool,
}

impl State {
    const fn new() -> Self {
        Self {
            guards: BTreeMap::new(),
            next_guard: 0,
            waiting: 0,
            waiting_since: None,
            workers: BTreeMap::new(),
        }
    }

    fn enter(&mut self) -> u64 {
        if self.guards.is_empty() {
            for worker in self.workers.values_mut() {
                (worker.peak, worker.seen) = (worker.live, false);
            }
        }
        let number = self.next_guard;
        self.next_guard += 1;
        self.guards.insert(number, None);
        number
    }

    /// The limit of the guard, if there is just one.
    fn limit(&self) -> Option<Bytes> {
        match self.guards.len() {
            1 => self.guards.values().copied().next().flatten(),
            _ => None,
        }
    }

    fn start_waiting(&mut self, now: Instant) {
        self.waiting += 1;
        self.waiting_since.get_or_insert(now);
    }

    fn stop_waiting(&mut self) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.waiting_since = None;
        }
    }

    fn add(&mut self, worker: u16, bytes: Bytes) {
        let worker = self.workers.entry(worker).or_default();
        worker.seen = true;
        worker.live += bytes;
        worker.peak = worker.peak.max(worker.live);
    }

    fn remove(&mut self, worker: u16, bytes: Bytes) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.live -= bytes;
        }
    }

    fn verdict(&self, worker: u16, now: Instant) -> Verdict {
        let live = self.workers.get(&worker).map_or(Bytes::ZERO, |worker| worker.live);
        if self.limit().is_none_or(|limit| live < limit) {
            return Verdict::Pass;
        }
        let Some(since) = self.waiting_since else { return Verdict::Wait };
        match PATIENCE.saturating_sub(now.saturating_duration_since(since)) {
            Duration::ZERO => Verdict::Pass,
            left => Verdict::WaitFor(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state with one guard of this limit.
    fn limited(limit: u64) -> State {
        let mut state = State::new();
        let guard = state.enter();
        state.guards.insert(guard, Some(Bytes::new(limit)));
        state
    }

    #[test]
    fn a_worker_waits_at_its_own_limit_and_at_no_other() {
        let (mut state, now) = (limited(100), Instant::now());
        state.add(0, Bytes::new(99));
        assert_eq!(state.verdict(0, now), Verdict::Pass);
        state.add(0, Bytes::new(1));
        assert_eq!([0, 1].map(|worker| state.verdict(worker, now)), [Verdict::Wait, Verdict::Pass]);
        state.remove(0, Bytes::new(1));
        assert_eq!(state.verdict(0, now), Verdict::Pass);
    }

    #[test]
    fn a_limit_of_nothing_is_a_limit() {
        let now = Instant::now();
        assert_eq!(limited(0).verdict(0, now), Verdict::Wait);
    }

    #[test]
    fn nobody_is_held_back_without_a_limit_or_with_several_guards() {
        let now = Instant::now();
        let mut state = State::new();
        state.add(0, Bytes::gib(1));
        assert_eq!(state.verdict(0, now), Verdict::Pass, "no guard");
        let first = state.enter();
        assert_eq!(state.verdict(0, now), Verdict::Pass, "no limit");
        state.guards.insert(first, Some(Bytes::ZERO));
        assert_eq!(state.verdict(0, now), Verdict::Wait);
        let second = state.enter();
        assert_eq!(state.verdict(0, now), Verdict::Pass, "two guards");
        state.guards.remove(&second);
        assert_eq!(state.verdict(0, now), Verdict::Wait, "the first guard counts again");
    }

    #[test]
    fn a_long_wait_for_a_batch_opens_the_gate_until_it_ends() {
        let (mut state, start) = (limited(0), Instant::now());
        state.start_waiting(start);
        assert_eq!(state.verdict(0, start + PATIENCE / 2), Verdict::WaitFor(PATIENCE / 2));
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Pass);
        // Another thread that waits meanwhile does not close it.
        state.start_waiting(start + PATIENCE);
        state.stop_waiting();
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Pass);
        state.stop_waiting();
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Wait);
    }

    #[test]
    fn a_guard_counts_from_where_it_finds_the_workers() {
        let mut state = State::new();
        state.add(2, Bytes::new(70));
        state.remove(2, Bytes::new(40));
        assert_eq!(state.workers[&2].peak, Bytes::new(70));
        state.enter();
        assert_eq!((state.workers[&2].peak, state.workers[&2].seen), (Bytes::new(30), false));
        state.add(2, Bytes::new(5));
        assert_eq!((state.workers[&2].peak, state.workers[&2].seen), (Bytes::new(35), true));
        state.enter();
        assert_eq!(state.workers[&2].peak, Bytes::new(35), "a second guard starts nothing anew");
    }
}
