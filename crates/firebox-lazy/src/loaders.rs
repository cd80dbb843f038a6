//! The gate of loader threads: how much they may prepare ahead of the training thread.
//!
//! burn's `MultiThreadDataLoader` lets its threads queue up to 100 whole batches, and has no option for fewer. But all that they ask
//! for passes through [`Lazy`](crate::Lazy), which keeps its host data until it is needed, counts it, and can let them wait.
//!
//! The gate is one for the process, because burn hands nothing to the threads that it starts but their name.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn_backend::{Backend, StreamId, TensorData};
use firebox_trace::Bytes;

use crate::deferred;
use crate::gate::{State, Verdict};
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
    /// Such a thread overshoots by the tensor that it was let in for, and by what its batch is made of after that. Once a batch was
    /// [waited for](Self::waiting) and used, the limit is at least what was counted for the largest: with less, a batch of several
    /// tensors would only be finished once somebody has waited for it for 20 ms.
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
        // What is left of the loader before is no batch.
        state().measures = false;
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
        state().end_batch();
        let batch = self.waiting_for(PATIENCE, next);
        state().begin_batch();
        batch
    }

    /// Waits for something else that may depend on a loader thread, such as a metric with a loader of its own: if it takes longer than
    /// `patience`, nobody is held back any more until it is done.
    ///
    /// # Panics
    ///
    /// If `wait` panics.
    pub fn waiting_for<R>(&self, patience: Duration, wait: impl FnOnce() -> R) -> R {
        struct Waiting(u64);
        impl Drop for Waiting {
            fn drop(&mut self) {
                state().waits.remove(&self.0);
            }
        }
        let number = state().start_waiting(Instant::now() + patience);
        let _until_done = Waiting(number);
        CHANGED.notify_all();
        wait()
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

    /// The most that was counted for one batch, from one [`waiting`](Self::waiting) to the next, since the guard was taken. With several
    /// guards, since the first of them was.
    pub fn largest_batch(&self) -> Bytes {
        state().largest_batch
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
        state().remove(self.worker, self.bytes, current_worker().is_none());
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
