//! The driver API functions that cubecl-cuda 0.10, cudarc 0.19 and firebox call.
//!
//! Their arguments follow NVIDIA's documentation of the driver API. Handles are numbers and are
//! never dereferenced.

pub mod devices;
pub mod kernels;
pub mod memory;
pub mod streams;

use std::ffi::{CStr, c_char, c_void};

use super::result;

/// Defines C functions. `begin` counts the call, injects its faults and returns the driver; each
/// body starts with the name it gives the driver.
macro_rules! c_functions {
    (begin: $begin:path; $(
        $(#[$attribute:meta])*
        fn $name:ident($driver:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block
    )*) => {
        $(
            $(#[$attribute])*
            #[doc = concat!("`", stringify!($name), "`.")]
            #[allow(non_snake_case, reason = "the name is C's")]
            #[allow(clippy::too_many_arguments, reason = "the arguments are C's")]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                let body = || -> Result<(), u32> {
                    let $driver = $begin($crate::books::Call::$name)?;
                    $body
                };
                $crate::driver::answer(body())
            }
        )*
    };
}
pub(crate) use c_functions;

/// Writes a result through a pointer.
pub(crate) fn put<T>(to: *mut T, value: T) -> Result<(), u32> {
    if to.is_null() {
        return Err(result::INVALID_VALUE);
    }
    // SAFETY: C callers pass a valid place for the result.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a text of at most `room` bytes, including the terminating zero. Longer texts are cut.
pub(crate) fn put_text(to: *mut c_char, room: usize, text: &str) -> Result<(), u32> {
    if to.is_null() || room == 0 {
        return Err(result::INVALID_VALUE);
    }
    let bytes = &text.as_bytes()[..text.len().min(room - 1)];
    // SAFETY: C callers pass `room` bytes, and no more are written.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        to.add(bytes.len()).write(0);
    }
    Ok(())
}

/// Reads the text a pointer refers to.
pub(crate) fn text(from: *const c_char) -> Result<String, u32> {
    if from.is_null() {
        return Err(result::INVALID_VALUE);
    }
    // SAFETY: C callers pass texts that end with a zero.
    Ok(unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

/// Fills host memory with zeros, the result of every computation on this device.
pub(crate) fn fill_with_zeros(to: *mut c_void, bytes: usize) -> Result<(), u32> {
    if to.is_null() && bytes > 0 {
        return Err(result::INVALID_VALUE);
    }
    if bytes > 0 {
        // SAFETY: C callers pass a destination of `bytes` bytes.
        unsafe { to.cast::<u8>().write_bytes(0, bytes) };
    }
    Ok(())
}
