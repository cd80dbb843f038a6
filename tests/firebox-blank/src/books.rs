//! What the driver counts. The counters are in a file mapped by both the driver and the test, so
//! they can be read while a process runs and after it has crashed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use memmap2::MmapMut;

/// The largest number of devices supported.
pub const MAX_DEVICES: usize = 8;

const MAGIC: u64 = 0x66_69_72_65_62_6f_78_31;
/// Room for the counters of one device.
const FIELDS: usize = 24;
/// The number of values before the first device: magic word, number of devices, pinned bytes, their
/// peak, and one call count per function.
const HEAD: usize = 4 + Call::COUNT;

macro_rules! calls {
    ($($name:ident)*) => {
        /// A function of the driver, under its C name.
        #[allow(non_camel_case_types, reason = "the names are C's")]
        #[allow(missing_docs, reason = "the names are C's")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Call {
            $($name),*
        }

        impl Call {
            /// All functions.
            pub const ALL: &[Self] = &[$(Self::$name),*];
            /// The number of functions.
            pub const COUNT: usize = Self::ALL.len();

            /// The C name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name)),*
                }
            }
        }
    };
}

calls! {
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
    cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceGetAttribute
    cuDeviceGetPCIBusId cuDeviceTotalMem_v2 cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2
    cuCtxSetCurrent cuCtxGetCurrent cuCtxSynchronize
    cuMemGetInfo_v2 cuMemAllocAsync cuMemFreeAsync cuMemAlloc_v2 cuMemFree_v2 cuMemAllocHost_v2 cuMemFreeHost
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpy2DAsync_v2 cuMemsetD8Async
    cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent
    cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize cuEventDestroy_v2 cuEventElapsedTime
    cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncSetAttribute cuLaunchKernel
    cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide
    nvrtcCreateProgram nvrtcDestroyProgram nvrtcCompileProgram nvrtcGetPTXSize nvrtcGetPTX
    nvrtcGetProgramLogSize nvrtcGetProgramLog nvrtcGetErrorString nvrtcVersion
    nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlErrorString nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex_v2
    nvmlDeviceGetHandleByUUID nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetMemoryInfo
    nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetGraphicsRunningProcesses_v3
}

/// Why books cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BooksError {
    /// The file cannot be opened or mapped.
    #[error("{path} cannot be read: {cause}; did the process load the driver?", path = path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
    /// The file does not hold books.
    #[error("{path} holds no books of the blank driver", path = path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
    },
}

/// The books of one process.
pub struct Books {
    map: MmapMut,
}

impl Books {
    const BYTES: usize = (HEAD + MAX_DEVICES * FIELDS) * size_of::<u64>();

    /// The file in which the process with this number keeps its books.
    pub fn path(folder: &Path, process: u32) -> PathBuf {
        folder.join(format!("books.{process}"))
    }

    /// Creates the books of a process.
    pub(crate) fn create(folder: &Path, process: u32, devices: usize) -> Result<Self, BooksError> {
        let path = Self::path(folder, process);
        let unreadable = |cause| BooksError::Unreadable { path: path.clone(), cause };
        let mut options = File::options();
        let file = options.create(true).truncate(true).read(true).write(true).open(&path);
        let file = file.map_err(unreadable)?;
        file.set_len(Self::BYTES as u64).map_err(unreadable)?;
        // SAFETY: this process owns the file. Others change its numbers only through atomics.
        let map = unsafe { MmapMut::map_mut(&file) }.map_err(unreadable)?;
        let books = Self { map };
        books.number(1).store(devices as u64, Relaxed);
        books.number(0).store(MAGIC, Relaxed);
        Ok(books)
    }

    /// Opens the books of a process, which may still be running.
    ///
    /// # Errors
    ///
    /// The file cannot be opened or mapped, or does not hold books.
    pub fn open(path: &Path) -> Result<Self, BooksError> {
        let unreadable = |cause| BooksError::Unreadable { path: path.to_owned(), cause };
        let file = File::options().read(true).write(true).open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let foreign = || BooksError::Foreign { path: path.to_owned() };
        if length != Self::BYTES as u64 {
            return Err(foreign());
        }
        // SAFETY: all sides access the numbers only through atomics.
        let map = unsafe { MmapMut::map_mut(&file) }.map_err(unreadable)?;
        let books = Self { map };
        if books.number(0).load(Relaxed) == MAGIC { Ok(books) } else { Err(foreign()) }
    }

    /// The books of the current process. `None` if it does not run on the blank driver or has not
    /// called it yet.
    pub fn own() -> Option<Self> {
        let settings = std::env::var_os(crate::SETTINGS_VARIABLE)?;
        let folder = Path::new(&settings).parent()?;
        Self::open(&Self::path(folder, std::process::id())).ok()
    }

    /// The number of devices.
    pub fn devices(&self) -> usize {
        (self.number(1).load(Relaxed) as usize).min(MAX_DEVICES)
    }

    /// The counters of a device.
    ///
    /// # Panics
    ///
    /// If the device does not exist.
    pub fn device(&self, device: usize) -> DeviceBooks<'_> {
        assert!(device < self.devices(), "there is no device {device}");
        DeviceBooks { books: self, device }
    }

    /// Pinned host memory held, in bytes.
    pub fn pinned(&self) -> u64 {
        self.number(2).load(Relaxed)
    }

    /// Peak of the pinned host memory held, in bytes.
    pub fn pinned_peak(&self) -> u64 {
        self.number(3).load(Relaxed)
    }

    /// How often a function was called.
    pub fn calls(&self, call: Call) -> u64 {
        self.number(4 + call as usize).load(Relaxed)
    }

    /// Makes other processes hold `bytes` of a device from now on.
    pub fn set_taken_by_others(&self, device: usize, bytes: u64) {
        self.device(device).field(Field::TakenByOthers).store(bytes, Relaxed);
    }

    pub(crate) fn count_call(&self, call: Call) -> u64 {
        self.number(4 + call as usize).fetch_add(1, Relaxed) + 1
    }

    pub(crate) fn set_pinned(&self, bytes: u64) {
        self.number(2).store(bytes, Relaxed);
        self.number(3).fetch_max(bytes, Relaxed);
    }

    fn number(&self, index: usize) -> &AtomicU64 {
        let numbers = self.map.as_ptr().cast::<AtomicU64>();
        assert!(index < Self::BYTES / size_of::<AtomicU64>());
        // SAFETY: a map begins at a page, its length was checked, and all sides access it only
        // through atomics.
        unsafe { &*numbers.add(index) }
    }
}

/// The counters of a device, by position.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    Held,
    Peak,
    RecentPeak,
    TakenByOthers,
    Context,
    Allocations,
    Frees,
    Refused,
    Launches,
    ToDevice,
    ToHost,
    WithinDevice,
    Streams,
    StreamsAlive,
    Events,
    EventsAlive,
    Modules,
    Misuses,
}

/// The counters of one device.
#[derive(Clone, Copy)]
pub struct DeviceBooks<'a> {
    books: &'a Books,
    device: usize,
}

macro_rules! numbers {
    ($($(#[doc = $doc:literal])* $name:ident: $field:ident;)*) => {
        impl DeviceBooks<'_> {
            $($(#[doc = $doc])*
            pub fn $name(&self) -> u64 {
                self.field(Field::$field).load(Relaxed)
            })*
        }
    };
}

numbers! {
    /// Bytes the process holds, without its context.
    held: Held;
    /// Peak of the bytes the process held, without its context.
    peak: Peak;
    /// Peak of the bytes the process held since the last [`forget_peak`](Self::forget_peak),
    /// without its context.
    recent_peak: RecentPeak;
    /// Bytes other processes hold.
    taken_by_others: TakenByOthers;
    /// Bytes of the context; 0 while there is none.
    context: Context;
    /// Number of allocations.
    allocations: Allocations;
    /// Number of frees.
    frees: Frees;
    /// Number of allocations refused.
    refused: Refused;
    /// Number of kernel launches.
    launches: Launches;
    /// Number of copies from the host to the device.
    copies_to_device: ToDevice;
    /// Number of copies from the device to the host.
    copies_to_host: ToHost;
    /// Number of copies and fills within the device.
    copies_within_device: WithinDevice;
    /// Number of streams ever created.
    streams: Streams;
    /// Number of streams that exist now.
    streams_alive: StreamsAlive;
    /// Number of events ever created.
    events: Events;
    /// Number of events that exist now.
    events_alive: EventsAlive;
    /// Number of modules loaded.
    modules: Modules;
    /// Number of misuses. The journal describes each.
    misuses: Misuses;
}

impl DeviceBooks<'_> {
    /// Restarts [`recent_peak`](Self::recent_peak) from the bytes held now.
    pub fn forget_peak(&self) {
        self.field(Field::RecentPeak).store(self.held(), Relaxed);
    }

    pub(crate) fn field(&self, field: Field) -> &AtomicU64 {
        self.books.number(HEAD + self.device * FIELDS + field as usize)
    }

    pub(crate) fn count(&self, field: Field) -> u64 {
        self.field(field).fetch_add(1, Relaxed) + 1
    }

    pub(crate) fn end(&self, field: Field) {
        self.field(field).fetch_sub(1, Relaxed);
    }

    pub(crate) fn set_held(&self, bytes: u64) {
        self.field(Field::Held).store(bytes, Relaxed);
        self.field(Field::Peak).fetch_max(bytes, Relaxed);
        self.field(Field::RecentPeak).fetch_max(bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_seen_by_both_sides() {
        assert!((Field::Misuses as usize) < FIELDS);
        let folder = tempfile::tempdir().unwrap();
        let ours = Books::create(folder.path(), 7, 2).unwrap();
        let theirs = Books::open(&Books::path(folder.path(), 7)).unwrap();
        assert_eq!(theirs.devices(), 2);
        ours.device(1).set_held(300);
        ours.device(1).set_held(100);
        assert_eq!((theirs.device(1).held(), theirs.device(1).peak()), (100, 300));
        assert_eq!(theirs.device(0).peak(), 0);
        theirs.device(1).forget_peak();
        ours.device(1).set_held(200);
        assert_eq!(theirs.device(1).recent_peak(), 200);
        theirs.set_taken_by_others(0, 5);
        assert_eq!(ours.device(0).taken_by_others(), 5);
        assert_eq!(ours.count_call(Call::cuLaunchKernel), 1);
        assert_eq!(theirs.calls(Call::cuLaunchKernel), 1);
    }

    #[test]
    fn other_files_are_no_books() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("books.1");
        assert!(matches!(Books::open(&path), Err(BooksError::Unreadable { .. })));
        std::fs::write(&path, "something else").unwrap();
        assert!(matches!(Books::open(&path), Err(BooksError::Foreign { .. })));
        std::fs::write(&path, vec![0; Books::BYTES]).unwrap();
        assert!(matches!(Books::open(&path), Err(BooksError::Foreign { .. })));
    }
}
