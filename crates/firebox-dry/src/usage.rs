//! What a dry device measured.

use std::collections::{BTreeMap, BTreeSet};

use firebox_trace::Bytes;

/// The memory of a dry device, since it was last empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes of all pages that are open. What counts against the memory of a card.
    pub reserved: Bytes,
    /// The most that [`reserved`](Self::reserved) ever was.
    pub peak: Bytes,
    /// The bytes of the buffers that are alive, without what their alignment adds.
    pub in_use: Bytes,
    /// The buffers that are alive.
    pub allocations: u64,
    /// The most bytes of buffers that were alive at once, as far as was looked: at each new page, and at every sixteenth
    /// request. The rest of the peak is free even then, but in pieces that are too small or in pools of other sizes.
    pub most_in_use: Bytes,
    /// The pages at the peak: how many of each size.
    pub pages: BTreeMap<Bytes, usize>,
    /// The page sizes of small pools that were full at some request: one more buffer of the size just asked for would have
    /// opened another page of that size. Only replays of [`Dry`](crate::Dry) look for it, so that it is empty behind
    /// [`Lease::run`](crate::Lease::run).
    pub full: BTreeSet<Bytes>,
    /// The largest buffer.
    pub largest: Bytes,
    /// How many times the tuner has measured a kernel, because it was not chosen yet.
    pub tuned: u64,
    /// The first buffer that the device can never hold, if there was one. Nothing after it is worth much: the real
    /// device stops there.
    pub refused: Option<Refusal>,
}

/// A buffer that is larger than the largest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a buffer of {size} is larger than any the device can hold ({limit}); run fewer items at once"
)]
pub struct Refusal {
    /// What was asked for.
    pub size: Bytes,
    /// The largest page: a quarter of the card on CUDA, the largest binding on wgpu.
    pub limit: Bytes,
}

impl Usage {
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        self.largest = self.largest.max(refusal.size);
        self.refused.get_or_insert(refusal);
    }

    /// The share of the peak that no buffer uses, between 0 and 1.
    ///
    /// ```
    /// use firebox_dry::Usage;
    /// use firebox_trace::Bytes;
    /// let usage = Usage { peak: Bytes::mib(40), most_in_use: Bytes::mib(30), ..Usage::default() };
    /// assert_eq!(usage.fragmentation(), 0.25);
    /// assert_eq!(Usage::default().fragmentation(), 0.0);
    /// ```
    pub fn fragmentation(&self) -> f64 {
        if self.peak == Bytes::ZERO {
            return 0.0;
        }
        (self.peak - self.most_in_use).get() as f64 / self.peak.get() as f64
    }
}
