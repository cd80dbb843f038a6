//! What a test tells the driver of its child processes. `install` writes the settings to a file,
//! and the driver reads it at its first call.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The environment variable that names the settings file. A test sets it only for its child
/// processes.
pub const SETTINGS_VARIABLE: &str = "FIREBOX_BLANK";

/// The machine the driver simulates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The devices, in CUDA's order.
    pub devices: Vec<Device>,
    /// The result of `cuDriverGetVersion`. Default: 13000, for CUDA 13.0.
    pub driver_version: i32,
    /// When work completes. Default: at once.
    pub completions: Completions,
    /// How long kernels take. Default: [`KernelTimes::Steady`].
    pub kernel_times: KernelTimes,
    /// The faults to inject. Default: none.
    pub faults: Vec<Fault>,
    /// The folder in which the NVRTC stub keeps the programs it is given. Default: none.
    ///
    /// `HASH.cu` holds the source. `HASH.options` holds the options except include paths, one a
    /// line.
    #[serde(default)]
    pub sources: Option<PathBuf>,
}

impl Settings {
    /// A machine with these devices and no faults.
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

    /// Adds a fault.
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Sets how long kernels take.
    pub fn with_kernel_times(mut self, times: KernelTimes) -> Self {
        self.kernel_times = times;
        self
    }

    /// Sets when work completes.
    pub fn with_completions(mut self, completions: Completions) -> Self {
        self.completions = completions;
        self
    }
}

/// A simulated device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The name. The driver appends ` (blank)`.
    pub name: String,
    /// The result of `cuDeviceTotalMem`, in bytes.
    pub memory: u64,
    /// The compute capability: major, minor.
    pub capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory a block can opt in to. Default: 99 KiB.
    pub shared_memory: u32,
    /// Bytes taken by a process's context. Default: 300 MiB.
    pub context: u64,
    /// Bytes other processes hold at the start. Default: none.
    pub taken_by_others: u64,
}

impl Device {
    /// A device with this name, total memory in bytes, compute capability and number of streaming
    /// multiprocessors.
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

    /// Sets the bytes of shared memory a block can opt in to.
    pub fn with_shared_memory(mut self, bytes: u32) -> Self {
        self.shared_memory = bytes;
        self
    }

    /// Sets the bytes of the context.
    pub fn with_context(mut self, bytes: u64) -> Self {
        self.context = bytes;
        self
    }

    /// Lets other processes hold so much that `bytes` remain for this one, in addition to its
    /// context.
    pub fn leaving(mut self, bytes: u64) -> Self {
        self.taken_by_others = self.memory.saturating_sub(self.context + bytes);
        self
    }
}

/// When work on a stream completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Completions {
    /// When its kernels have taken their time. Freed memory is available at once.
    Prompt,
    /// Later by a delay, as on a busy device. Memory of a stream-ordered free becomes available
    /// when the stream reaches the free.
    Late {
        /// The delay of each event and each free, in microseconds.
        microseconds: u64,
    },
}

/// How long kernels take. A program notices when it waits for a stream or an event, as burn's tuner
/// does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelTimes {
    /// No time at all. The tuner's choices then depend on jitter.
    None,
    /// A time derived from the kernel's code, grid and block. The tuner's choices are repeatable.
    Steady,
    /// As `Steady`, but each seed orders the kernels differently.
    Shuffled {
        /// Selects the order.
        seed: u64,
    },
}

/// A fault to inject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which calls are counted.
    pub target: Target,
    /// The first call affected, counted from 1 over the whole process.
    pub nth: u64,
    /// How many consecutive calls are affected.
    pub times: u64,
    /// The `CUresult` the call returns; 0 for success.
    pub error: u32,
    /// Extra duration of the call, in microseconds.
    pub delay: u64,
    /// Bytes other processes hold from this call on, on every device. `None`: no change.
    pub taken_by_others: Option<u64>,
}

impl Fault {
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: u32 = 100;
    /// `CUDA_ERROR_INVALID_PTX`.
    pub const INVALID_PTX: u32 = 218;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`. The device keeps returning it for the rest of the process.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`.
    pub const LAUNCH_OUT_OF_RESOURCES: u32 = 701;
    /// `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`.
    pub const DRIVER_MISMATCH: u32 = 803;

    /// Refuses the `nth` allocation of device memory, stream-ordered or not.
    pub fn refuse(nth: u64) -> Self {
        Self::at(Target::Allocation, nth, Self::OUT_OF_MEMORY)
    }

    /// Makes the `nth` call of a function return `error`.
    pub fn call(function: impl Into<String>, nth: u64, error: u32) -> Self {
        Self::at(Target::Function(function.into()), nth, error)
    }

    /// Makes other processes hold `bytes` on every device from the `nth` allocation on.
    pub fn others_take(nth: u64, bytes: u64) -> Self {
        Self { taken_by_others: Some(bytes), ..Self::at(Target::Allocation, nth, 0) }
    }

    fn at(target: Target, nth: u64, error: u32) -> Self {
        Self { target, nth, times: 1, error, delay: 0, taken_by_others: None }
    }

    /// Sets how many consecutive calls are affected.
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// Delays the affected calls, in microseconds.
    pub fn after(mut self, microseconds: u64) -> Self {
        self.delay = microseconds;
        self
    }

    /// Whether the fault affects this call.
    pub(crate) fn happens_at(&self, call: u64) -> bool {
        call >= self.nth && call - self.nth < self.times
    }
}

/// Which calls a [`Fault`] counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// Allocations of device memory. If a stream-ordered allocation is refused, CubeCL retries it
    /// without a stream. Both calls count as one allocation.
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
