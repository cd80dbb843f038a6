//! Times several subjects against each other on a machine that also does other work.
//!
//! In every round each subject runs once, in random order, so that the other work affects all of
//! them alike. Ratios are taken within a round, and the median over the rounds counts.

use std::time::{Duration, Instant};

/// A function that is timed. It returns the time that counts.
pub type Subject<'a> = &'a mut dyn FnMut() -> Duration;

/// Seconds that each subject took in each round.
pub struct Rounds {
    /// By subject, then by round.
    seconds: Vec<Vec<f64>>,
}

/// The median and the quartiles around it.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

/// Runs all subjects once in each of `rounds` rounds, after one round that does not count.
pub fn measure(rounds: usize, subjects: &mut [Subject<'_>]) -> Rounds {
    let mut seconds = vec![Vec::with_capacity(rounds); subjects.len()];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..=rounds {
        for subject in random.order(subjects.len()) {
            let time = subjects[subject]();
            if round > 0 {
                seconds[subject].push(time.as_secs_f64());
            }
        }
    }
    Rounds { seconds }
}

/// Runs `f` and returns its result and duration.
pub fn time<R>(f: impl FnOnce() -> R) -> (R, Duration) {
    let start = Instant::now();
    let result = f();
    (result, start.elapsed())
}

impl Rounds {
    /// Seconds of a subject.
    pub fn seconds(&self, subject: usize) -> Spread {
        Spread::of(self.seconds[subject].clone())
    }

    /// Ratio of `subject` to `baseline` within each round.
    pub fn ratio(&self, subject: usize, baseline: usize) -> Spread {
        let pairs = self.seconds[subject].iter().zip(&self.seconds[baseline]);
        Spread::of(pairs.map(|(subject, baseline)| subject / baseline).collect())
    }
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let position = share * (values.len() - 1) as f64;
            let (below, above) =
                (values[position.floor() as usize], values[position.ceil() as usize]);
            below + (above - below) * position.fract()
        };
        Self { low: at(0.25), median: at(0.5), high: at(0.75) }
    }
}

/// A linear congruential generator with the constants of Knuth's MMIX.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }

    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}
