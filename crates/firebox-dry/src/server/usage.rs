//! What a dry device measured. `server.rs` counts it; `replay/` turns it into a footprint.

use std::collections::BTreeMap;

use firebox_trace::Bytes;

/// The memory of a dry device since it was last empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes of all open pages. This counts against the memory of a card.
    pub reserved: Bytes,
    /// The maximum of [`reserved`](Self::reserved).
    pub peak: Bytes,
    /// The bytes of the live buffers, without alignment padding.
    pub in_use: Bytes,
    /// The number of live buffers.
    pub allocations: u64,
    /// The maximum bytes of live buffers, measured at each new page and at every sixteenth request.
    /// The rest of the peak is free even then, but in pieces that are too small or in pools of
    /// other sizes.
    pub most_in_use: Bytes,
    /// The number of pages of each size at the peak.
    pub pages: BTreeMap<Bytes, usize>,
    /// The largest buffer.
    pub largest: Bytes,
    /// How many times the tuner measured a kernel because none was chosen yet.
    pub tuned: u64,
    /// The first buffer that the device can never hold, if there was one. What was measured after
    /// it means little: the real device stops there.
    pub refused: Option<Refusal>,
}

/// A buffer that is larger than the largest page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a buffer of {size} is larger than any the device can hold ({limit}); run fewer items at once"
)]
pub struct Refusal {
    /// The size requested.
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
