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
    /// The guards that live.
    pub(crate) guards: BTreeMap<u64, Guarded>,
    next_guard: u64,
    /// The calls of [`LoaderGuard::waiting_for`](crate::LoaderGuard::waiting_for) in progress, and
    /// the time at which each has lasted too long.
    pub(crate) waits: BTreeMap<u64, Instant>,
    next_wait: u64,
    /// Whether the bytes that other threads take now belong to a batch.
    pub(crate) measures: bool,
    batch: Bytes,
    pub(crate) largest_batch: Bytes,
    /// The most that a worker had made when the first batch arrived.
    first_peak: Bytes,
    /// What a worker takes while it makes a batch, in sizes of the batch.
    making: f64,
    /// The threads that wait for a change.
    pub(crate) sleepers: usize,
    pub(crate) workers: BTreeMap<u16, Worker>,
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
    pub(crate) live: Bytes,
    /// If workers compute: what this one has dropped since it last made something. A call takes its
    /// result and what it is made of at the same time.
    dropped: Bytes,
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
            first_peak: Bytes::ZERO,
            making: 1.0,
            sleepers: 0,
            workers: BTreeMap::new(),
        }
    }

    pub(crate) fn enter(&mut self) -> u64 {
        if self.guards.is_empty() {
            for worker in self.workers.values_mut() {
                (worker.peak, worker.seen, worker.dropped) = (worker.live, false, Bytes::ZERO);
            }
            (self.measures, self.largest_batch, self.making) = (false, Bytes::ZERO, 1.0);
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

    /// Starts a wait and returns its number.
    pub(crate) fn start_waiting(&mut self, too_long: Instant) -> u64 {
        let number = self.next_wait;
        self.next_wait += 1;
        self.waits.insert(number, too_long);
        number
    }

    pub(crate) fn begin_batch(&mut self) {
        (self.measures, self.batch) = (true, Bytes::ZERO);
        if self.largest_batch == Bytes::ZERO {
            self.first_peak = self.peak();
        }
    }

    pub(crate) fn end_batch(&mut self) {
        if !std::mem::take(&mut self.measures) || self.batch == Bytes::ZERO {
            return;
        }
        // Making a batch takes more than is left of it, for example the parts that were joined.
        if self.computes() && self.largest_batch == Bytes::ZERO {
            self.making = self.first_peak.ratio(self.batch).max(1.0);
        }
        self.largest_batch = self.largest_batch.max(self.batch.scale(self.making));
    }

    /// The most that one worker has made and nobody has needed.
    pub(crate) fn peak(&self) -> Bytes {
        self.workers.values().map(|worker| worker.peak).max().unwrap_or_default()
    }

    pub(crate) fn add(&mut self, worker: u16, bytes: Bytes) {
        let worker = self.workers.entry(worker).or_default();
        worker.seen = true;
        worker.live += bytes;
        worker.peak = worker.peak.max(worker.live + std::mem::take(&mut worker.dropped));
    }

    /// Counts no longer what was added. `elsewhere`: another thread needed or dropped it.
    pub(crate) fn remove(&mut self, worker: u16, bytes: Bytes, elsewhere: bool) {
        if elsewhere && self.measures {
            self.batch += bytes;
        }
        let computes = self.computes();
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.live -= bytes;
            if computes && !elsewhere {
                worker.dropped += bytes;
            }
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
        state.guards.entry(guard).or_default().limit = Some(Bytes::new(limit));
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
        state.guards.entry(first).or_default().limit = Some(Bytes::ZERO);
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
    fn what_a_call_drops_counts_beside_what_it_makes() {
        let mut state = limited(100);
        state.guards.values_mut().for_each(|guard| guard.computes = true);
        // Two parts are joined, and the parts are dropped.
        let parts = [Bytes::new(30), Bytes::new(30)];
        parts.iter().for_each(|part| state.add(0, *part));
        parts.iter().for_each(|part| state.remove(0, *part, false));
        assert_eq!(state.workers[&0].live, Bytes::ZERO);
        state.add(0, Bytes::new(60));
        assert_eq!((state.workers[&0].live, state.peak()), (Bytes::new(60), Bytes::new(120)));
        // A batch of 60 bytes took 120, and so will others.
        for (bytes, largest) in [(60, 120), (40, 120), (90, 180)] {
            state.begin_batch();
            state.remove(0, Bytes::new(60), true);
            state.add(0, Bytes::new(60));
            state.batch = Bytes::new(bytes);
            state.end_batch();
            assert_eq!(state.largest_batch, Bytes::new(largest));
        }
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
