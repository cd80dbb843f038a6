//! The state of the loader threads' gate: what each worker has prepared, who waits, and whether a
//! worker may go on.
//!
//! Pure: `loaders.rs` keeps one state per process behind a lock and passes the time in.

use std::collections::BTreeMap;
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
    /// The guards that live, and their limits.
    pub(crate) guards: BTreeMap<u64, Option<Bytes>>,
    next_guard: u64,
    /// The calls of [`LoaderGuard::waiting_for`](crate::LoaderGuard::waiting_for) in progress, and
    /// the time at which each has lasted too long.
    pub(crate) waits: BTreeMap<u64, Instant>,
    next_wait: u64,
    /// Whether the bytes that other threads take now belong to a batch.
    pub(crate) measures: bool,
    batch: Bytes,
    pub(crate) largest_batch: Bytes,
    /// The threads that wait for a change.
    pub(crate) sleepers: usize,
    pub(crate) workers: BTreeMap<u16, Worker>,
}

/// The host data that a worker has made.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    pub(crate) live: Bytes,
    pub(crate) peak: Bytes,
    /// Whether it has made any since the guard was taken.
    pub(crate) seen: bool,
    /// Whether it has ever computed something in order to read it.
    pub(crate) reads: bool,
}

impl State {
    pub(crate) const fn new() -> Self {
        Self {
            guards: BTreeMap::new(),
            next_guard: 0,
            waits: BTreeMap::new(),
            next_wait: 0,
            measures: false,
            batch: Bytes::ZERO,
            largest_batch: Bytes::ZERO,
            sleepers: 0,
            workers: BTreeMap::new(),
        }
    }

    pub(crate) fn enter(&mut self) -> u64 {
        if self.guards.is_empty() {
            for worker in self.workers.values_mut() {
                (worker.peak, worker.seen) = (worker.live, false);
            }
            (self.measures, self.largest_batch) = (false, Bytes::ZERO);
        }
        let number = self.next_guard;
        self.next_guard += 1;
        self.guards.insert(number, None);
        number
    }

    /// The limit in force. `None` unless exactly one guard lives and has a limit.
    pub(crate) fn limit(&self) -> Option<Bytes> {
        match self.guards.len() {
            1 => self.guards.values().copied().next().flatten(),
            _ => None,
        }
    }

    /// Starts a wait and returns its number.
    pub(crate) fn start_waiting(&mut self, too_long: Instant) -> u64 {
        let number = self.next_wait;
        self.next_wait += 1;
        self.waits.insert(number, too_long);
        number
    }

    pub(crate) fn begin_batch(&mut self) {
        (self.measures, self.batch) = (true, Bytes::ZERO);
    }

    pub(crate) fn end_batch(&mut self) {
        if std::mem::take(&mut self.measures) {
            self.largest_batch = self.largest_batch.max(self.batch);
        }
    }

    pub(crate) fn add(&mut self, worker: u16, bytes: Bytes) {
        let worker = self.workers.entry(worker).or_default();
        worker.seen = true;
        worker.live += bytes;
        worker.peak = worker.peak.max(worker.live);
    }

    pub(crate) fn remove(&mut self, worker: u16, bytes: Bytes, elsewhere: bool) {
        if elsewhere && self.measures {
            self.batch += bytes;
        }
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.live -= bytes;
        }
    }

    pub(crate) fn verdict(&self, worker: u16, now: Instant) -> Verdict {
        let live = self.workers.get(&worker).map_or(Bytes::ZERO, |worker| worker.live);
        if self.limit().is_none_or(|limit| live < limit.max(self.largest_batch)) {
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
        state.remove(0, Bytes::new(1), false);
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
        let first = state.start_waiting(start + PATIENCE);
        assert_eq!(state.verdict(0, start + PATIENCE / 2), Verdict::WaitFor(PATIENCE / 2));
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Pass);
        // The gate stays open when another thread starts to wait.
        let second = state.start_waiting(start + 2 * PATIENCE);
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Pass);
        state.waits.remove(&first);
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::WaitFor(PATIENCE));
        state.waits.remove(&second);
        assert_eq!(state.verdict(0, start + PATIENCE), Verdict::Wait);
    }

    #[test]
    fn a_limit_is_at_least_the_largest_batch() {
        let (mut state, now) = (limited(10), Instant::now());
        let batch = |state: &mut State, bytes| {
            state.begin_batch();
            [bytes, 5].into_iter().for_each(|bytes| state.add(0, Bytes::new(bytes)));
            [bytes, 5].into_iter().for_each(|bytes| state.remove(0, Bytes::new(bytes), true));
            state.end_batch();
        };
        batch(&mut state, 95);
        batch(&mut state, 20);
        assert_eq!(state.largest_batch, Bytes::new(100));
        state.add(0, Bytes::new(99));
        assert_eq!(state.verdict(0, now), Verdict::Pass, "it is not stopped in a batch");
        state.add(0, Bytes::new(1));
        assert_eq!(state.verdict(0, now), Verdict::Wait);
        // Data dropped with a loader, or by a loader thread, does not count as a batch.
        state.end_batch();
        state.remove(0, Bytes::new(60), true);
        state.begin_batch();
        state.remove(0, Bytes::new(40), false);
        state.end_batch();
        assert_eq!(state.largest_batch, Bytes::new(100));
    }

    #[test]
    fn a_guard_counts_from_where_it_finds_the_workers() {
        let mut state = State::new();
        state.add(2, Bytes::new(70));
        state.remove(2, Bytes::new(40), false);
        assert_eq!(state.workers[&2].peak, Bytes::new(70));
        state.enter();
        assert_eq!((state.workers[&2].peak, state.workers[&2].seen), (Bytes::new(30), false));
        state.add(2, Bytes::new(5));
        assert_eq!((state.workers[&2].peak, state.workers[&2].seen), (Bytes::new(35), true));
        state.enter();
        assert_eq!(state.workers[&2].peak, Bytes::new(35), "a second guard starts nothing anew");
    }
}
