//! The memory of an NVIDIA device, from the driver, without touching burn's device.
//!
//! burn's allocator knows only what it has reserved itself, for one thread. Whether the next page
//! can be had depends on what the card has free, whoever holds the rest.

use cudarc::driver::{CudaContext, DriverError};
use firebox_plan::MemoryInfo;
use firebox_trace::Bytes;

use crate::device::nvidia_error::NvidiaError;
use crate::device::panics::panic_message;

/// The memory of the CUDA device with this number, counted as in burn's `CudaDevice`.
///
/// The query needs CUDA's primary context of the device. If there is none yet, it is created and
/// released afterwards.
///
/// ```no_run
/// let memory = firebox_train::cuda_memory(0)?;
/// println!("{} of {} are free", memory.free, memory.total);
/// # Ok::<(), firebox_train::NvidiaError>(())
/// ```
///
/// # Errors
///
/// If there is no driver, or no such device.
pub fn cuda_memory(device: usize) -> Result<MemoryInfo, NvidiaError> {
    if !driver_is_there() {
        return Err(NvidiaError::NoDriver);
    }
    let cause = match alone(|| ask(device)) {
        Ok(Ok(usage)) => return Ok(usage),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic_message(&*panic),
    };
    Err(NvidiaError::Driver { device, cause })
}

/// What the driver calls a device. None if it cannot be asked.
pub(crate) fn name(device: usize) -> Option<String> {
    if !driver_is_there() {
        return None;
    }
    alone(|| CudaContext::new(device)?.name()).ok()?.ok()
}

/// Asks the driver. The question makes a context current; on a thread of its own that affects
/// nothing else.
fn alone<T: Send>(ask: impl FnOnce() -> T + Send) -> std::thread::Result<T> {
    std::thread::scope(|scope| scope.spawn(ask).join())
}

/// Whether the driver's library can be loaded. If it cannot, cudarc panics at its first call.
#[allow(unsafe_code, reason = "cudarc declares the question unsafe")]
pub(crate) fn driver_is_there() -> bool {
    // SAFETY: loads the driver's library and releases it, as every program that uses CUDA does.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

fn ask(device: usize) -> Result<MemoryInfo, DriverError> {
    let (free, total) = CudaContext::new(device)?.mem_get_info()?;
    let bytes = |size: usize| Bytes::new(size as u64);
    Ok(MemoryInfo::new(bytes(total), bytes(free), format!("CUDA device {device}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_there_is_an_error_and_no_panic() {
        // No machine has this many devices.
        match cuda_memory(4711) {
            Err(NvidiaError::NoDriver) => assert!(!driver_is_there()),
            Err(NvidiaError::Driver { device, cause }) => {
                assert!(device == 4711 && !cause.is_empty());
            }
            other => panic!("{other:?}"),
        }
    }
}
