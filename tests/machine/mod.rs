//! The machine that tests and benches of CUDA run on: an NVIDIA device if there is one, or else the blank driver, as a card of
//! the table, for child processes.

#![allow(dead_code, reason = "no suite uses all of it")]

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use firebox::Bytes;
use firebox_blank::{Blank, Books, Device, InstallError, SETTINGS_VARIABLE, Settings};
use firebox_dry::Card;

/// The stack of a thread from which a kernel is tuned, in a build that is not optimised.
const STACK: &str = "16777216";

/// Where child processes run.
pub enum Machine {
    /// As this process does.
    Here,
    /// On the blank driver.
    Blank {
        /// The name of the card.
        name: String,
        blank: Blank,
    },
}

impl Machine {
    /// The blank driver with these settings.
    pub fn with(name: &str, settings: &Settings) -> Result<Self, InstallError> {
        Ok(Self::Blank { name: name.to_owned(), blank: Blank::install(settings)? })
    }

    /// The name of the card, if it is blank.
    pub fn card(&self) -> Option<&str> {
        match self {
            Self::Here => None,
            Self::Blank { name, .. } => Some(name),
        }
    }

    /// A command that runs `program` there.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = match self {
            Self::Here => Command::new(program),
            Self::Blank { blank, .. } => blank.command(program),
        };
        command.env("RUST_BACKTRACE", "0").env("RUST_MIN_STACK", STACK);
        command
    }
}

/// What the blank driver has to know of a card.
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

/// Whether this process runs on the blank driver.
pub fn is_blank() -> bool {
    std::env::var_os(SETTINGS_VARIABLE).is_some()
}

/// The most that the blank driver has given this process on the first device.
pub fn peak() -> Option<Bytes> {
    Books::own().map(|books| Bytes::new(books.device(0).peak()))
}

/// The same since the last [`forget_peak`].
pub fn recent_peak() -> Option<Bytes> {
    Books::own().map(|books| Bytes::new(books.device(0).recent_peak()))
}

/// Lets [`recent_peak`] begin anew.
pub fn forget_peak() {
    if let Some(books) = Books::own() {
        books.device(0).forget_peak();
    }
}
