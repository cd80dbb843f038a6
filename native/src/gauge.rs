//! Measures what training holds: on the host what the counting allocator says, if the program has
//! it, otherwise what the system says, and on a GPU the pages of CubeCL's pools.

use std::fs;

use burn::tensor::Device;
use burn_dispatch::DispatchDevice;
use firebox_plan::{MemoryInfo, Resident, host_memory};
use firebox_trace::Bytes;
use peak_alloc::PeakAlloc;

use crate::error::TrainError;

/// How memory is measured.
#[derive(Clone, Debug)]
pub(crate) enum Gauge {
    /// By the counting allocator, to the byte.
    Heap,
    /// By what is resident.
    Process,
    /// By the pages of a GPU's pools.
    #[cfg(feature = "cubecl")]
    Pools(Device),
}

impl Gauge {
    /// The best that the program has for a device.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Self::of_host(),
            #[cfg(feature = "cubecl")]
            DispatchDevice::Cube(_) => Some(Self::Pools(device.clone())),
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
    pub(crate) fn is_exact(&self) -> bool {
        !matches!(self, Self::Process)
    }

    /// Whether it measures the host's memory.
    pub(crate) fn is_of_host(&self) -> bool {
        matches!(self, Self::Heap | Self::Process)
    }

    /// Gives back the pages of a GPU that nothing lies on.
    pub(crate) fn give_back(&self) {
        #[cfg(feature = "cubecl")]
        if let Self::Pools(device) = self {
            crate::dry::give_back(device);
        }
    }

    /// The device, for people.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Heap | Self::Process => "flex, Cpu".to_owned(),
            #[cfg(feature = "cubecl")]
            Self::Pools(device) => match device.clone().inner().as_dispatch() {
                DispatchDevice::Cube(cube) => format!("{cube:?}"),
                other => format!("{other:?}"),
            },
        }
    }

    /// What is there and what is free, to set a budget by.
    ///
    /// # Errors
    ///
    /// If that is not known.
    pub(crate) fn memory(&self) -> Result<MemoryInfo, TrainError> {
        match self {
            #[cfg(feature = "cubecl")]
            Self::Pools(device) => crate::dry::free(device)
                .ok_or_else(|| TrainError::UnknownFree { device: format!("{device:?}") }),
            Self::Heap | Self::Process => Ok(host_memory()?),
        }
    }

    /// What is held now.
    pub(crate) fn live(&self) -> Bytes {
        match self {
            Self::Heap => Bytes::new(PeakAlloc.current_usage() as u64),
            Self::Process => Resident::of_this_process().map_or(Bytes::ZERO, |memory| memory.now),
            #[cfg(feature = "cubecl")]
            Self::Pools(device) => {
                crate::dry::pools(device).map_or(Bytes::ZERO, |pools| pools.reserved)
            }
        }
    }

    /// Runs `work` and measures the most that was held meanwhile.
    pub(crate) fn peak_of<R>(&self, work: impl FnOnce() -> R) -> (R, Bytes) {
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
            // Pages stay until they are given back. What waits in burn's queue shows in the next.
            #[cfg(feature = "cubecl")]
            Self::Pools(_) => {
                let result = work();
                (result, self.live())
            }
        }
    }
}
