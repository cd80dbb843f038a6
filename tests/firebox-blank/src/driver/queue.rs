//! Streams, events and the simulated duration of kernels. Decides when work and frees complete.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use crate::settings::{Completions, KernelTimes};

/// The shortest kernel. The longest takes 2^[`DOUBLINGS`] times as long.
const SHORTEST: Duration = Duration::from_micros(20);
const DOUBLINGS: f64 = 6.0;
/// Upper bound on the host time between launches. The kernels after a synchronization complete this
/// long after it, plus their own duration. What the tuner measures between two synchronizations
/// therefore does not depend on the host.
const HOST: Duration = Duration::from_millis(1);
/// The most a stream may lag behind. Only which of two kernels is faster matters, not how long
/// training takes.
const FURTHEST_BEHIND: Duration = Duration::from_millis(8);

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// When it was last synchronized, and the total duration of the kernels launched since.
    synchronized: Instant,
    work: Duration,
    /// When the events it waits for happen.
    waits_until: Instant,
}

impl Stream {
    /// When all work launched so far is done.
    fn done(&self) -> Instant {
        let worked =
            self.synchronized + if self.work.is_zero() { self.work } else { HOST + self.work };
        worked.max(self.waits_until)
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    /// The stream on which it was last recorded.
    pub(crate) stream: Option<u64>,
    /// When it happens. `None` until it is recorded.
    pub(crate) at: Option<Instant>,
}

/// All streams and events.
#[derive(Debug)]
pub(crate) struct Queues {
    completions: Completions,
    times: KernelTimes,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
}

impl Queues {
    pub(crate) fn new(completions: Completions, times: KernelTimes) -> Self {
        Self { completions, times, streams: HashMap::new(), events: HashMap::new() }
    }

    /// When the work now on a stream will be done.
    pub(crate) fn done(&self, stream: u64) -> Instant {
        let now = Instant::now();
        let busy = self.streams.get(&stream).map_or(now, |stream| stream.done().max(now));
        match self.completions {
            Completions::Prompt => busy,
            Completions::Late { microseconds } => busy + Duration::from_micros(microseconds),
        }
    }

    /// When a free ordered on `stream` takes effect. `None`: at once.
    pub(crate) fn freed(&self, stream: u64) -> Option<(Instant, u64)> {
        match self.completions {
            Completions::Prompt => None,
            Completions::Late { .. } => Some((self.done(stream), stream)),
        }
    }

    /// Adds a stream.
    pub(crate) fn add_stream(&mut self, stream: u64, device: usize) {
        let now = Instant::now();
        let new = Stream { device, synchronized: now, work: Duration::ZERO, waits_until: now };
        self.streams.insert(stream, new);
    }

    /// Launches a kernel on a stream.
    pub(crate) fn launch(&mut self, stream: u64, kernel: impl Hash) {
        let time = self.time(kernel);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.work = (stream.work + time).min(FURTHEST_BEHIND);
        }
    }

    /// Records that a stream was synchronized.
    pub(crate) fn synchronized(&mut self, stream: u64) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            (stream.synchronized, stream.work) = (Instant::now(), Duration::ZERO);
        }
    }

    /// Makes a stream wait for an event.
    pub(crate) fn wait(&mut self, stream: u64, event: Option<Instant>) {
        if let (Some(stream), Some(at)) = (self.streams.get_mut(&stream), event) {
            stream.waits_until = stream.waits_until.max(at);
        }
    }

    fn time(&self, kernel: impl Hash) -> Duration {
        let seed = match self.times {
            KernelTimes::None => return Duration::ZERO,
            KernelTimes::Steady => 0,
            KernelTimes::Shuffled { seed } => seed + 1,
        };
        let mut hasher = DefaultHasher::new();
        (seed, kernel).hash(&mut hasher);
        // Maps the upper 53 bits to a number from 0 to 1.
        let share = (hasher.finish() >> 11) as f64 / (1u64 << 53) as f64;
        SHORTEST.mul_f64((share * DOUBLINGS).exp2())
    }
}

/// Waits until `until`. Spins through the last moment, because the tuner compares kernels by this
/// time.
pub(crate) fn wait_until(until: Instant) {
    const AWAKE: Duration = Duration::from_micros(150);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        match left.checked_sub(AWAKE) {
            Some(asleep) if !asleep.is_zero() => std::thread::sleep(asleep),
            _ => std::hint::spin_loop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_always_takes_as_long_and_another_seed_changes_which_is_faster() {
        let queues = |times| Queues::new(Completions::Prompt, times);
        let kernels = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)];
        let times = |times| kernels.map(|kernel| queues(times).time(kernel));
        let steady = times(KernelTimes::Steady);
        assert_eq!(steady, times(KernelTimes::Steady));
        assert!(steady.iter().all(|time| (SHORTEST..=SHORTEST * 64).contains(time)), "{steady:?}");
        let order = |times: [Duration; 5]| {
            let mut order = [0, 1, 2, 3, 4];
            order.sort_by_key(|at| times[*at]);
            order
        };
        let orders: std::collections::HashSet<_> =
            (0..20).map(|seed| order(times(KernelTimes::Shuffled { seed }))).collect();
        assert!(orders.len() > 5, "{orders:?}");
        assert_eq!(times(KernelTimes::None), [Duration::ZERO; 5]);
    }

    #[test]
    fn a_stream_is_busy_until_its_kernels_and_what_it_waits_for_are_done() {
        let mut queues = Queues::new(Completions::Prompt, KernelTimes::Steady);
        queues.add_stream(1, 0);
        queues.add_stream(2, 0);
        let before = Instant::now();
        queues.launch(1, "kernel");
        let done = queues.done(1);
        assert!(done >= before + HOST + SHORTEST);
        queues.synchronized(1);
        assert!(queues.done(1) < Instant::now() + HOST);
        queues.wait(2, Some(done));
        assert!(queues.done(2) >= done);
        assert_eq!(queues.freed(1), None);
        let late = Queues::new(Completions::Late { microseconds: 700 }, KernelTimes::None);
        assert!(late.done(1) >= before + Duration::from_micros(700));
        assert!(late.freed(1).is_some());
    }
}
