//! Everything the driver knows: devices, queues, modules, functions, programs and pinned memory.
//! The functions in `api` and `nvrtc` work on it under one lock.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::CString;

use super::memory::Memory;
use super::queue::Queues;
use super::signature::Signature;
use crate::settings::Settings;

/// The state of one device.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) memory: Memory,
    /// How many times its context is retained.
    pub(crate) retained: u32,
    /// The error the device keeps returning, once it has failed.
    pub(crate) failed: Option<u32>,
}

/// A kernel that a program has looked up.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) signature: Signature,
}

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) kernels: Vec<Signature>,
}

/// An NVRTC program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) source: String,
    pub(crate) ptx: Option<CString>,
    pub(crate) log: CString,
}

/// The driver's state. Streams, events, modules, functions and programs are identified by numbers
/// that are never reused.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) devices: Vec<DeviceState>,
    pub(crate) queues: Queues,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) programs: HashMap<u64, Program>,
    /// Layouts of pinned host memory, by address.
    pub(crate) pinned: HashMap<usize, Layout>,
    next: u64,
}

impl State {
    pub(crate) fn new(settings: &Settings) -> Self {
        let device =
            |number| DeviceState { memory: Memory::new(number), retained: 0, failed: None };
        Self {
            devices: (0..settings.devices.len()).map(device).collect(),
            queues: Queues::new(settings.completions, settings.kernel_times),
            modules: HashMap::new(),
            functions: HashMap::new(),
            programs: HashMap::new(),
            pinned: HashMap::new(),
            // Large enough not to be mistaken for a small number, too small for an address.
            next: 0xb1a0_0000,
        }
    }

    /// A number never used before.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The device on which this range is allocated.
    pub(crate) fn device_of(&self, address: u64, bytes: u64) -> Option<usize> {
        self.devices.iter().position(|device| device.memory.find(address, bytes).is_some())
    }
}
