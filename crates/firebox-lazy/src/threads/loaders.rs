//! The gate of loader threads: limits how much they prepare ahead of the training thread.
//!
//! burn's `MultiThreadDataLoader` lets its threads queue up to 100 whole batches and has no option
//! for fewer. Everything they ask for passes through [`Lazy`](crate::Lazy), which keeps the host
//! data until it is needed. It counts that data and can make the threads wait.
//!
//! There is one gate per process, because burn gives its loader threads nothing but a name.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn_backend::{Backend, StreamId, TensorData};
use firebox_trace::Bytes;

use crate::kind::Kind;
use crate::record::parking::keeper_of_uploads;
use crate::record::session::{self, is_recording};
use crate::tensor::LazyTensor;
use crate::threads::deferred;
use crate::threads::gate::{Count, Guarded, State, Verdict, Worker};
use crate::threads::locks;
use crate::threads::making;
use crate::threads::proc;
use crate::threads::progress;
use crate::threads::streams::{current_worker, meet, on_stream, stream_of_worker};

/// How long the training thread waits for a batch before workers above their limit may go on. Its
/// batch may already have arrived while the thread has not woken up. After a wait this long no
/// batch will come without the workers.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long a program being recorded may stand still before loader threads go on. It may be waiting
/// for one of them.
const STANDSTILL: Duration = Duration::from_millis(250);

/// The gate that loader threads pass when they make a tensor of host data.
///
/// A loader thread is any thread named `dataloader-<worker>`. The gate counts the host data that
/// such a thread has given to [`Lazy`](crate::Lazy), plus 1 KiB for each call. Data counts until
/// another thread needs the tensor or nobody holds it any more.
///
/// A thread that is held back goes on if a step that is being recorded makes no call for 250 ms.
/// Such a step may be waiting for the thread, for example because it pulls from a loader of its
/// own.
#[derive(Clone, Copy, Debug)]
pub struct LoaderGate;

impl LoaderGate {
    /// Watches loader threads until the guard is dropped.
    ///
    /// Loader threads do not know for whom they work. While several guards live in the process, no
    /// thread is held back.
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
        change(|state| LoaderGuard { number: state.enter() })
    }

    /// Waits until no loader thread is alive, for `patience` at most. Only on Linux: threads cannot
    /// be listed elsewhere, and the call returns immediately.
    pub fn until_idle(patience: Duration) {
        let since = Instant::now();
        while proc::highest_loader().is_some() && since.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Holds loader threads back while it lives. See [`LoaderGate::enter`].
#[derive(Debug)]
pub struct LoaderGuard {
    number: u64,
}

impl LoaderGuard {
    /// Limits what a loader thread may prepare. Default: no limit.
    ///
    /// Before a loader thread makes a tensor of host data, it waits while it has `bytes_per_worker`
    /// or more that nobody has needed yet. It exceeds the limit by the tensor that it was let in
    /// for, and by whatever its batch needs after that.
    ///
    /// Once a batch was [waited for](Self::waiting) and used, the limit is at least the count of
    /// the largest batch. With a lower limit, a batch of several tensors would be finished only
    /// after somebody has waited 20 ms for it.
    pub fn limit(&self, bytes_per_worker: Bytes) {
        self.change(|guard| guard.limit = Some(bytes_per_worker));
    }

    /// Lets loader threads compute what they ask for, as burn's own backends do, instead of leaving
    /// it to the thread that needs it. For backends that compute in the memory of the host, where a
    /// batch that waits takes memory either way. What was computed counts until another thread
    /// needs it.
    ///
    /// Random numbers are still drawn where they are needed, in the order of that thread, and what
    /// is computed from them is computed there. So are [`CustomOp`](crate::CustomOp)s.
    ///
    /// While several guards live in the process, loader threads compute nothing.
    pub fn compute(&self) {
        self.change(|guard| guard.computes = true);
    }

    fn change(&self, change: impl FnOnce(&mut Guarded)) {
        self::change(|state| state.guards.get_mut(&self.number).map(change));
    }

    /// Starts loader threads. `start` is the loader's `iter`.
    ///
    /// On Linux it waits until the threads have their names, for a second at most, so that
    /// [`workers`](Self::workers) counts them all.
    ///
    /// # Panics
    ///
    /// If `start` panics.
    pub fn starting<R>(&self, start: impl FnOnce() -> R) -> R {
        // What is left of the previous loader does not count as a batch.
        state().batch_from = None;
        proc::starting(start)
    }

    /// Waits for a batch. `next` is the loader iterator's `next`.
    ///
    /// If `next` takes longer than 20 ms, no thread is held back until it is done. The batch is
    /// then made however large it is and whoever holds earlier ones. Without this call a training
    /// thread can wait forever.
    ///
    /// # Panics
    ///
    /// If `next` panics.
    pub fn waiting<R>(&self, next: impl FnOnce() -> R) -> R {
        change(|state| state.end_batch(TAKEN.get()));
        let batch = making::counting(|| self.waiting_for(PATIENCE, next));
        state().begin_batch(TAKEN.get());
        batch
    }

    /// Waits for something else that may depend on a loader thread, for example a metric with a
    /// loader of its own. If it takes longer than `patience`, no thread is held back until it is
    /// done.
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

    /// The number of loader threads: one more than the highest worker number seen.
    ///
    /// Counts workers that have made a tensor since the guard was taken. On Linux also counts those
    /// that are alive. A thread may be too young to have its name, unless
    /// [`starting`](Self::starting) has waited for it.
    pub fn workers(&self) -> usize {
        // Look at live threads first: one that ends in between is still known by what it made.
        let alive = proc::highest_loader();
        let made =
            state().workers.iter().filter(|(_, worker)| worker.was_seen()).map(|(n, _)| *n).max();
        made.max(alive).map_or(0, |highest| usize::from(highest) + 1)
    }

    /// The most that one loader thread has held unneeded since the guard was taken. With several
    /// guards, since the first was taken.
    pub fn peak_of_worker(&self) -> Bytes {
        state().peak()
    }

    /// The largest count for one batch, from one [`waiting`](Self::waiting) to the next, since the
    /// guard was taken. With several guards, since the first was taken. Where loader threads
    /// [compute](Self::compute), includes what making the batch takes, in proportion to what making
    /// the first one took.
    pub fn largest_batch(&self) -> Bytes {
        state().largest_batch
    }

    /// What all loader threads have made and nobody has needed yet.
    pub fn live(&self) -> Bytes {
        state().workers.values().map(|worker| worker.live()).sum()
    }
}

impl Drop for LoaderGuard {
    fn drop(&mut self) {
        change(|state| state.guards.remove(&self.number));
    }
}

/// The streams of the loader threads that have computed something in this process because they read
/// values.
///
/// Between epochs, while no loader iterator is alive, the unused pages of each can be given back:
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
    let readers = state.workers.iter().filter(|(_, worker)| worker.reads.load(Ordering::Relaxed));
    readers.map(|(number, _)| stream_of_worker(*number)).collect()
}

/// Makes a tensor of host data. A loader thread passes the gate first, unless it is recording.
pub(crate) fn upload<B: Backend, K: Kind<B>>(
    data: TensorData,
    device: &B::Device,
    call: &'static str,
) -> LazyTensor<B, K> {
    if let Some(keep) = keeper_of_uploads() {
        let form = (data.shape.clone(), data.dtype);
        return LazyTensor::parked(form, device.clone(), call, keep(data));
    }
    if !is_recording()
        && let Some(worker) = current_worker()
    {
        pass(worker);
    }
    let Some(_until_done) = deferred::begin_unless_computed::<B>(|| false) else {
        meet::<B>(device);
        return LazyTensor::new(on_stream::<B, _>(|| K::from_data(data, device)));
    };
    session::with(|session| session.upload::<K>(data, device, call)).expect("it has begun")
}

/// The host memory of a deferred call without its data. Measured: 840 to 870 bytes.
const CALL: Bytes = Bytes::new(1024);

/// A deferred call that nobody has needed yet, with its host data. Counted while this lives.
#[derive(Debug)]
pub(crate) struct Loaded {
    worker: &'static Worker,
    /// Nothing once it counts no longer.
    bytes: Count,
}

impl Loaded {
    /// A call with `data` bytes of host data, of the worker that this thread is.
    pub(crate) fn new(worker: u16, data: Bytes) -> Self {
        let (worker, bytes) = (me(worker), data + CALL);
        worker.add(bytes);
        Self { worker, bytes: Count::new(bytes.get()) }
    }

    /// Counts it no longer.
    fn end(&self) {
        let bytes = self.bytes.take();
        if bytes == Bytes::ZERO {
            return;
        }
        let is_elsewhere = current_worker().is_none();
        self.worker.remove(bytes, computes() && !is_elsewhere);
        if is_elsewhere {
            TAKEN.add(bytes);
        }
        // To wake nobody takes as long as to record a call. A thread says that it sleeps before it
        // looks at the count, under the lock, so it sees this count or is woken.
        if SLEEPERS.load(Ordering::SeqCst) > 0 {
            drop(state());
            CHANGED.notify_all();
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.end();
    }
}

/// What this thread has made, which is the worker of this number.
fn me(number: u16) -> &'static Worker {
    thread_local! {
        static ME: Cell<Option<&'static Worker>> = const { Cell::new(None) };
    }
    ME.get().unwrap_or_else(|| {
        let worker = state().worker(number);
        ME.set(Some(worker));
        worker
    })
}

/// Records that a loader thread computes something in order to read it.
pub(crate) fn note_reader(worker: u16) {
    state().worker(worker).reads.store(true, Ordering::Relaxed);
}

/// A tensor that a loader thread has computed. Counts until another thread needs it.
#[derive(Debug)]
pub(crate) struct Prepared(Loaded);

impl Prepared {
    /// A tensor of `bytes`, if this is a loader thread that computes.
    pub(crate) fn here(bytes: impl FnOnce() -> Bytes) -> Option<Self> {
        let worker = computes().then(current_worker).flatten()?;
        Some(Self(Loaded::new(worker, bytes())))
    }

    /// Counts the tensor no longer, unless this is a loader thread.
    pub(crate) fn note_need(&self) {
        if current_worker().is_none() {
            self.0.end();
        }
    }
}

static STATE: Mutex<State> = Mutex::new(State::new());
static CHANGED: Condvar = Condvar::new();
/// [`State::computes`], to be read without the lock.
static COMPUTES: AtomicBool = AtomicBool::new(false);
/// [`State::admits`], likewise. The greatest number if everything is admitted.
static ADMITS: Count = Count::new(u64::MAX);
/// What threads that are no workers have needed or dropped so far.
static TAKEN: Count = Count::new(0);
/// The threads that wait for a change.
static SLEEPERS: AtomicUsize = AtomicUsize::new(0);

/// Whether loader threads compute what they ask for.
pub(crate) fn computes() -> bool {
    COMPUTES.load(Ordering::Relaxed)
}

/// Changes the guards, and wakes the threads that wait at the gate.
fn change<R>(change: impl FnOnce(&mut State) -> R) -> R {
    let mut state = state();
    let changed = change(&mut state);
    COMPUTES.store(state.computes(), Ordering::Relaxed);
    ADMITS.set(state.admits().unwrap_or(Bytes::new(u64::MAX)));
    CHANGED.notify_all();
    changed
}

/// Ignores poison: no foreign code runs under this lock, and the state is consistent after every
/// statement.
fn state() -> MutexGuard<'static, State> {
    locks::taken();
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until this worker may make a tensor.
fn pass(number: u16) {
    let worker = me(number);
    if worker.live() >= ADMITS.get() {
        SLEEPERS.fetch_add(1, Ordering::SeqCst);
        sleep(number, worker);
        SLEEPERS.fetch_sub(1, Ordering::SeqCst);
    }
}

fn sleep(number: u16, worker: &Worker) {
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
            log::debug!("loader thread {number} goes on: the step may wait for it");
            return;
        }
    }
}
