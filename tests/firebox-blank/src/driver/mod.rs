//! The driver: the functions C programs call, and the state they work on.
//!
//! [`api`], [`nvrtc`] and [`nvml`] define the functions. Each enters through `enter`, which counts
//! the call and injects the faults of the settings. `state` holds everything the driver knows,
//! `memory` the allocations, `queue` the streams and events, [`signature`] the parameters of
//! kernels.

pub mod api;
pub mod nvml;
pub mod nvrtc;
pub mod signature;

mod memory;
mod queue;
mod state;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use self::state::State;
use crate::books::{Books, Call};
use crate::journal::{Entry, Journal};
use crate::settings::{SETTINGS_VARIABLE, Settings, Target};

/// The values of `CUresult` the driver returns on its own.
pub mod result {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: u32 = 0;
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NOT_INITIALIZED`.
    pub const NOT_INITIALIZED: u32 = 3;
    /// `CUDA_ERROR_STUB_LIBRARY`: returned by a driver without settings.
    pub const STUB_LIBRARY: u32 = 34;
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: u32 = 100;
    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub const INVALID_DEVICE: u32 = 101;
    /// `CUDA_ERROR_INVALID_IMAGE`.
    pub const INVALID_IMAGE: u32 = 200;
    /// `CUDA_ERROR_INVALID_CONTEXT`.
    pub const INVALID_CONTEXT: u32 = 201;
    /// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`: the compiler is newer than the driver.
    pub const UNSUPPORTED_PTX_VERSION: u32 = 222;
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub const INVALID_HANDLE: u32 = 400;
    /// `CUDA_ERROR_NOT_FOUND`.
    pub const NOT_FOUND: u32 = 500;
    /// `CUDA_ERROR_NOT_READY`.
    pub const NOT_READY: u32 = 600;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub const ILLEGAL_ADDRESS: u32 = 700;
}

/// The driver of this process.
pub(crate) struct Driver {
    pub(crate) settings: Settings,
    pub(crate) books: Books,
    journal: Mutex<Journal>,
    state: Mutex<State>,
    allocations: AtomicU64,
}

thread_local! {
    /// Number of the device whose context is current, plus one. Zero: no current context.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The last stream-ordered allocation refused on this thread: its bytes, and the error if a
    /// fault refused it. A retry without a stream counts as the same allocation.
    static REFUSED: Cell<Option<(usize, Option<u32>)>> = const { Cell::new(None) };
}

static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();

/// The driver. `None` if this process has no settings.
fn driver() -> Option<&'static Driver> {
    DRIVER.get_or_init(load).as_ref()
}

fn load() -> Option<Driver> {
    let path = PathBuf::from(std::env::var_os(SETTINGS_VARIABLE)?);
    let complain = |what: &str| eprintln!("blank driver: {}: {what}", path.display());
    let text = std::fs::read_to_string(&path).map_err(|error| complain(&error.to_string())).ok()?;
    let settings: Settings =
        serde_json::from_str(&text).map_err(|error| complain(&error.to_string())).ok()?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let process = std::process::id();
    let books = Books::create(folder, process, settings.devices.len());
    let books = books.map_err(|error| complain(&error.to_string())).ok()?;
    for (number, device) in settings.devices.iter().enumerate() {
        books.set_taken_by_others(number, device.taken_by_others);
    }
    // SAFETY: `at_exit` has the C calling convention and does not unwind.
    unsafe { libc::atexit(at_exit) };
    let journal = Mutex::new(Journal::create(folder, process));
    let state = Mutex::new(State::new(&settings));
    Some(Driver { settings, books, journal, state, allocations: AtomicU64::new(0) })
}

/// Journals what is still allocated when the process ends normally. There is always something,
/// because CubeCL's services live as long as the process.
extern "C" fn at_exit() {
    let Some(Some(driver)) = DRIVER.get() else { return };
    // A thread that died during a call may hold the lock forever.
    let Ok(state) = driver.state.try_lock() else { return };
    let alive: Vec<u64> = state.devices.iter().flat_map(|device| device.memory.sizes()).collect();
    let (allocations, bytes) = (alive.len() as u64, alive.iter().sum());
    drop(state);
    driver.note(&Entry::Ended { allocations, bytes });
}

impl Driver {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a line to the journal.
    pub(crate) fn note(&self, entry: &Entry) {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).write(entry);
    }

    /// Reports that the program misused the driver on a device.
    pub(crate) fn misuse(&self, device: usize, what_happened: String) {
        if device < self.books.devices() {
            self.books.device(device).count(crate::books::Field::Misuses);
        }
        eprintln!("blank driver: misuse: {what_happened}");
        self.note(&Entry::Misuse { what_happened });
    }

    /// Injects the faults of a call. `Err` is the result the call must return.
    fn suffer(
        &self,
        is_target: impl Fn(&Target) -> bool,
        name: &str,
        call: u64,
    ) -> Result<(), u32> {
        let faults = self.settings.faults.iter().filter(|fault| is_target(&fault.target));
        for fault in faults.filter(|fault| fault.happens_at(call)) {
            if fault.delay > 0 {
                std::thread::sleep(Duration::from_micros(fault.delay));
            }
            if let Some(bytes) = fault.taken_by_others {
                (0..self.books.devices())
                    .for_each(|device| self.books.set_taken_by_others(device, bytes));
            }
            let error = fault.error;
            self.note(&Entry::Fault { function: name.to_owned(), call, error });
            if error == result::ILLEGAL_ADDRESS
                && let Some(device) = self.state().devices.get_mut(current().unwrap_or(0))
            {
                device.failed = Some(error);
            }
            if error != result::SUCCESS {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Injects the faults of an allocation.
    pub(crate) fn suffer_allocation(&self) -> Result<(), u32> {
        let number = self.allocations.fetch_add(1, Relaxed) + 1;
        self.suffer(|target| *target == Target::Allocation, "allocation", number)
    }

    /// The device whose context is current, unless it has failed.
    pub(crate) fn current_device(&self) -> Result<usize, u32> {
        self.healthy(current().ok_or(result::INVALID_CONTEXT)?)
    }

    /// Returns the device number, unless the device has failed or does not exist.
    pub(crate) fn healthy(&self, device: usize) -> Result<usize, u32> {
        match self.state().devices.get(device).map(|device| device.failed) {
            Some(Some(error)) => Err(error),
            Some(None) => Ok(device),
            None => Err(result::INVALID_CONTEXT),
        }
    }
}

fn current() -> Option<usize> {
    CURRENT.get().checked_sub(1)
}

/// Begins a call: counts it and injects its faults.
pub(crate) fn enter(call: Call) -> Result<&'static Driver, u32> {
    let driver = driver().ok_or(result::STUB_LIBRARY)?;
    let number = driver.books.count_call(call);
    let is_target =
        |target: &Target| matches!(target, Target::Function(name) if name == call.name());
    driver.suffer(is_target, call.name(), number)?;
    Ok(driver)
}

/// The `CUresult` a call returns.
pub(crate) fn answer(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(result::SUCCESS)
}
