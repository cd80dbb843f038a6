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
    /// A gap that a buffer of the same size has left. Another one only if there is no room behind the last buffer.
    ///
    /// How much is used follows from how many buffers of each size there are at once, in whatever order they come and go.
    Same,
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
///
/// let mut slots = Space::new(100, Fit::Same);
/// let (a, b, c) = (slots.take(30), slots.take(10), slots.take(20));
/// slots.give(0, 30);
/// assert_eq!((slots.take(20), slots.take(30)), (Some(60), Some(0)));
/// slots.give(0, 30);
/// slots.give(30, 10);
/// // There is no other room.
/// assert_eq!(slots.take(40), Some(0));
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
    used: u64,
}

impl Space {
    /// An empty page of `size` bytes; of [`u64::MAX`] bytes, to find out how many are needed.
    pub fn new(size: u64, fit: Fit) -> Self {
        let (gaps, by_size) = (BTreeMap::new(), BTreeSet::new());
        Self { size, fit, gaps, by_size, end: 0, high: 0, used: 0 }
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
        self.used == 0
    }

    /// The length of the gap that [`take`](Self::take) would use; `None` if it would use what is behind the last buffer, or nothing.
    pub fn gap_for(&self, size: u64) -> Option<u64> {
        self.find(size).map(|(_, length)| length)
    }

    /// The longest piece that is free.
    pub fn largest_gap(&self) -> u64 {
        let (mut longest, mut run) = (0, (0, 0));
        for (at, length) in &self.gaps {
            run = match run {
                (from, to) if to == *at => (from, at + length),
                _ => (*at, at + length),
            };
            longest = longest.max(run.1 - run.0);
        }
        let last = if run.1 == self.end { run.0 } else { self.end };
        longest.max(self.size - last)
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
            Fit::Same => {
                let (length, at) = self.by_size.range((size, 0)..).next()?;
                (*length == size).then_some((*at, *length))
            }
        }
    }

    /// Makes one gap of those that lie side by side.
    fn merge(&mut self) {
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (at, length) in std::mem::take(&mut self.gaps) {
            match merged.last_mut() {
                Some((from, long)) if *from + *long == at => *long += length,
                _ => merged.push((at, length)),
            }
        }
        if let Some((at, length)) = merged.last().copied()
            && at + length == self.end
        {
            self.end = at;
            merged.pop();
        }
        self.by_size = merged.iter().map(|(at, length)| (*length, *at)).collect();
        self.gaps = merged.into_iter().collect();
    }

    /// A place of `size` bytes, if there is one: where it begins.
    ///
    /// # Panics
    ///
    /// If `size` is zero.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        assert!(size > 0, "a buffer of no bytes has no place");
        let mut gap = self.find(size);
        if gap.is_none() && size > self.size - self.end && self.fit == Fit::Same {
            self.merge();
            let best = self.by_size.range((size, 0)..).next();
            gap = best.map(|(length, at)| (*at, *length));
        }
        if let Some((at, length)) = gap {
            self.remove(at, length);
            self.insert(at + size, length - size);
            self.used += size;
            return Some(at);
        }
        let at = self.end;
        if size > self.size - at {
            return None;
        }
        self.end = at + size;
        self.high = self.high.max(self.end);
        self.used += size;
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
            self.used += size;
            return true;
        }
        let before = self.gaps.range(..=at).next_back().map(|(from, length)| (*from, *length));
        match before {
            Some((from, length)) if from + length >= at + size => {
                self.remove(from, length);
                self.insert(from, at - from);
                self.insert(at + size, from + length - at - size);
                self.used += size;
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
        let merges = self.fit != Fit::Same;
        if let Some((before, length)) = self.gaps.range(..at).next_back().map(|(b, l)| (*b, *l)) {
            assert!(before + length <= at, "what is freed is not free");
            if before + length == at && merges {
                self.remove(before, length);
                from = before;
            }
        }
        if let Some((behind, length)) = self.gaps.range(at..).next().map(|(b, l)| (*b, *l)) {
            assert!(behind >= to, "what is freed is not free");
            if behind == to && merges {
                self.remove(behind, length);
                to = behind + length;
            }
        }
        self.used -= size;
        if self.used == 0 {
            self.gaps.clear();
            self.by_size.clear();
            self.end = 0;
        } else if to == self.end && merges {
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
