//! The places on one page: where a buffer goes, and what is free between buffers.

use std::collections::{BTreeMap, BTreeSet};

/// How a place is chosen among the gaps that are large enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// The smallest gap, and the lowest of several.
    #[default]
    Best,
    /// The lowest gap.
    First,
    /// The largest gap, and the lowest of several.
    Worst,
}

/// The places on one page.
///
/// What is behind the last buffer is used only if no gap between buffers is large enough, so that a page of the size that was ever
/// [used](Self::high) gives every buffer the same place as a larger one does.
///
/// ```
/// use firebox_pool::{Fit, Space};
///
/// let mut space = Space::new(100, Fit::Best);
/// let (a, b, c) = (space.take(30), space.take(10), space.take(20));
/// assert_eq!((a, b, c), (Some(0), Some(30), Some(40)));
/// space.give(0, 30);
/// // The gap in front is large enough.
/// assert_eq!(space.take(30), Some(0));
/// assert_eq!(space.take(50), None);
/// assert_eq!(space.high(), 60);
/// ```
#[derive(Clone, Debug)]
pub struct Space {
    size: u64,
    fit: Fit,
    /// The gaps between buffers, by where they begin: how long they are.
    gaps: BTreeMap<u64, u64>,
    /// The same by length.
    by_size: BTreeSet<(u64, u64)>,
    /// Where the last buffer ends.
    end: u64,
    high: u64,
}

impl Space {
    /// An empty page of `size` bytes; of [`u64::MAX`] bytes, to find out how many are needed.
    pub fn new(size: u64, fit: Fit) -> Self {
        let (gaps, by_size) = (BTreeMap::new(), BTreeSet::new());
        Self { size, fit, gaps, by_size, end: 0, high: 0 }
    }

    /// The bytes of the page.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where the last buffer has ever ended.
    pub fn high(&self) -> u64 {
        self.high
    }

    /// Forgets where buffers have ended that are gone.
    pub fn forget_high(&mut self) {
        self.high = self.end;
    }

    /// Whether no buffer lies on it.
    pub fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// The length of the gap that [`take`](Self::take) would use; `None` if it would use what is behind the last buffer, or nothing.
    pub fn gap_for(&self, size: u64) -> Option<u64> {
        self.find(size).map(|(_, length)| length)
    }

    /// The longest piece that is free.
    pub fn largest_gap(&self) -> u64 {
        let between = self.by_size.last().map_or(0, |(length, _)| *length);
        between.max(self.size - self.end)
    }

    fn find(&self, size: u64) -> Option<(u64, u64)> {
        match self.fit {
            Fit::Best => {
                let (length, at) = self.by_size.range((size, 0)..).next()?;
                Some((*at, *length))
            }
            Fit::First => {
                let (at, length) = self.gaps.iter().find(|(_, length)| **length >= size)?;
                Some((*at, *length))
            }
            Fit::Worst => {
                let (longest, _) = self.by_size.last()?;
                let (length, at) = self.by_size.range((*longest, 0)..).next()?;
                (*length >= size).then_some((*at, *length))
            }
        }
    }

    /// A place of `size` bytes, if there is one: where it begins.
    ///
    /// # Panics
    ///
    /// If `size` is zero.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        assert!(size > 0, "a buffer of no bytes has no place");
        if let Some((at, length)) = self.find(size) {
            self.remove(at, length);
            self.insert(at + size, length - size);
            return Some(at);
        }
        let at = self.end;
        if size > self.size - at {
            return None;
        }
        self.end = at + size;
        self.high = self.high.max(self.end);
        Some(at)
    }

    /// Takes the place of `size` bytes at `at`, if it is free.
    pub fn take_at(&mut self, at: u64, size: u64) -> bool {
        if at >= self.end {
            if size > self.size.saturating_sub(at) {
                return false;
            }
            self.insert(self.end, at - self.end);
            self.end = at + size;
            self.high = self.high.max(self.end);
            return true;
        }
        let before = self.gaps.range(..=at).next_back().map(|(from, length)| (*from, *length));
        match before {
            Some((from, length)) if from + length >= at + size => {
                self.remove(from, length);
                self.insert(from, at - from);
                self.insert(at + size, from + length - at - size);
                true
            }
            _ => false,
        }
    }

    /// Frees a place.
    ///
    /// # Panics
    ///
    /// If a part of it is free already, as far as is noticed.
    pub fn give(&mut self, at: u64, size: u64) {
        let (mut from, mut to) = (at, at + size);
        assert!(to <= self.end, "what is freed lies on the page");
        if let Some((before, length)) = self.gaps.range(..at).next_back().map(|(b, l)| (*b, *l)) {
            assert!(before + length <= at, "what is freed is not free");
            if before + length == at {
                self.remove(before, length);
                from = before;
            }
        }
        if let Some((behind, length)) = self.gaps.range(at..).next().map(|(b, l)| (*b, *l)) {
            assert!(behind >= to, "what is freed is not free");
            if behind == to {
                self.remove(behind, length);
                to = behind + length;
            }
        }
        if to == self.end {
            self.end = from;
        } else {
            self.insert(from, to - from);
        }
    }

    fn insert(&mut self, at: u64, length: u64) {
        if length > 0 {
            self.gaps.insert(at, length);
            self.by_size.insert((length, at));
        }
    }

    fn remove(&mut self, at: u64, length: u64) {
        self.gaps.remove(&at);
        self.by_size.remove(&(length, at));
    }
}
