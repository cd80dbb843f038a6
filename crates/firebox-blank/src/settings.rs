//! What a test tells the driver of its child processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The environment variable that names the file with the settings. A test sets it for its child processes alone.
pub const SETTINGS_VARIABLE: &str = "FIREBOX_BLANK";

/// The machine that the driver pretends to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The devices, in CUDA's order.
    pub devices: Vec<Device>,
    /// What `cuDriverGetVersion` answers. Default: 13000, for CUDA 13.0.
    pub driver_version: i32,
    /// When work is done. Default: at once.
    pub completions: Completions,
    /// How long kernels take. Default: [`KernelTimes::Steady`].
    pub kernel_times: KernelTimes,
    /// What goes wrong. Default: nothing.
    pub faults: Vec<Fault>,
    /// The folder in which the stub of NVRTC keeps the programs that it is handed: the source in a file `HASH.cu`, and the options
    /// that are no folders, a line each, in `HASH.options`. Default: none.
    #[serde(default)]
    pub sources: Option<PathBuf>,
}

impl Settings {
    /// A machine with these devices, on which nothing goes wrong.
    pub fn new(devices: impl IntoIterator<Item = Device>) -> Self {
        Self {
            devices: devices.into_iter().collect(),
            driver_version: 13_000,
            completions: Completions::Prompt,
            kernel_times: KernelTimes::Steady,
            faults: Vec::new(),
            sources: None,
        }
    }

    /// The same machine, on which this goes wrong as well.
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// The same machine with other kernel times.
    pub fn with_kernel_times(mut self, times: KernelTimes) -> Self {
        self.kernel_times = times;
        self
    }

    /// The same machine, which completes work late.
    pub fn with_completions(mut self, completions: Completions) -> Self {
        self.completions = completions;
        self
    }
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The name; the driver adds that it is blank.
    pub name: String,
    /// The bytes that `cuDeviceTotalMem` answers.
    pub memory: u64,
    /// The compute capability, major and minor.
    pub capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The bytes of shared memory that a block can opt in to. Default: 99 KiB.
    pub shared_memory: u32,
    /// The bytes that a process's context takes. Default: 300 MiB.
    pub context: u64,
    /// The bytes that other processes hold at the start. Default: none.
    pub taken_by_others: u64,
}

impl Device {
    /// A device with this name, total memory in bytes, compute capability and number of multiprocessors.
    pub fn new(
        name: impl Into<String>,
        memory: u64,
        capability: (u32, u32),
        multiprocessors: u32,
    ) -> Self {
        Self {
            name: name.into(),
            memory,
            capability,
            multiprocessors,
            shared_memory: 99 << 10,
            context: 300 << 20,
            taken_by_others: 0,
        }
    }

    /// The same device with so many bytes of shared memory that a block can opt in to.
    pub fn with_shared_memory(mut self, bytes: u32) -> Self {
        self.shared_memory = bytes;
        self
    }

    /// The same device with a context of so many bytes.
    pub fn with_context(mut self, bytes: u64) -> Self {
        self.context = bytes;
        self
    }

    /// The same device, of which other processes leave so many bytes to this one, its context not counted.
    pub fn leaving(mut self, bytes: u64) -> Self {
        self.taken_by_others = self.memory.saturating_sub(self.context + bytes);
        self
    }
}

/// When work on a stream is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Completions {
    /// As soon as its kernels have taken their time. Memory is free when it is freed.
    Prompt,
    /// So many microseconds later, as on a busy device. Memory that is freed in a stream's order is free once the stream gets
    /// there.
    Late {
        /// The delay of each event and each free.
        microseconds: u64,
    },
}

/// How long kernels take. A program learns of it when it waits for a stream or an event, as burn's tuner does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelTimes {
    /// No time at all: the tuner chooses by jitter.
    None,
    /// A time that follows from the kernel's code, grid and block, so that the tuner's choices repeat.
    Steady,
    /// The same with another order of kernels for each seed.
    Shuffled {
        /// Chooses the order.
        seed: u64,
    },
}

/// Something that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which calls are counted.
    pub target: Target,
    /// The first call that it happens to, counted from 1 over the whole process.
    pub nth: u64,
    /// How many calls in a row it happens to.
    pub times: u64,
    /// The `CUresult` that the call answers; 0 for success.
    pub error: u32,
    /// How many microseconds the call takes in addition.
    pub delay: u64,
    /// The bytes that other processes hold from the call on, if that changes.
    pub taken_by_others: Option<u64>,
}

impl Fault {
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: u32 = 100;
    /// `CUDA_ERROR_INVALID_PTX`.
    pub const INVALID_PTX: u32 = 218;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: stays with the device for the rest of the process.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`.
    pub const LAUNCH_OUT_OF_RESOURCES: u32 = 701;
    /// `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`.
    pub const DRIVER_MISMATCH: u32 = 803;

    /// The `nth` allocation of device memory is refused, asked for in a stream's order or not.
    pub fn refuse(nth: u64) -> Self {
        Self::at(Target::Allocation, nth, Self::OUT_OF_MEMORY)
    }

    /// The `nth` call of a function answers `error`.
    pub fn call(function: impl Into<String>, nth: u64, error: u32) -> Self {
        Self::at(Target::Function(function.into()), nth, error)
    }

    /// From the `nth` allocation on, other processes hold so many bytes.
    pub fn others_take(nth: u64, bytes: u64) -> Self {
        Self { taken_by_others: Some(bytes), ..Self::at(Target::Allocation, nth, 0) }
    }

    fn at(target: Target, nth: u64, error: u32) -> Self {
        Self { target, nth, times: 1, error, delay: 0, taken_by_others: None }
    }

    /// The same for so many calls in a row.
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// The same, after so many microseconds.
    pub fn after(mut self, microseconds: u64) -> Self {
        self.delay = microseconds;
        self
    }

    /// Whether it happens to this call.
    pub(crate) fn happens_at(&self, call: u64) -> bool {
        call >= self.nth && call - self.nth < self.times
    }
}

/// Which calls a [`Fault`] counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// Allocations of device memory. CubeCL asks again without a stream when it was refused in a stream's order: both calls
    /// are one allocation.
    Allocation,
    /// Calls of the function with this name, such as `cuLaunchKernel` or `nvrtcCompileProgram`.
    Function(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_were_written() {
        let device = Device::new("T4", 15 << 30, (7, 5), 40).leaving(1 << 30);
        assert_eq!(device.memory - device.context - device.taken_by_others, 1 << 30);
        let mut settings = Settings::new([device])
            .with_fault(Fault::refuse(7).times(2))
            .with_kernel_times(KernelTimes::Shuffled { seed: 3 })
            .with_completions(Completions::Late { microseconds: 500 });
        settings.sources = Some("sources".into());
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
    }

    #[test]
    fn a_fault_happens_to_as_many_calls_as_it_says() {
        let fault = Fault::call("cuLaunchKernel", 3, 701).times(2);
        let hit: Vec<u64> = (1..8).filter(|call| fault.happens_at(*call)).collect();
        assert_eq!(hit, [3, 4]);
    }
}
