//! Sums a stream of numbers over all ranks, in buckets: while one is exchanged, the next is filled.

use std::collections::VecDeque;

use crate::error::RankError;
use crate::ranks::Ranks;

/// The numbers in a bucket: 4 MiB of them in 32 bit.
pub const BUCKET: usize = 1 << 20;

/// How many buckets are exchanged at a time.
const UNDERWAY: usize = 2;

/// The most host memory that [`Summing`] takes for `total` bytes of numbers in 32 bit that come in
/// pieces of at most `largest` bytes, with the piece itself on its way in and on its way out.
pub fn exchange_bytes(total: u64, largest: u64) -> u64 {
    let bucket = (BUCKET * size_of::<f32>()) as u64;
    // One is filled, those underway have what is sent and what is received, one has arrived, and of
    // one before it not all was taken. A single one is first sent and received, and has arrived
    // then; room for it grows by doubling.
    let buckets = match total.div_ceil(bucket) {
        0 => 0,
        1 => 3,
        2 => 1 + 2 * UNDERWAY as u64,
        _ => 3 + 2 * UNDERWAY as u64,
    };
    // A piece that comes, one that arrives in parts, and one that goes.
    bucket.min(total) * buckets + 3 * largest
}

/// A sum over all ranks, of numbers that come and go in pieces. Each rank gives equally many, in
/// the same order.
///
/// ```
/// use firebox_ranks::{Ranks, Summing};
///
/// let ranks = Ranks::alone();
/// let mut summing = Summing::of(&ranks);
/// summing.give(&[1.0, 2.0])?;
/// summing.give(&[3.0])?;
/// summing.flush()?;
/// assert_eq!(summing.take(2), Some(vec![1.0, 2.0]));
/// assert_eq!(summing.take(2), None);
/// assert_eq!(summing.take(1), Some(vec![3.0]));
/// # Ok::<(), firebox_ranks::RankError>(())
/// ```
#[derive(Debug)]
pub struct Summing<'a> {
    /// None in a rehearsal, in which numbers are only counted.
    ranks: Option<&'a Ranks>,
    filled: Vec<f32>,
    /// How many numbers are in the bucket that is filled, in those underway, and have arrived.
    filling: usize,
    underway: VecDeque<usize>,
    waiting: usize,
    /// The buckets that have arrived, and how many numbers of the first were taken.
    arrived: VecDeque<Vec<f32>>,
    taken: usize,
    fold: u64,
    is_finite: bool,
}

impl<'a> Summing<'a> {
    /// A sum over these ranks.
    pub fn of(ranks: &'a Ranks) -> Self {
        Self { ranks: Some(ranks), ..Self::rehearsing() }
    }

    /// A sum that only counts: pieces arrive at the same points as in a real one, without numbers.
    pub fn rehearsing() -> Self {
        Self {
            ranks: None,
            filled: Vec::new(),
            filling: 0,
            underway: VecDeque::new(),
            waiting: 0,
            arrived: VecDeque::new(),
            taken: 0,
            fold: 0,
            is_finite: true,
        }
    }

    /// Adds the next numbers of this rank. May wait for earlier ones.
    ///
    /// # Errors
    ///
    /// If a sum does not end in time.
    pub fn give(&mut self, numbers: &[f32]) -> Result<(), RankError> {
        let mut rest = numbers;
        self.count(numbers.len(), |filled, count| {
            let (now, later) = rest.split_at(count);
            filled.extend_from_slice(now);
            rest = later;
        })
    }

    /// In a rehearsal: as if `count` numbers were given.
    pub fn rehearse(&mut self, count: usize) {
        debug_assert!(self.ranks.is_none(), "a real sum needs numbers");
        // Nobody is waited for, so nothing can fail.
        let _ = self.count(count, |_, _| {});
    }

    fn count(
        &mut self,
        mut count: usize,
        mut fill: impl FnMut(&mut Vec<f32>, usize),
    ) -> Result<(), RankError> {
        while count > 0 {
            let now = count.min(BUCKET - self.filling);
            if self.ranks.is_some() {
                let is_first = self.underway.is_empty();
                let needed = (self.filling + now).next_power_of_two();
                let room = if is_first { needed.min(BUCKET) } else { BUCKET };
                self.filled.reserve_exact(room - self.filling);
            }
            fill(&mut self.filled, now);
            self.filling += now;
            count -= now;
            if self.filling == BUCKET {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Sends what is in the last bucket, and waits for all sums.
    ///
    /// # Errors
    ///
    /// If a sum does not end in time.
    pub fn flush(&mut self) -> Result<(), RankError> {
        if self.filling > 0 {
            self.send()?;
        }
        while !self.underway.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// The next `count` sums, if they have arrived. In a rehearsal there are no numbers in it.
    pub fn take(&mut self, count: usize) -> Option<Vec<f32>> {
        let arrived = count <= self.waiting;
        arrived.then(|| {
            self.waiting -= count;
            if self.ranks.is_none() {
                return Vec::new();
            }
            let mut sums = Vec::with_capacity(count);
            while sums.len() < count
                && let Some(first) = self.arrived.front()
            {
                let now = (count - sums.len()).min(first.len() - self.taken);
                sums.extend_from_slice(&first[self.taken..self.taken + now]);
                self.taken += now;
                if self.taken == first.len() {
                    self.arrived.pop_front();
                    self.taken = 0;
                }
            }
            sums
        })
    }

    /// Whether all sums so far are finite.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }

    /// A number made of the bits of all sums so far. Ranks that have the same sums have the same.
    pub fn fold(&self) -> u64 {
        self.fold
    }

    fn send(&mut self) -> Result<(), RankError> {
        if self.underway.len() == UNDERWAY {
            self.receive()?;
        }
        if let Some(ranks) = self.ranks {
            ranks.begin_sum(std::mem::take(&mut self.filled))?;
        }
        self.underway.push_back(std::mem::take(&mut self.filling));
        Ok(())
    }

    fn receive(&mut self) -> Result<(), RankError> {
        self.waiting += self.underway.pop_front().unwrap_or_default();
        let Some(ranks) = self.ranks else { return Ok(()) };
        let sums = ranks.end_sum()?;
        // Without a way out, so that the compiler can take several numbers at a time.
        self.is_finite &= !sums.iter().fold(false, |found, sum| found | !sum.is_finite());
        let bits = sums.iter().map(|sum| u64::from(sum.to_bits()));
        self.fold = self.fold.rotate_left(1) ^ bits.fold(0, u64::wrapping_add);
        self.arrived.push_back(sums);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_in_order_whatever_the_pieces() {
        let ranks = Ranks::alone();
        let numbers: Vec<f32> = (0..(3 * BUCKET + 5)).map(|number| number as f32).collect();
        let mut summing = Summing::of(&ranks);
        let mut taken = Vec::new();
        let mut rest = numbers.as_slice();
        let mut size = 1;
        let mut rehearsed = Summing::rehearsing();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(size.min(rest.len()));
            summing.give(now).expect("there is nobody to wait for");
            rehearsed.rehearse(now.len());
            rest = later;
            size = size * 3 + 1;
            let sums = summing.take(BUCKET / 3);
            assert_eq!(rehearsed.take(BUCKET / 3).is_some(), sums.is_some());
            taken.extend(sums.into_iter().flatten());
        }
        summing.flush().expect("there is nobody to wait for");
        taken.extend(summing.take(numbers.len() - taken.len()).expect("all have arrived"));
        assert_eq!(taken, numbers);
        assert!(summing.is_finite() && summing.take(1).is_none());
    }

    #[test]
    fn a_number_that_is_not_finite_shows() {
        let ranks = Ranks::alone();
        let mut summing = Summing::of(&ranks);
        summing.give(&[1.0, f32::NAN]).and_then(|()| summing.flush()).expect("nobody waits");
        assert!(!summing.is_finite());
    }
}
