//! Estimates how much longer a batch takes in parts, from the time that a few of its items took.
//! The check warns if it is much.

use std::time::Duration;

/// The shortest times of steps, by number of items.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace(Vec<(usize, Duration)>);

impl Pace {
    /// Notes that a step on `items` items took `took`.
    pub(super) fn add(&mut self, items: usize, took: Duration) {
        match self.0.iter_mut().find(|(of, _)| *of == items) {
            Some((_, least)) => *least = (*least).min(took),
            None => self.0.push((items, took)),
        }
    }

    /// The time of a batch of `items` items in parts of `part` items, divided by the time of the
    /// whole batch. Assumes that a step takes a fixed time plus a time per item. `None` if only
    /// steps of one size were seen.
    pub(crate) fn slowdown(&self, items: usize, part: usize) -> Option<f64> {
        let (few, of_few) = self.0.iter().min()?;
        let (many, of_many) = self.0.iter().max()?;
        if few == many {
            return None;
        }
        let (of_few, of_many) = (of_few.as_secs_f64(), of_many.as_secs_f64());
        let of_item = ((of_many - of_few) / (many - few) as f64).max(0.0);
        let of_step = (of_few - of_item * *few as f64).max(0.0);
        let whole = of_step + of_item * items as f64;
        let parts = of_step * items.div_ceil(part) as f64 + of_item * items as f64;
        Some(parts / whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_time_of_a_step_makes_small_parts_slow() {
        let mut pace = Pace::default();
        assert_eq!(pace.slowdown(256, 1), None);
        // A millisecond per step plus a tenth of one per item. The first run is slow.
        for (items, micros) in [(3, 9_000), (3, 1_300), (1, 1_100), (12, 2_200)] {
            pace.add(items, Duration::from_micros(micros));
        }
        let slowdown = |items, part| pace.slowdown(items, part).expect("two sizes were seen");
        assert!((slowdown(90, 90) - 1.0).abs() < 1e-9);
        assert!((slowdown(90, 1) - 9.9).abs() < 1e-9);
        assert!((slowdown(90, 45) - 1.1).abs() < 1e-9);
    }

    #[test]
    fn items_that_take_no_time_are_none_the_slower() {
        let mut pace = Pace::default();
        pace.add(1, Duration::from_micros(50));
        assert_eq!(pace.slowdown(8, 4), None);
        pace.add(4, Duration::from_micros(40));
        assert!((pace.slowdown(8, 4).expect("two sizes were seen") - 2.0).abs() < 1e-9);
    }
}
