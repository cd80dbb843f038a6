//! The memory of an NVIDIA device and who holds it, from the driver and NVML, without touching
//! burn's device.
//!
//! burn's allocator knows only what it has reserved itself, for one thread. Whether the next page
//! can be had depends on what the card has free, whoever holds the rest.

use cudarc::driver::{CudaContext, DriverError};
use firebox_plan::MemoryInfo;
use firebox_trace::Bytes;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::device::nvidia_error::NvidiaError;
use crate::device::panics::panic_message;

/// The memory of a device, and who holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceUsage {
    /// All memory, as the driver counts it.
    pub total: Bytes,
    /// What any program can still allocate.
    pub free: Bytes,
    /// What this process holds, including CUDA's context. `None` if NVML is missing or does not
    /// report it, as in a container with its own process numbers or under WSL.
    pub held_by_process: Option<Bytes>,
    /// What other processes hold and what the driver keeps for itself: all that is neither free nor
    /// this process's. `None` if `held_by_process` is.
    pub held_by_others: Option<Bytes>,
}

/// The memory of the CUDA device with this number, counted as in burn's `CudaDevice`.
///
/// The query needs CUDA's primary context of the device. If there is none yet, it is created and
/// released afterwards.
///
/// ```no_run
/// let usage = firebox_train::cuda_memory(0)?;
/// println!("{} of {} are free", usage.free, usage.total);
/// # Ok::<(), firebox_train::NvidiaError>(())
/// ```
///
/// # Errors
///
/// If there is no driver, or no such device.
pub fn cuda_memory(device: usize) -> Result<DeviceUsage, NvidiaError> {
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

/// The memory of the CUDA device with this number, in the form a budget takes.
pub(crate) fn memory_info(device: usize) -> Result<MemoryInfo, NvidiaError> {
    let usage = cuda_memory(device)?;
    Ok(MemoryInfo::new(usage.total, usage.free, format!("CUDA device {device}")))
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

fn ask(device: usize) -> Result<DeviceUsage, DriverError> {
    let context = CudaContext::new(device)?;
    let (free, total) = context.mem_get_info()?;
    let bytes = |size: usize| Bytes::new(size as u64);
    let (free, total) = (bytes(free), bytes(total));
    let held_by_process = held_by_process(&uuid(context.uuid()?.bytes));
    let held_by_others = held_by_process.map(|own| total - free - own);
    Ok(DeviceUsage { total, free, held_by_process, held_by_others })
}

/// The name by which NVML knows a device. Numbers do not work, because `CUDA_VISIBLE_DEVICES`
/// changes those of CUDA but not those of NVML.
fn uuid(bytes: [std::ffi::c_char; 16]) -> String {
    let mut text = String::from("GPU");
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{:02x}", *byte as u8);
    }
    text
}

/// What this process holds on the device with this name, according to NVML.
fn held_by_process(uuid: &str) -> Option<Bytes> {
    let nvml = Nvml::init().ok()?;
    let device = nvml.device_by_uuid(uuid).ok()?;
    let own = std::process::id();
    let mut processes = device.running_compute_processes().ok()?;
    // A process that also renders is listed among the graphics processes.
    processes.extend(device.running_graphics_processes().unwrap_or_default());
    processes.iter().find(|process| process.pid == own).and_then(used)
}

fn used(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes::new(bytes)),
        UsedGpuMemory::Unavailable => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_as_nvml_names_it() {
        let bytes = std::array::from_fn(|index| (index as u8 * 17) as std::ffi::c_char);
        assert_eq!(uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

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

    #[test]
    #[ignore = "needs an NVIDIA device"]
    fn the_parts_are_the_whole() {
        let usage = cuda_memory(0).expect("there is a device");
        assert!(usage.free <= usage.total, "{usage:?}");
        if let (Some(own), Some(others)) = (usage.held_by_process, usage.held_by_others) {
            assert_eq!(own + others + usage.free, usage.total);
        }
    }
}
