//! Functions for modules and kernel launches.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::{c_functions, put, text};
use crate::books::Field;
use crate::driver::signature::{Parameter, Signature};
use crate::driver::state::{Function, Module};
use crate::driver::{Driver, result};

/// The CUDA version of the NVRTC stub. An older driver does not load its modules.
pub(crate) const COMPILER_VERSION: (c_int, c_int) = (13, 0);

/// `CUtensorMap` of the driver API. Here its first word is the address it was made from.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// The second word of every map this driver made.
    const MARK: u64 = 0x6d61_7020_626c_616e;

    fn new(address: u64) -> Self {
        let mut words = [0; 16];
        words[..2].copy_from_slice(&[address, Self::MARK]);
        Self(words)
    }

    fn address(&self) -> Option<u64> {
        (self.0[1] == Self::MARK).then_some(self.0[0])
    }
}

impl Driver {
    fn load_module(&self, image: *const c_void) -> Result<u64, u32> {
        let device = self.current_device()?;
        let image = text(image.cast())?;
        let (major, minor) = COMPILER_VERSION;
        if self.settings.driver_version < major * 1000 + minor * 10 {
            return Err(result::UNSUPPORTED_PTX_VERSION);
        }
        let kernels = Signature::of_module(&image);
        if kernels.is_empty() {
            return Err(result::INVALID_IMAGE);
        }
        let mut state = self.state();
        let number = state.number();
        state.modules.insert(number, Module { kernels });
        self.books.device(device).count(Field::Modules);
        Ok(number)
    }

    /// Checks a launch as far as possible without running the kernel.
    fn check_launch(
        &self,
        device: usize,
        function: &Function,
        block: [c_uint; 3],
        shared_memory: c_uint,
        arguments: *mut *mut c_void,
    ) -> Result<(), u32> {
        let limit = self.settings.devices[device].shared_memory;
        let units = block.iter().map(|size| u64::from(*size)).product::<u64>();
        if !(1..=1024).contains(&units) || shared_memory > limit {
            return Err(result::INVALID_VALUE);
        }
        let Signature { name, parameters, .. } = &function.signature;
        if arguments.is_null() && !parameters.is_empty() {
            return Err(result::INVALID_VALUE);
        }
        for (at, parameter) in parameters.iter().enumerate() {
            // SAFETY: the signature gives the number and kinds of the arguments.
            let address = unsafe {
                let argument = *arguments.add(at);
                match parameter {
                    Parameter::Value => continue,
                    Parameter::Pointer => Some(argument.cast::<u64>().read_unaligned()),
                    Parameter::TensorMap => argument.cast::<TensorMap>().read_unaligned().address(),
                }
            };
            // Zero bytes: an empty buffer may lie at the very end of a page.
            let lies = |address: &u64| self.state().device_of(*address, 0).is_some();
            if !address.as_ref().is_some_and(lies) {
                let address = address.unwrap_or_default();
                self.misuse(
                    device,
                    format!("argument {at} of `{name}` is {address:#x}, which is not allocated"),
                );
            }
        }
        Ok(())
    }
}

c_functions! {
    begin: crate::driver::enter;

    fn cuModuleLoadData(driver, module: *mut *mut c_void, image: *const c_void) {
        put(module, driver.load_module(image)? as *mut c_void)
    }

    fn cuModuleUnload(driver, module: *mut c_void) {
        driver.current_device()?;
        let number = module as u64;
        let mut state = driver.state();
        state.functions.retain(|_, function| function.module != number);
        state.modules.remove(&number).map(drop).ok_or(result::INVALID_HANDLE)
    }

    fn cuModuleGetFunction(driver, function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        driver.current_device()?;
        let name = text(name)?;
        let mut state = driver.state();
        let module = module as u64;
        let kernels = &state.modules.get(&module).ok_or(result::INVALID_HANDLE)?.kernels;
        let signature = kernels.iter().find(|kernel| kernel.name == name).cloned();
        let signature = signature.ok_or(result::NOT_FOUND)?;
        let number = state.number();
        state.functions.insert(number, Function { module, signature });
        put(function, number as *mut c_void)
    }

    fn cuFuncSetAttribute(driver, function: *mut c_void, _attribute: c_uint, value: c_int) {
        let device = driver.current_device()?;
        let is_known = driver.state().functions.contains_key(&(function as u64));
        let limit = driver.settings.devices[device].shared_memory;
        match is_known {
            false => Err(result::INVALID_HANDLE),
            true if value < 0 || value as u32 > limit => Err(result::INVALID_VALUE),
            true => Ok(()),
        }
    }

    fn cuLaunchKernel(
        driver, function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_memory: c_uint, stream: *mut c_void,
        arguments: *mut *mut c_void, _extra: *mut *mut c_void,
    ) {
        let (stream, device) = driver.stream(stream)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        if grid.contains(&0) {
            return Err(result::INVALID_VALUE);
        }
        let known = driver.state().functions.get(&(function as u64)).cloned();
        let function = known.ok_or(result::INVALID_HANDLE)?;
        driver.check_launch(device, &function, block, shared_memory, arguments)?;
        driver.books.device(device).count(Field::Launches);
        let Signature { name, code, .. } = &function.signature;
        driver.state().queues.launch(stream, (name, code, grid, block));
        Ok(())
    }

    fn cuTensorMapEncodeTiled(
        driver, map: *mut TensorMap, _kind: c_uint, _rank: u32, address: *mut c_void, _shape: *const u64,
        _strides: *const u64, _box: *const u32, _element_strides: *const u32, _interleave: c_uint,
        _swizzle: c_uint, _promotion: c_uint, _fill: c_uint,
    ) {
        driver.current_device()?;
        put(map, TensorMap::new(address as u64))
    }

    fn cuTensorMapEncodeIm2col(
        driver, map: *mut TensorMap, _kind: c_uint, _rank: u32, address: *mut c_void, _shape: *const u64,
        _strides: *const u64, _lower: *const c_int, _upper: *const c_int, _channels: u32, _pixels: u32,
        _element_strides: *const u32, _interleave: c_uint, _swizzle: c_uint, _promotion: c_uint,
        _fill: c_uint,
    ) {
        driver.current_device()?;
        put(map, TensorMap::new(address as u64))
    }

    fn cuTensorMapEncodeIm2colWide(
        driver, map: *mut TensorMap, _kind: c_uint, _rank: u32, address: *mut c_void, _shape: *const u64,
        _strides: *const u64, _lower: c_int, _upper: c_int, _channels: u32, _pixels: u32,
        _element_strides: *const u32, _interleave: c_uint, _mode: c_uint, _swizzle: c_uint,
        _promotion: c_uint, _fill: c_uint,
    ) {
        driver.current_device()?;
        put(map, TensorMap::new(address as u64))
    }
}
