//! The driver: what C programs call, and the state behind it.
//!
//! [`api`], [`nvrtc`] and [`nvml`] are the functions; each enters through `enter`, which counts the call and lets
//! the faults of the settings happen. `state` is all that the driver knows, `memory` what is allocated, `queue`
//! streams and events, [`signature`] what kernels take.

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

/// `CUresult`, as far as the driver answers it by itself.
pub mod result {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: u32 = 0;
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_NOT_INITIALIZED`.
    pub const NOT_INITIALIZED: u32 = 3;
    /// `CUDA_ERROR_STUB_LIBRARY`: what a driver without settings answers.
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
    /// The device of the context that is current, plus one.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// An allocation in a stream's order that was refused on this thread, with the answer if a fault did it. If it is asked
    /// for again without a stream, that is the same allocation.
    static REFUSED: Cell<Option<(usize, Option<u32>)>> = const { Cell::new(None) };
}

static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();

/// The driver; none if this process was given no settings.
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
    // SAFETY: `at_exit` is a function of C's kind that does not unwind.
    unsafe { libc::atexit(at_exit) };
    let journal = Mutex::new(Journal::create(folder, process));
    let state = Mutex::new(State::new(&settings));
    Some(Driver { settings, books, journal, state, allocations: AtomicU64::new(0) })
}

/// Writes what is alive when the process ends in order. CubeCL's services live as long as the process, so something is.
extern "C" fn at_exit() {
    let Some(Some(driver)) = DRIVER.get() else { return };
    // A thread that died in a call may hold the lock for ever.
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

    /// Adds a line to the journal.
    pub(crate) fn note(&self, entry: &Entry) {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).write(entry);
    }

    /// Says that the program did what it must not on a device.
    pub(crate) fn misuse(&self, device: usize, what_happened: String) {
        if device < self.books.devices() {
            self.books.device(device).count(crate::books::Field::Misuses);
        }
        eprintln!("blank driver: misuse: {what_happened}");
        self.note(&Entry::Misuse { what_happened });
    }

    /// Lets the faults of a call happen; an error is what it has to answer.
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

    /// Lets the faults of an allocation happen.
    pub(crate) fn suffer_allocation(&self) -> Result<(), u32> {
        let number = self.allocations.fetch_add(1, Relaxed) + 1;
        self.suffer(|target| *target == Target::Allocation, "allocation", number)
    }

    /// The device whose context is current.
    pub(crate) fn current_device(&self) -> Result<usize, u32> {
        self.healthy(current().ok_or(result::INVALID_CONTEXT)?)
    }

    /// The device with this number, unless it has failed.
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

/// Begins a call: counts it and lets its faults happen.
pub(crate) fn enter(call: Call) -> Result<&'static Driver, u32> {
    let driver = driver().ok_or(result::STUB_LIBRARY)?;
    let number = driver.books.count_call(call);
    let is_target =
        |target: &Target| matches!(target, Target::Function(name) if name == call.name());
    driver.suffer(is_target, call.name(), number)?;
    Ok(driver)
}

/// What a call answers.
pub(crate) fn answer(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(result::SUCCESS)
}
