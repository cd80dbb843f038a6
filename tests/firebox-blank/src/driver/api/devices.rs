//! Functions for devices, contexts and errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{c_functions, put, put_text};
use crate::books::{Books, Field};
use crate::driver::{CURRENT, Driver, result};
use crate::settings::Device;

impl Driver {
    /// The device with this number, with its settings.
    fn device(&self, number: c_int) -> Result<(usize, &Device), u32> {
        let number = usize::try_from(number).map_err(|_| result::INVALID_DEVICE)?;
        let device = self.settings.devices.get(number).ok_or(result::INVALID_DEVICE)?;
        Ok((number, device))
    }

    /// Bytes of a device that are still available to any process.
    pub(crate) fn free_bytes(&self, device: usize) -> u64 {
        let books = self.books.device(device);
        let taken = books.held() + books.context() + books.taken_by_others();
        self.settings.devices[device].memory.saturating_sub(taken)
    }
}

/// The device name, marked as blank.
pub(crate) fn name_of(device: &Device) -> String {
    format!("{} (blank)", device.name)
}

/// The UUID of the device with this number.
pub(crate) fn uuid_of(device: usize) -> [u8; 16] {
    let mut uuid = *b"firebox blank  0";
    uuid[15] = device as u8;
    uuid
}

/// The handle of a device's context. Never null.
fn context_of(device: usize) -> *mut c_void {
    (0xc0de_0000 + device + 1) as *mut c_void
}

fn device_of(context: *mut c_void) -> Option<usize> {
    (context as usize).checked_sub(0xc0de_0001)
}

/// The value of a `CUdevice_attribute`, by number.
fn attribute(device: &Device, attribute: c_uint) -> Result<c_int, u32> {
    Ok(match attribute {
        // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, Y and Z
        1..=3 => 1024,
        4 => 64,
        // MAX_GRID_DIM_X, Y and Z
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // MAX_SHARED_MEMORY_PER_BLOCK, TOTAL_CONSTANT_MEMORY, WARP_SIZE, MAX_PITCH,
        // MAX_REGISTERS_PER_BLOCK
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => c_int::MAX,
        12 => 65_536,
        // MULTIPROCESSOR_COUNT
        16 => device.multiprocessors as c_int,
        // CONCURRENT_KERNELS, UNIFIED_ADDRESSING
        31 | 41 => 1,
        // COMPUTE_CAPABILITY_MAJOR and MINOR
        75 => device.capability.0 as c_int,
        76 => device.capability.1 as c_int,
        // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, MEMORY_POOLS_SUPPORTED
        97 => device.shared_memory as c_int,
        115 => 1,
        other => {
            eprintln!("blank driver: attribute {other} is not known");
            return Err(result::INVALID_VALUE);
        }
    })
}

/// Names and texts of the errors the driver returns, as CUDA defines them.
const ERRORS: &[(u32, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (
        222,
        c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        c"the provided PTX was compiled with an unsupported toolchain.",
    ),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (
        803,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"system has unsupported display driver / cuda driver combination",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn error(number: u32) -> Result<&'static (u32, &'static CStr, &'static CStr), u32> {
    ERRORS.iter().find(|(known, ..)| *known == number).ok_or(result::INVALID_VALUE)
}

c_functions! {
    begin: crate::driver::enter;

    fn cuInit(driver, _flags: c_uint) {
        if driver.settings.devices.is_empty() { Err(result::NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(driver, version: *mut c_int) {
        put(version, driver.settings.driver_version)
    }

    fn cuGetErrorName(_driver, number: u32, name: *mut *const c_char) {
        put(name, error(number)?.1.as_ptr())
    }

    fn cuGetErrorString(_driver, number: u32, text: *mut *const c_char) {
        put(text, error(number)?.2.as_ptr())
    }

    fn cuDeviceGet(driver, device: *mut c_int, ordinal: c_int) {
        driver.device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetCount(driver, count: *mut c_int) {
        put(count, driver.settings.devices.len() as c_int)
    }

    fn cuDeviceGetName(driver, name: *mut c_char, room: c_int, device: c_int) {
        let (_, device) = driver.device(device)?;
        put_text(name, usize::try_from(room).unwrap_or(0), &name_of(device))
    }

    fn cuDeviceGetPCIBusId(driver, id: *mut c_char, room: c_int, device: c_int) {
        let (number, _) = driver.device(device)?;
        put_text(id, usize::try_from(room).unwrap_or(0), &format!("0000:{number:02x}:00.0"))
    }

    fn cuDeviceGetUuid(driver, uuid: *mut [u8; 16], device: c_int) {
        put(uuid, uuid_of(driver.device(device)?.0))
    }

    fn cuDeviceGetUuid_v2(driver, uuid: *mut [u8; 16], device: c_int) {
        put(uuid, uuid_of(driver.device(device)?.0))
    }

    fn cuDeviceGetAttribute(driver, value: *mut c_int, number: c_uint, device: c_int) {
        put(value, attribute(driver.device(device)?.1, number)?)
    }

    fn cuDeviceTotalMem_v2(driver, bytes: *mut usize, device: c_int) {
        put(bytes, driver.device(device)?.1.memory as usize)
    }

    fn cuDevicePrimaryCtxRetain(driver, context: *mut *mut c_void, device: c_int) {
        let (number, device) = driver.device(device)?;
        let mut state = driver.state();
        let books: &Books = &driver.books;
        let has_context = books.device(number).context() > 0;
        if !has_context {
            if driver.free_bytes(number) < device.context {
                return Err(result::OUT_OF_MEMORY);
            }
            let field = books.device(number).field(Field::Context).swap(device.context, std::sync::atomic::Ordering::Relaxed);
            debug_assert_eq!(field, 0, "the state is locked");
        }
        state.devices[number].retained += 1;
        drop(state);
        put(context, context_of(number))
    }

    fn cuDevicePrimaryCtxRelease_v2(driver, device: c_int) {
        let (number, _) = driver.device(device)?;
        let mut state = driver.state();
        let device = &mut state.devices[number];
        device.retained = device.retained.checked_sub(1).ok_or(result::INVALID_CONTEXT)?;
        // Releasing the last retain drops the context, unless memory is still held on the device.
        if device.retained == 0 && device.memory.held() == 0 {
            driver.books.device(number).field(Field::Context).store(0, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    }

    fn cuCtxSetCurrent(driver, context: *mut c_void) {
        let current = if context.is_null() {
            0
        } else {
            let device = device_of(context).filter(|device| *device < driver.settings.devices.len());
            device.ok_or(result::INVALID_CONTEXT)? + 1
        };
        CURRENT.set(current);
        Ok(())
    }

    fn cuCtxGetCurrent(_driver, context: *mut *mut c_void) {
        put(context, CURRENT.get().checked_sub(1).map_or(std::ptr::null_mut(), context_of))
    }

    fn cuCtxSynchronize(driver) {
        let device = driver.current_device()?;
        driver.synchronize(|of| of == device);
        driver.current_device().map(drop)
    }

    fn cuMemGetInfo_v2(driver, free: *mut usize, total: *mut usize) {
        let device = driver.current_device()?;
        driver.settle(device, None);
        put(free, driver.free_bytes(device) as usize)?;
        put(total, driver.settings.devices[device].memory as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_says_that_it_is_blank() {
        let device = Device::new("T4", 15 << 30, (7, 5), 40);
        assert_eq!(name_of(&device), "T4 (blank)");
        assert_eq!((attribute(&device, 75), attribute(&device, 76)), (Ok(7), Ok(5)));
        assert_eq!(attribute(&device, 16), Ok(40));
        assert_eq!(attribute(&device, 4711), Err(result::INVALID_VALUE));
        assert_ne!(uuid_of(0), uuid_of(1));
    }

    #[test]
    fn a_context_is_told_from_none() {
        assert!((0..3).all(|device| device_of(context_of(device)) == Some(device)));
        assert_eq!(device_of(std::ptr::null_mut()), None);
    }
}
