//! Measures what the process holds: the counting allocator if the program has it, otherwise what
//! the system says.

use std::fs;

use burn::tensor::Device;
use burn_dispatch::DispatchDevice;
use firebox_plan::Resident;
use firebox_trace::Bytes;
use peak_alloc::PeakAlloc;

/// How the memory of the host is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gauge {
    /// By the counting allocator, to the byte.
    Heap,
    /// By what is resident.
    Process,
}

impl Gauge {
    /// The best that the program has, for a device that computes in the host's memory.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Self::of_host(),
            #[allow(unreachable_patterns, reason = "there may be no other backend")]
            _ => None,
        }
    }

    fn of_host() -> Option<Self> {
        // Something is always alive on a counted heap.
        match PeakAlloc.current_usage() > 0 {
            true => Some(Self::Heap),
            false => Resident::of_this_process().map(|_| Self::Process),
        }
    }

    /// Whether it counts bytes, and not pages.
    pub(crate) fn is_exact(self) -> bool {
        self == Self::Heap
    }

    /// What is held now.
    pub(crate) fn live(self) -> Bytes {
        match self {
            Self::Heap => Bytes::new(PeakAlloc.current_usage() as u64),
            Self::Process => Resident::of_this_process().map_or(Bytes::ZERO, |memory| memory.now),
        }
    }

    /// Runs `work` and measures the most that was held meanwhile.
    pub(crate) fn peak_of<R>(self, work: impl FnOnce() -> R) -> (R, Bytes) {
        match self {
            Self::Heap => {
                PeakAlloc.reset_peak_usage();
                let result = work();
                (result, Bytes::new(PeakAlloc.peak_usage() as u64))
            }
            Self::Process => {
                // Linux forgets the peak of the resident memory.
                let _ = fs::write("/proc/self/clear_refs", "5");
                let before = Resident::of_this_process();
                let result = work();
                let after = Resident::of_this_process();
                let growth = after.zip(before).map(|(after, before)| after.growth_since(before));
                let before = before.map_or(Bytes::ZERO, |memory| memory.now);
                (result, before + growth.unwrap_or_default())
            }
        }
    }
}
