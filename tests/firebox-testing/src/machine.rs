//! The machine that CUDA tests and benches run on.
//!
//! It is an NVIDIA device if there is one. Otherwise child processes run on the blank driver, as a
//! card of the table.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use firebox::Bytes;
use firebox_blank::{Blank, Books, Device, InstallError, SETTINGS_VARIABLE, Settings};
use firebox_dry::Card;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

/// Stack size in bytes of a thread that tunes a kernel in an unoptimised build.
const STACK: &str = "16777216";

/// Where child processes run.
pub enum Machine {
    /// On the same machine as this process.
    Here,
    /// On the blank driver.
    Blank {
        /// Name of the card.
        name: String,
        blank: Blank,
    },
}

impl Machine {
    /// The blank driver with these settings.
    pub fn with(name: &str, settings: &Settings) -> Result<Self, InstallError> {
        Ok(Self::Blank { name: name.to_owned(), blank: Blank::install(settings)? })
    }

    /// Name of the card on the blank driver.
    pub fn card(&self) -> Option<&str> {
        match self {
            Self::Here => None,
            Self::Blank { name, .. } => Some(name),
        }
    }

    /// A command that runs `program` on this machine.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = match self {
            Self::Here => Command::new(program),
            Self::Blank { blank, .. } => blank.command(program),
        };
        command.env("RUST_BACKTRACE", "0").env("RUST_MIN_STACK", STACK);
        command
    }
}

/// The properties of a card that the blank driver needs.
pub fn device(card: &Card) -> Device {
    let (capability, memory) = (card.capability(), card.memory().get());
    let capability = (capability.major, capability.minor);
    Device::new(card.name(), memory, capability, card.multiprocessors())
        .with_shared_memory(card.shared_memory().get() as u32)
        .with_context(card.context().get())
}

/// Whether there is an NVIDIA device.
pub fn has_nvidia() -> bool {
    ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
}

/// What this process holds on the machine's first NVIDIA device, with CUDA's context. `None` if
/// NVML does not tell, as in a container with its own process numbers.
pub fn held_by_process() -> Option<Bytes> {
    let nvml = Nvml::init().ok()?;
    let processes = nvml.device_by_index(0).ok()?.running_compute_processes().ok()?;
    let own = processes.into_iter().find(|process| process.pid == std::process::id())?;
    match own.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes::new(bytes)),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Whether this process runs on the blank driver.
pub fn is_blank() -> bool {
    std::env::var_os(SETTINGS_VARIABLE).is_some()
}

/// The most bytes that the blank driver has given this process on the first device.
pub fn peak() -> Option<Bytes> {
    Books::own().map(|books| Bytes::new(books.device(0).peak()))
}

/// Same as [`peak`], since the last [`forget_peak`].
pub fn recent_peak() -> Option<Bytes> {
    Books::own().map(|books| Bytes::new(books.device(0).recent_peak()))
}

/// Resets [`recent_peak`].
pub fn forget_peak() {
    if let Some(books) = Books::own() {
        books.device(0).forget_peak();
    }
}
