//! How fast a device computes. Only ratios between operations matter.

use burn_backend::DType;
use firebox_recompute::Rates;
use firebox_trace::MemoryModel;

/// How a device computes, as far as a choice depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speed {
    pub(crate) rates: Rates,
    /// The type of its booleans, if it is known.
    pub(crate) bools: Option<DType>,
}

impl Speed {
    /// `rates` are those of the device, if they are known.
    pub(crate) fn of(memory: &dyn MemoryModel, rates: Option<Rates>) -> Self {
        let assumed = if memory.is_on_host() { Rates::CPU } else { Rates::RTX_4090 };
        let rates = rates.unwrap_or(assumed);
        Self { rates, bools: None }
    }
}
