//! Functions for memory and copies.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_uchar, c_uint, c_void};
use std::time::Instant;

use super::{c_functions, fill_with_zeros, put};
use crate::books::Field;
use crate::driver::{Driver, REFUSED, result};
use crate::journal::Entry;

/// `CUDA_MEMCPY2D` of the driver API, in its 64-bit layout.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are C's")]
pub struct Copy2d {
    pub source_x: usize,
    pub source_y: usize,
    pub source_kind: c_uint,
    pub source_host: *const c_void,
    pub source_device: u64,
    pub source_array: *const c_void,
    pub source_pitch: usize,
    pub target_x: usize,
    pub target_y: usize,
    pub target_kind: c_uint,
    pub target_host: *mut c_void,
    pub target_device: u64,
    pub target_array: *mut c_void,
    pub target_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

/// The alignment of pinned memory: a page, as on hardware.
const PINNED_ALIGNMENT: usize = 4096;

impl Driver {
    /// Applies the frees on a device that have taken effect by now, and all frees ordered on
    /// `stream`.
    pub(crate) fn settle(&self, device: usize, stream: Option<u64>) {
        let mut state = self.state();
        state.devices[device].memory.settle(Instant::now(), stream);
        self.books.device(device).set_held(state.devices[device].memory.held());
    }

    fn allocate(&self, bytes: usize, device: usize, stream: Option<u64>) -> Result<u64, u32> {
        if bytes == 0 {
            return Err(result::INVALID_VALUE);
        }
        // A retry without a stream of a refused stream-ordered allocation is the same allocation.
        let again = REFUSED.take().filter(|(refused, _)| stream.is_none() && *refused == bytes);
        let suffered = match again {
            Some((_, Some(error))) => Err(error),
            Some((_, None)) => Ok(()),
            None => self.suffer_allocation(),
        };
        let found = suffered.map_err(Some).and_then(|()| {
            self.settle(device, stream);
            let mut state = self.state();
            if self.free_bytes(device) < bytes as u64 {
                return Err(None);
            }
            let address = state.devices[device].memory.allocate(bytes as u64, stream);
            self.books.device(device).set_held(state.devices[device].memory.held());
            Ok(address)
        });
        let books = self.books.device(device);
        match found {
            Ok(address) => {
                books.count(Field::Allocations);
                self.note(&Entry::Allocated { device, address, bytes: bytes as u64, stream });
                Ok(address)
            }
            Err(fault) => {
                books.count(Field::Refused);
                self.note(&Entry::Refused { device, bytes: bytes as u64 });
                if stream.is_some() {
                    REFUSED.set(Some((bytes, fault)));
                }
                Err(fault.unwrap_or(result::OUT_OF_MEMORY))
            }
        }
    }

    fn free(&self, address: u64, asking: usize, stream: Option<u64>) -> Result<(), u32> {
        let mut state = self.state();
        let until = stream.and_then(|stream| state.queues.freed(stream));
        let device = state.device_of(address, 0).unwrap_or(asking);
        let freed = state.devices[device].memory.free(address, until);
        let held = state.devices[device].memory.held();
        drop(state);
        let Ok(bytes) = freed else {
            self.misuse(device, format!("{address:#x} is freed and not allocated"));
            return Err(result::INVALID_VALUE);
        };
        let books = self.books.device(device);
        books.set_held(held);
        books.count(Field::Frees);
        self.note(&Entry::Freed { device, address, bytes });
        Ok(())
    }

    /// Checks that a copy or fill stays within an allocation.
    fn check_range(&self, device: usize, address: u64, bytes: u64, what: &str) -> Result<(), u32> {
        if bytes == 0 || self.state().device_of(address, bytes).is_some() {
            return Ok(());
        }
        self.misuse(
            device,
            format!("{what} of {bytes} bytes at {address:#x}, which are not allocated"),
        );
        Err(result::INVALID_VALUE)
    }

    fn copy_2d(&self, device: usize, copy: Copy2d) -> Result<(), u32> {
        let books = self.books.device(device);
        let Copy2d { width, height, .. } = copy;
        let span = |pitch: usize| (pitch * height.saturating_sub(1) + width) as u64;
        let is_empty = width == 0 || height == 0;
        let short = (copy.source_pitch > 0 && copy.source_pitch < width)
            || (copy.target_pitch > 0 && copy.target_pitch < width);
        if short && height > 1 {
            return Err(result::INVALID_VALUE);
        }
        match (copy.source_kind, copy.target_kind) {
            (HOST, DEVICE) => {
                let at =
                    copy.target_device + (copy.target_y * copy.target_pitch + copy.target_x) as u64;
                if !is_empty {
                    self.check_range(device, at, span(copy.target_pitch), "a copy to the device")?;
                }
                books.count(Field::ToDevice);
            }
            (DEVICE, HOST) => {
                let at =
                    copy.source_device + (copy.source_y * copy.source_pitch + copy.source_x) as u64;
                if !is_empty {
                    self.check_range(device, at, span(copy.source_pitch), "a copy to the host")?;
                }
                let first = copy.target_y * copy.target_pitch + copy.target_x;
                for row in 0..height {
                    let row = copy.target_host.wrapping_byte_add(first + row * copy.target_pitch);
                    fill_with_zeros(row, width)?;
                }
                books.count(Field::ToHost);
            }
            _ => return Err(result::INVALID_VALUE),
        }
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<*mut c_void, u32> {
        let layout = Layout::from_size_align(bytes, PINNED_ALIGNMENT);
        let layout = layout.ok().filter(|layout| layout.size() > 0).ok_or(result::INVALID_VALUE)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(result::OUT_OF_MEMORY);
        }
        let mut state = self.state();
        state.pinned.insert(memory as usize, layout);
        self.books.set_pinned(state.pinned.values().map(|layout| layout.size() as u64).sum());
        Ok(memory.cast())
    }

    fn unpin(&self, memory: *mut c_void) -> Result<(), u32> {
        let mut state = self.state();
        let Some(layout) = state.pinned.remove(&(memory as usize)) else {
            drop(state);
            self.misuse(0, format!("pinned memory {memory:p} is freed and not allocated"));
            return Err(result::INVALID_VALUE);
        };
        self.books.set_pinned(state.pinned.values().map(|layout| layout.size() as u64).sum());
        // SAFETY: the memory was allocated with this layout and has just been forgotten.
        unsafe { dealloc(memory.cast(), layout) };
        Ok(())
    }
}

c_functions! {
    begin: crate::driver::enter;

    fn cuMemAllocAsync(driver, pointer: *mut u64, bytes: usize, stream: *mut c_void) {
        let (stream, device) = driver.stream(stream)?;
        put(pointer, driver.allocate(bytes, device, Some(stream))?)
    }

    fn cuMemAlloc_v2(driver, pointer: *mut u64, bytes: usize) {
        put(pointer, driver.allocate(bytes, driver.current_device()?, None)?)
    }

    fn cuMemFreeAsync(driver, address: u64, stream: *mut c_void) {
        let (stream, device) = driver.stream(stream)?;
        driver.free(address, device, Some(stream))
    }

    fn cuMemFree_v2(driver, address: u64) {
        let device = driver.current_device()?;
        if address == 0 { Ok(()) } else { driver.free(address, device, None) }
    }

    fn cuMemAllocHost_v2(driver, pointer: *mut *mut c_void, bytes: usize) {
        put(pointer, driver.pin(bytes)?)
    }

    fn cuMemFreeHost(driver, pointer: *mut c_void) {
        driver.unpin(pointer)
    }

    fn cuMemcpyHtoDAsync_v2(driver, to: u64, _from: *const c_void, bytes: usize, stream: *mut c_void) {
        let (_, device) = driver.stream(stream)?;
        driver.check_range(device, to, bytes as u64, "a copy to the device")?;
        driver.books.device(device).count(Field::ToDevice);
        Ok(())
    }

    fn cuMemcpyDtoHAsync_v2(driver, to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) {
        let (_, device) = driver.stream(stream)?;
        driver.check_range(device, from, bytes as u64, "a copy to the host")?;
        driver.books.device(device).count(Field::ToHost);
        fill_with_zeros(to, bytes)
    }

    fn cuMemcpyDtoDAsync_v2(driver, to: u64, from: u64, bytes: usize, stream: *mut c_void) {
        let (_, device) = driver.stream(stream)?;
        driver.check_range(device, from, bytes as u64, "a copy within the device, from")?;
        driver.check_range(device, to, bytes as u64, "a copy within the device, to")?;
        driver.books.device(device).count(Field::WithinDevice);
        Ok(())
    }

    fn cuMemcpy2DAsync_v2(driver, copy: *const Copy2d, stream: *mut c_void) {
        let (_, device) = driver.stream(stream)?;
        if copy.is_null() {
            return Err(result::INVALID_VALUE);
        }
        // SAFETY: C callers pass a valid description.
        driver.copy_2d(device, unsafe { copy.read() })
    }

    fn cuMemsetD8Async(driver, to: u64, _value: c_uchar, bytes: usize, stream: *mut c_void) {
        let (_, device) = driver.stream(stream)?;
        driver.check_range(device, to, bytes as u64, "a fill")?;
        driver.books.device(device).count(Field::WithinDevice);
        Ok(())
    }
}
