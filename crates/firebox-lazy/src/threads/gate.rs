//! The state of the loader threads' gate: what each worker has prepared, who waits, and whether a
//! worker may go on.
//!
//! Pure: `loaders.rs` keeps one state per process behind a lock and passes the time in. What
//! workers make is counted without the lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firebox_trace::Bytes;

/// Whether a worker may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Pass,
    /// Wait until something changes or the step being recorded stands still.
    Wait,
    /// Wait until something changes, for this long at most. After that the gate opens.
    WaitFor(Duration),
}

/// What is known about guards and workers.
#[derive(Debug)]
pub(crate) struct State {
    /// The guards that live.
    pub(crate) guards: BTreeMap<u64, Guarded>,
    next_guard: u64,
    /// The calls of [`LoaderGuard::waiting_for`](crate::LoaderGuard::waiting_for) in progress, and
    /// the time at which each has lasted too long.
    pub(crate) waits: BTreeMap<u64, Instant>,
    next_wait: u64,
    /// What other threads had taken when the batch began that they take now.
    pub(crate) batch_from: Option<Bytes>,
    pub(crate) largest_batch: Bytes,
    /// The most that a worker had made when the first batch arrived.
    first_peak: Bytes,
    /// What a worker takes while it makes a batch, in sizes of the batch.
    making: f64,
    /// They are never forgotten, because the names of threads are used again.
    pub(crate) workers: BTreeMap<u16, &'static Worker>,
}

/// What a guard asks for.
#[derive(Debug, Default)]
pub(crate) struct Guarded {
    pub(crate) limit: Option<Bytes>,
    pub(crate) computes: bool,
}

/// The host data that a worker has made.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    tally: Tally,
    /// Whether it has made any since the guard was taken.
    seen: AtomicBool,
    /// Whether it has ever computed something in order to read it.
    pub(crate) reads: AtomicBool,
}

/// What a thread has made and is still there.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    live: Count,
    /// If the thread computes: what it has dropped since it last made something. A call takes its
    /// result and what it is made of at the same time.
    dropped: Count,
    peak: Count,
}

impl Tally {
    pub(crate) fn peak(&self) -> Bytes {
        self.peak.get()
    }

    /// Counts what the thread has made.
    pub(crate) fn add(&self, bytes: Bytes) {
        let live = self.live.add(bytes);
        self.peak.raise(live + self.dropped.take());
    }

    /// Counts no longer what was added. `made_of_it`: the thread itself has dropped it, for
    /// something that it computes of it.
    pub(crate) fn remove(&self, bytes: Bytes, made_of_it: bool) {
        self.live.remove(bytes);
        if made_of_it {
            self.dropped.add(bytes);
        }
    }

    /// Starts to count from what is there.
    fn start(&self) {
        self.peak.set(self.live.get());
        self.dropped.take();
    }
}

/// Bytes that threads count together.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) const fn new(bytes: u64) -> Self {
        Self(AtomicU64::new(bytes))
    }

    pub(crate) fn get(&self) -> Bytes {
        Bytes::new(self.0.load(Ordering::SeqCst))
    }

    pub(crate) fn set(&self, bytes: Bytes) {
        self.0.store(bytes.get(), Ordering::SeqCst);
    }

    /// Empties the count and returns what it was.
    pub(crate) fn take(&self) -> Bytes {
        Bytes::new(self.0.swap(0, Ordering::SeqCst))
    }

    /// Adds to the count and returns what it is then.
    pub(crate) fn add(&self, bytes: Bytes) -> Bytes {
        Bytes::new(self.0.fetch_add(bytes.get(), Ordering::SeqCst)) + bytes
    }

    fn remove(&self, bytes: Bytes) {
        self.0.fetch_sub(bytes.get(), Ordering::SeqCst);
    }

    fn raise(&self, bytes: Bytes) {
        // Mostly it is that high, and looking is cheaper.
        if self.get() < bytes {
            self.0.fetch_max(bytes.get(), Ordering::SeqCst);
        }
    }
}

impl Worker {
    pub(crate) fn live(&self) -> Bytes {
        self.tally.live.get()
    }

    pub(crate) fn was_seen(&self) -> bool {
        self.seen.load(Ordering::Relaxed)
    }

    /// See [`Tally::add`].
    pub(crate) fn add(&self, bytes: Bytes) {
        self.seen.store(true, Ordering::Relaxed);
        self.tally.add(bytes);
    }

    /// See [`Tally::remove`].
    pub(crate) fn remove(&self, bytes: Bytes, made_of_it: bool) {
        self.tally.remove(bytes, made_of_it);
    }

    fn start(&self) {
        self.tally.start();
        self.seen.store(false, Ordering::Relaxed);
    }
}

impl State {
    pub(crate) const fn new() -> Self {
        Self {
            guards: BTreeMap::new(),
            next_guard: 0,
            waits: BTreeMap::new(),
            next_wait: 0,
            batch_from: None,
            largest_batch: Bytes::ZERO,
            first_peak: Bytes::ZERO,
            making: 1.0,
            workers: BTreeMap::new(),
        }
    }

    pub(crate) fn enter(&mut self) -> u64 {
        if self.guards.is_empty() {
            self.workers.values().for_each(|worker| worker.start());
            (self.batch_from, self.largest_batch, self.making) = (None, Bytes::ZERO, 1.0);
        }
        let number = self.next_guard;
        self.next_guard += 1;
        self.guards.insert(number, Guarded::default());
        number
    }

    /// The guard that says what loader threads do. `None` unless exactly one lives.
    fn guard(&self) -> Option<&Guarded> {
        self.guards.values().next().filter(|_| self.guards.len() == 1)
    }

    /// The limit in force.
    pub(crate) fn limit(&self) -> Option<Bytes> {
        self.guard()?.limit
    }

    /// Whether loader threads compute what they ask for.
    pub(crate) fn computes(&self) -> bool {
        self.guard().is_some_and(|guard| guard.computes)
    }

    /// What a worker may have made before it waits. Never if `None`.
    pub(crate) fn admits(&self) -> Option<Bytes> {
        self.limit().map(|limit| limit.max(self.largest_batch))
    }

    /// The worker of this number.
    pub(crate) fn worker(&mut self, number: u16) -> &'static Worker {
        self.workers.entry(number).or_insert_with(|| Box::leak(Box::default()))
    }

    /// Starts a wait and returns its number.
    pub(crate) fn start_waiting(&mut self, too_long: Instant) -> u64 {
        let number = self.next_wait;
        self.next_wait += 1;
        self.waits.insert(number, too_long);
        number
    }

    /// A batch arrives. `taken`: what other threads have taken of workers so far.
    pub(crate) fn begin_batch(&mut self, taken: Bytes) {
        self.batch_from = Some(taken);
        if self.largest_batch == Bytes::ZERO {
            self.first_peak = self.peak();
        }
    }

    /// The next batch is asked for.
    pub(crate) fn end_batch(&mut self, taken: Bytes) {
        let batch = self.batch_from.take().map_or(Bytes::ZERO, |from| taken - from);
        if batch == Bytes::ZERO {
            return;
        }
        // Making a batch takes more than is left of it, for example the parts that were joined.
        if self.computes() && self.largest_batch == Bytes::ZERO {
            self.making = self.first_peak.ratio(batch).max(1.0);
        }
        self.largest_batch = self.largest_batch.max(batch.scale(self.making));
    }

    /// The most that one worker has made and nobody has needed.
    pub(crate) fn peak(&self) -> Bytes {
        self.workers.values().map(|worker| worker.tally.peak()).max().unwrap_or_default()
    }

    pub(crate) fn verdict(&self, worker: &Worker, now: Instant) -> Verdict {
        if self.admits().is_none_or(|admitted| worker.live() < admitted) {
            return Verdict::Pass;
        }
        let Some(too_long) = self.waits.values().min() else { return Verdict::Wait };
        match too_long.saturating_duration_since(now) {
            Duration::ZERO => Verdict::Pass,
            left => Verdict::WaitFor(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long the tests wait before the gate opens.
    const PATIENCE: Duration = Duration::from_millis(20);

    /// A state with one guard of this limit.
    fn limited(limit: u64) -> State {
        let mut state = State::new();
        let guard = state.enter();
        state.guards.entry(guard).or_default().limit = Some(Bytes::new(limit));
        state
    }

    #[test]
    fn a_worker_waits_at_its_own_limit_and_at_no_other() {
        let (mut state, now) = (limited(100), Instant::now());
        let [worker, other] = [0, 1].map(|number| state.worker(number));
        worker.add(Bytes::new(99));
        assert_eq!(state.verdict(worker, now), Verdict::Pass);
        worker.add(Bytes::new(1));
        let verdicts = [worker, other].map(|worker| state.verdict(worker, now));
        assert_eq!(verdicts, [Verdict::Wait, Verdict::Pass]);
        worker.remove(Bytes::new(1), false);
        assert_eq!(state.verdict(worker, now), Verdict::Pass);
    }

    #[test]
    fn a_limit_of_nothing_is_a_limit() {
        let now = Instant::now();
        assert_eq!(limited(0).verdict(&Worker::default(), now), Verdict::Wait);
    }

    #[test]
    fn nobody_is_held_back_without_a_limit_or_with_several_guards() {
        let now = Instant::now();
        let (mut state, worker) = (State::new(), Worker::default());
        worker.add(Bytes::gib(1));
        assert_eq!(state.verdict(&worker, now), Verdict::Pass, "no guard");
        let first = state.enter();
        assert_eq!(state.verdict(&worker, now), Verdict::Pass, "no limit");
        state.guards.entry(first).or_default().limit = Some(Bytes::ZERO);
        assert_eq!(state.verdict(&worker, now), Verdict::Wait);
        let second = state.enter();
        assert_eq!(state.verdict(&worker, now), Verdict::Pass, "two guards");
        state.guards.remove(&second);
        assert_eq!(state.verdict(&worker, now), Verdict::Wait, "the first guard counts again");
    }

    #[test]
    fn a_long_wait_for_a_batch_opens_the_gate_until_it_ends() {
        let (mut state, worker, start) = (limited(0), Worker::default(), Instant::now());
        let first = state.start_waiting(start + PATIENCE);
        assert_eq!(state.verdict(&worker, start + PATIENCE / 2), Verdict::WaitFor(PATIENCE / 2));
        assert_eq!(state.verdict(&worker, start + PATIENCE), Verdict::Pass);
        // The gate stays open when another thread starts to wait.
        let second = state.start_waiting(start + 2 * PATIENCE);
        assert_eq!(state.verdict(&worker, start + PATIENCE), Verdict::Pass);
        state.waits.remove(&first);
        assert_eq!(state.verdict(&worker, start + PATIENCE), Verdict::WaitFor(PATIENCE));
        state.waits.remove(&second);
        assert_eq!(state.verdict(&worker, start + PATIENCE), Verdict::Wait);
    }

    #[test]
    fn a_limit_is_at_least_the_largest_batch() {
        let (mut state, worker, now) = (limited(10), Worker::default(), Instant::now());
        let mut taken = Bytes::new(40);
        for batch in [100, 25] {
            state.begin_batch(taken);
            taken += Bytes::new(batch);
            state.end_batch(taken);
        }
        assert_eq!(state.largest_batch, Bytes::new(100));
        worker.add(Bytes::new(99));
        assert_eq!(state.verdict(&worker, now), Verdict::Pass, "it is not stopped in a batch");
        worker.add(Bytes::new(1));
        assert_eq!(state.verdict(&worker, now), Verdict::Wait);
        // Data dropped with a loader does not count as a batch.
        taken += Bytes::new(150);
        state.end_batch(taken);
        state.begin_batch(taken);
        state.end_batch(taken);
        assert_eq!(state.largest_batch, Bytes::new(100));
    }

    #[test]
    fn what_a_call_drops_counts_beside_what_it_makes() {
        let mut state = limited(100);
        state.guards.values_mut().for_each(|guard| guard.computes = true);
        // Two parts are joined, and the parts are dropped.
        let worker = state.worker(0);
        let parts = [Bytes::new(30), Bytes::new(30)];
        parts.iter().for_each(|part| worker.add(*part));
        parts.iter().for_each(|part| worker.remove(*part, true));
        assert_eq!(worker.live(), Bytes::ZERO);
        worker.add(Bytes::new(60));
        assert_eq!((worker.live(), state.peak()), (Bytes::new(60), Bytes::new(120)));
        // A batch of 60 bytes took 120, and so will others.
        for (bytes, largest) in [(60, 120), (40, 120), (90, 180)] {
            state.begin_batch(Bytes::ZERO);
            state.end_batch(Bytes::new(bytes));
            assert_eq!(state.largest_batch, Bytes::new(largest));
        }
    }

    #[test]
    fn a_guard_counts_from_where_it_finds_the_workers() {
        let mut state = State::new();
        let worker = state.worker(2);
        worker.add(Bytes::new(70));
        worker.remove(Bytes::new(40), false);
        assert_eq!(state.peak(), Bytes::new(70));
        state.enter();
        assert_eq!((state.peak(), worker.was_seen()), (Bytes::new(30), false));
        worker.add(Bytes::new(5));
        assert_eq!((state.peak(), worker.was_seen()), (Bytes::new(35), true));
        state.enter();
        assert_eq!(state.peak(), Bytes::new(35), "a second guard starts nothing anew");
    }
}
