//! All that the driver knows.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::CString;

use super::memory::Memory;
use super::queue::Queues;
use super::signature::Signature;
use crate::settings::Settings;

/// A device.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) memory: Memory,
    /// How often its context is retained.
    pub(crate) retained: u32,
    /// The error that stays with it.
    pub(crate) failed: Option<u32>,
}

/// A loaded kernel.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) signature: Signature,
}

/// A module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) kernels: Vec<Signature>,
}

/// A program of NVRTC's.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) source: String,
    pub(crate) ptx: Option<CString>,
    pub(crate) log: CString,
}

/// Streams, events, modules, functions and programs are told apart by numbers that are used once.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) devices: Vec<DeviceState>,
    pub(crate) queues: Queues,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) programs: HashMap<u64, Program>,
    /// Pinned host memory by its address.
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
            // Unlike small numbers and addresses.
            next: 0xb1a0_0000,
        }
    }

    /// A number that was not used before.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The device on which these bytes lie, if they are allocated.
    pub(crate) fn device_of(&self, address: u64, bytes: u64) -> Option<usize> {
        self.devices.iter().position(|device| device.memory.find(address, bytes).is_some())
    }
}
