//! Places buffers on one page and tracks the gaps between them. `pool.rs` keeps one space per page.

use std::collections::{BTreeMap, BTreeSet};

/// How a place is chosen among the gaps that are large enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// The smallest gap; the lowest one if several are equal. The default.
    #[default]
    Best,
    /// A gap left by a buffer of the same size. Other gaps are used only if there is no room after
    /// the last buffer.
    ///
    /// How much of the page is used depends only on how many buffers of each size exist at once,
    /// not on the order in which they come and go.
    Same,
    /// Buffers of at least `from` bytes take the smallest gap and fill the page from its start.
    /// Smaller buffers take the end of the highest gap and fill the page from its end. The space
    /// after the last buffer is a gap like the others.
    ///
    /// Small buffers therefore do not split the gaps that large ones leave. [`pack`](crate::pack)
    /// finds the value of `from` and the page size that go together.
    TwoEnded {
        /// The size in bytes from which a buffer counts as large.
        from: u64,
    },
}

/// The places on one page.
///
/// Except with [`Fit::TwoEnded`], the space after the last buffer is used only if no gap between
/// buffers is large enough. A page of [`high`](Self::high) bytes therefore gives every buffer the
/// same place as a larger page does.
///
/// ```
/// use firebox_pool::{Fit, Space};
///
/// let mut space = Space::new(100, Fit::Best);
/// let (a, b, c) = (space.take(30), space.take(10), space.take(20));
/// assert_eq!((a, b, c), (Some(0), Some(30), Some(40)));
/// space.give(0, 30);
/// // The first gap is large enough.
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
/// // No other room is left: the two gaps are merged.
/// assert_eq!(slots.take(40), Some(0));
///
/// let mut page = Space::new(100, Fit::TwoEnded { from: 20 });
/// assert_eq!((page.take(30), page.take(10), page.take(20)), (Some(0), Some(90), Some(30)));
/// ```
#[derive(Clone, Debug)]
pub struct Space {
    size: u64,
    fit: Fit,
    /// The gaps between buffers: start to length.
    gaps: BTreeMap<u64, u64>,
    /// The same gaps, as (length, start).
    by_size: BTreeSet<(u64, u64)>,
    /// Where the last buffer ends.
    end: u64,
    high: u64,
    used: u64,
}

impl Space {
    /// An empty page of `size` bytes. Use [`u64::MAX`] to measure how many bytes are needed.
    pub fn new(size: u64, fit: Fit) -> Self {
        let (gaps, by_size) = (BTreeMap::new(), BTreeSet::new());
        Self { size, fit, gaps, by_size, end: 0, high: 0, used: 0 }
    }

    /// Chooses later places by `fit`.
    ///
    /// # Panics
    ///
    /// If one of both is [`Fit::Same`] and the page is not empty: it keeps gaps in another way.
    pub fn set_fit(&mut self, fit: Fit) {
        let is_same = (self.fit == Fit::Same) == (fit == Fit::Same);
        assert!(is_same || self.is_empty(), "`Fit::Same` keeps gaps in another way");
        self.fit = fit;
    }

    /// How places are chosen.
    pub fn fit(&self) -> Fit {
        self.fit
    }

    /// The size of the page in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The high-water mark: the farthest end any buffer has had, in bytes.
    pub fn high(&self) -> u64 {
        self.high
    }

    /// Resets the high-water mark to the end of the last buffer present.
    pub fn forget_high(&mut self) {
        self.high = self.end;
    }

    /// Whether the page holds no buffer.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// The length of the gap [`take`](Self::take) would use. `None` if it would use the space after
    /// the last buffer, or finds no place.
    pub fn gap_for(&self, size: u64) -> Option<u64> {
        self.find(size).map(|(_, length)| length)
    }

    /// The length of the longest free piece. Adjacent gaps count as one piece.
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

    /// The smallest gap of at least `size` bytes: its start and length.
    fn smallest(&self, size: u64) -> Option<(u64, u64)> {
        self.by_size.range((size, 0)..).next().map(|(length, at)| (*at, *length))
    }

    /// The gap for a buffer of `size` bytes: its start and length.
    fn find(&self, size: u64) -> Option<(u64, u64)> {
        match self.fit {
            Fit::TwoEnded { from } => {
                let tail = (self.end, self.size - self.end);
                let tail = Some(tail).filter(|(_, length)| *length >= size);
                if size < from {
                    let gaps = self.gaps.iter().rev().map(|(at, length)| (*at, *length));
                    return tail.or_else(|| gaps.into_iter().find(|(_, length)| *length >= size));
                }
                let best = self.smallest(size).into_iter();
                best.chain(tail).min_by_key(|(at, length)| (*length, *at))
            }
            Fit::Best => self.smallest(size),
            Fit::Same => self.smallest(size).filter(|(_, length)| *length == size),
        }
    }

    /// Merges adjacent gaps.
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

    /// Takes a place of `size` bytes and returns its offset. `None` if there is no room.
    ///
    /// # Panics
    ///
    /// If `size` is zero.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        assert!(size > 0, "a buffer of no bytes has no place");
        if let Fit::TwoEnded { from } = self.fit {
            let (at, length) = self.find(size)?;
            let at = if size < from { at + length - size } else { at };
            let is_free = self.take_at(at, size);
            debug_assert!(is_free, "a gap is free");
            return Some(at);
        }
        let mut gap = self.find(size);
        if gap.is_none() && size > self.size - self.end && self.fit == Fit::Same {
            self.merge();
            gap = self.smallest(size);
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

    /// Takes the place of `size` bytes at offset `at`. Returns whether it was free.
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

    /// Frees the place of `size` bytes at offset `at`.
    ///
    /// # Panics
    ///
    /// If the place ends after the last buffer, or is detected to overlap a gap.
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
