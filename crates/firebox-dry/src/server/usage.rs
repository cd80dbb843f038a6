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
    /// The maximum bytes of live buffers, measured at each new page and at every sixteenth request.
    /// The rest of the peak is free even then, but in pieces that are too small or in pools of
    /// other sizes.
    pub most_in_use: Bytes,
    /// The number of pages of each size at the peak.
    pub pages: BTreeMap<Bytes, usize>,
    /// The largest buffer that was requested. If it is larger than the largest page of the device,
    /// it was not made. What was measured after it means little: the real device stops there.
    pub largest: Bytes,
    /// How many times the tuner measured a kernel because none was chosen yet.
    pub tuned: u64,
}
