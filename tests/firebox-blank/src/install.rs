//! Puts the driver on the library path of child processes and finds the files they leave.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::books::{Books, BooksError, MAX_DEVICES};
use crate::journal::{Entry, JournalError, read_journal};
use crate::settings::{SETTINGS_VARIABLE, Settings};

/// File name of the library cargo builds from this crate.
const LIBRARY: &str = "libfirebox_blank.so";
/// Names under which programs look for the driver, NVML and NVRTC.
const NAMES: [&str; 6] = [
    "libcuda.so",
    "libcuda.so.1",
    "libnvidia-ml.so",
    "libnvidia-ml.so.1",
    "libnvrtc.so",
    "libnvrtc.so.13",
];
/// Headers that CubeCL's kernels include (`cubecl-cpp`, `cuda/dialect.rs`). The NVRTC stub only
/// checks that they exist, so they are installed as empty files.
const HEADERS: [&str; 12] = [
    "cooperative_groups.h",
    "cooperative_groups/memcpy_async.h",
    "cuda/barrier",
    "cuda/pipeline",
    "cuda/ptx",
    "cuda_bf16.h",
    "cuda_fp16.h",
    "cuda_fp4.h",
    "cuda_fp6.h",
    "cuda_fp8.h",
    "cuda_runtime.h",
    "mma.h",
];

/// Why the driver cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The library was not found.
    #[error("{LIBRARY} is not near {program}: build the package firebox-blank in the same profile", program = program.display())]
    NoLibrary {
        /// Path of the program that looked for it.
        program: PathBuf,
    },
    /// The settings have more devices than the driver supports.
    #[error("{asked} devices are more than {MAX_DEVICES}")]
    TooManyDevices {
        /// Number of devices in the settings.
        asked: usize,
    },
    /// A file cannot be written.
    #[error("the driver cannot be installed: {0}")]
    File(#[from] std::io::Error),
    /// The settings cannot be written.
    #[error("the settings cannot be written: {0}")]
    Settings(#[from] serde_json::Error),
}

/// The driver, installed in a folder of its own for child processes. Dropping it removes the
/// folder.
#[derive(Debug)]
pub struct Blank {
    folder: tempfile::TempDir,
}

impl Blank {
    /// Installs the driver with these settings, including the stubs of NVML and NVRTC.
    ///
    /// # Errors
    ///
    /// The settings have more than [`MAX_DEVICES`] devices, the library is not next to the running
    /// program, where cargo puts it, or the folder cannot be written.
    pub fn install(settings: &Settings) -> Result<Self, InstallError> {
        if settings.devices.len() > MAX_DEVICES {
            return Err(InstallError::TooManyDevices { asked: settings.devices.len() });
        }
        let library = library()?;
        let folder = tempfile::Builder::new().prefix("firebox-blank-").tempdir()?;
        let link = |name: &str| std::os::unix::fs::symlink(&library, folder.path().join(name));
        NAMES.iter().try_for_each(|name| link(name))?;
        for header in HEADERS {
            let path = folder.path().join("cuda/include").join(header);
            std::fs::create_dir_all(path.parent().unwrap_or(folder.path()))?;
            std::fs::write(path, "")?;
        }
        std::fs::write(folder.path().join("settings"), serde_json::to_string_pretty(settings)?)?;
        Ok(Self { folder })
    }

    /// A command that runs `program` on the driver.
    ///
    /// Sets `LD_LIBRARY_PATH`, `CUDA_PATH` and [`SETTINGS_VARIABLE`], and removes
    /// `CUDA_VISIBLE_DEVICES`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let mut paths = vec![self.folder.path().to_owned()];
        let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        paths.extend(std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()));
        let paths = std::env::join_paths(paths).unwrap_or_default();
        command.env("LD_LIBRARY_PATH", paths);
        command.env(SETTINGS_VARIABLE, self.folder.path().join("settings"));
        command.env_remove("CUDA_VISIBLE_DEVICES");
        command.env("CUDA_PATH", self.folder.path().join("cuda"));
        command
    }

    /// The folder that holds the settings, books and journals.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The books of a process that loaded the driver and called it.
    ///
    /// # Errors
    ///
    /// The process has no books, or they cannot be read.
    pub fn books_of(&self, process: u32) -> Result<Books, BooksError> {
        Books::open(&Books::path(self.folder(), process))
    }

    /// The books of all processes, in no particular order.
    ///
    /// # Errors
    ///
    /// A file cannot be read.
    pub fn books(&self) -> Result<Vec<Books>, BooksError> {
        let unreadable = |cause| BooksError::Unreadable { path: self.folder().to_owned(), cause };
        let mut books = Vec::new();
        for entry in std::fs::read_dir(self.folder()).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            if entry.file_name().to_string_lossy().starts_with("books.") {
                books.push(Books::open(&entry.path())?);
            }
        }
        Ok(books)
    }

    /// The journal of a process.
    ///
    /// # Errors
    ///
    /// There is no journal, or it cannot be parsed.
    pub fn journal_of(&self, process: u32) -> Result<Vec<Entry>, JournalError> {
        read_journal(self.folder(), process)
    }
}

/// Finds the library, which cargo puts next to the programs that depend on this crate.
fn library() -> Result<PathBuf, InstallError> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("."));
    // Tests and benches are in `deps` like the library; examples are in a sibling folder of `deps`.
    let places = [folder.to_owned(), folder.join("deps"), folder.join("../deps")];
    let found = places.iter().map(|place| place.join(LIBRARY)).find(|path| path.exists());
    match found {
        Some(path) => Ok(path.canonicalize()?),
        None => Err(InstallError::NoLibrary { program }),
    }
}
