//! The NVML functions firebox calls: memory of a device, and how much each process holds.

use std::ffi::{c_char, c_uint, c_void};

use super::api::devices::{name_of, uuid_of};
use super::api::{c_functions, put, put_text, text};
use super::{Driver, enter};
use crate::books::Call;

/// The values of `nvmlReturn_t` returned here.
mod said {
    pub(super) const INVALID_ARGUMENT: u32 = 2;
    pub(super) const NOT_FOUND: u32 = 6;
    pub(super) const INSUFFICIENT_SIZE: u32 = 7;
    pub(super) const UNKNOWN: u32 = 999;
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are C's")]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are C's")]
pub struct Process {
    pub pid: c_uint,
    pub used: u64,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

/// The process id under which all other processes are listed as one.
const OTHERS: c_uint = 1;

impl Driver {
    fn device_of_handle(&self, handle: *mut c_void) -> Result<usize, u32> {
        let number = (handle as usize).checked_sub(1);
        number.filter(|number| *number < self.settings.devices.len()).ok_or(said::INVALID_ARGUMENT)
    }

    /// The processes that hold memory on a device.
    fn processes(&self, device: usize) -> Vec<Process> {
        let books = self.books.device(device);
        let process =
            |pid, used| Process { pid, used, gpu_instance: u32::MAX, compute_instance: u32::MAX };
        let own = process(std::process::id(), books.context() + books.held());
        let others = process(OTHERS, books.taken_by_others());
        [own, others].into_iter().filter(|process| process.used > 0).collect()
    }
}

/// The UUID in NVML's notation.
fn uuid_text(device: usize) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid_of(device).iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

fn put_processes(processes: &[Process], count: *mut c_uint, list: *mut Process) -> Result<(), u32> {
    if count.is_null() {
        return Err(said::INVALID_ARGUMENT);
    }
    // SAFETY: the caller passes a pointer to a count.
    let room = unsafe { count.read() } as usize;
    put(count, processes.len() as c_uint)?;
    if room < processes.len() || (list.is_null() && !processes.is_empty()) {
        return Err(said::INSUFFICIENT_SIZE);
    }
    for (at, process) in processes.iter().enumerate() {
        put(list.wrapping_add(at), *process)?;
    }
    Ok(())
}

/// Begins a call. A fault becomes `UNKNOWN`: its number is one of the driver's, and NVML has no
/// error for it.
fn begin(call: Call) -> Result<&'static Driver, u32> {
    enter(call).map_err(|_| said::UNKNOWN)
}

c_functions! {
    begin: begin;

    fn nvmlInit_v2(_driver) { Ok(()) }

    fn nvmlInitWithFlags(_driver, _flags: c_uint) { Ok(()) }

    fn nvmlShutdown(_driver) { Ok(()) }

    fn nvmlDeviceGetCount_v2(driver, count: *mut c_uint) {
        put(count, driver.settings.devices.len() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex_v2(driver, index: c_uint, device: *mut *mut c_void) {
        let handle = (index as usize + 1) as *mut c_void;
        driver.device_of_handle(handle)?;
        put(device, handle)
    }

    fn nvmlDeviceGetHandleByUUID(driver, uuid: *const c_char, device: *mut *mut c_void) {
        let uuid = text(uuid)?;
        let number = (0..driver.settings.devices.len()).find(|number| uuid_text(*number) == uuid);
        put(device, (number.ok_or(said::NOT_FOUND)? + 1) as *mut c_void)
    }

    fn nvmlDeviceGetName(driver, device: *mut c_void, name: *mut c_char, room: c_uint) {
        let device = driver.device_of_handle(device)?;
        put_text(name, room as usize, &name_of(&driver.settings.devices[device]))
    }

    fn nvmlDeviceGetUUID(driver, device: *mut c_void, uuid: *mut c_char, room: c_uint) {
        let device = driver.device_of_handle(device)?;
        put_text(uuid, room as usize, &uuid_text(device))
    }

    fn nvmlDeviceGetMemoryInfo(driver, device: *mut c_void, memory: *mut Memory) {
        let device = driver.device_of_handle(device)?;
        driver.settle(device, None);
        let total = driver.settings.devices[device].memory;
        let free = driver.free_bytes(device);
        put(memory, Memory { total, free, used: total - free })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        driver, device: *mut c_void, count: *mut c_uint, list: *mut Process,
    ) {
        put_processes(&driver.processes(driver.device_of_handle(device)?), count, list)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        driver, device: *mut c_void, count: *mut c_uint, list: *mut Process,
    ) {
        driver.device_of_handle(device)?;
        put_processes(&[], count, list)
    }
}

/// `nvmlErrorString`.
#[allow(non_snake_case, reason = "the name is C's")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(result: u32) -> *const c_char {
    let text = match result {
        0 => c"Success",
        said::INVALID_ARGUMENT => c"Invalid Argument",
        said::NOT_FOUND => c"Not Found",
        said::INSUFFICIENT_SIZE => c"Insufficient Size",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_has_no_room_says_how_much_it_needs() {
        let process = Process { pid: 7, used: 1, gpu_instance: 0, compute_instance: 0 };
        let mut count = 0;
        let too_small = put_processes(&[process], &mut count, std::ptr::null_mut());
        assert_eq!((too_small, count), (Err(said::INSUFFICIENT_SIZE), 1));
        let mut list = [Process { pid: 0, ..process }; 3];
        count = 3;
        assert_eq!(put_processes(&[process], &mut count, list.as_mut_ptr()), Ok(()));
        assert_eq!((count, list[0].pid), (1, 7));
        assert_eq!(put_processes(&[], &mut count, std::ptr::null_mut()), Ok(()));
        assert_eq!(uuid_text(1).len(), "GPU-00112233-4455-6677-8899-aabbccddeeff".len());
    }
}
