//! Why an NVIDIA device cannot be used. `nvidia.rs` and `prerequisites.rs` find out.

use std::path::PathBuf;

/// The header that every kernel of CubeCL includes.
pub(crate) const HEADER: &str = "include/cuda_runtime.h";

/// Why CUDA cannot be used, or why the memory of an NVIDIA device is unknown.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvidiaError {
    /// The driver's library cannot be loaded.
    #[error(
        "there is no NVIDIA driver: the library `libcuda` cannot be loaded; install the driver, or in a container pass \
         the device through"
    )]
    NoDriver,
    /// The library that compiles kernels cannot be loaded.
    #[error(
        "kernels cannot be compiled: the library `libnvrtc` cannot be loaded; install the CUDA toolkit {version} or \
         Python's package `nvidia-cuda-nvrtc`, and name the folder with the library in `LD_LIBRARY_PATH`"
    )]
    NoCompiler {
        /// The version of CUDA that the program was built for.
        version: Version,
    },
    /// The headers that kernels include were not found.
    #[error(
        "kernels cannot be compiled: {looked}; install the CUDA toolkit, and set `CUDA_PATH` to the folder in which its \
         `include` lies, such as /usr/local/cuda"
    )]
    NoHeaders {
        /// Where they were looked for.
        looked: Looked,
    },
    /// The driver is older than what must run on it.
    #[error(
        "the NVIDIA driver knows CUDA {driver}, and {of} needs {needed}: update the driver, or install the CUDA toolkit \
         {driver} and build the program with `CUDARC_CUDA_VERSION={number}`", number = driver.0
    )]
    DriverTooOld {
        /// The newest CUDA version that the driver supports.
        driver: Version,
        /// The required version.
        needed: Version,
        /// What requires it.
        of: &'static str,
    },
    /// The driver exists but does not work.
    #[error(
        "the NVIDIA driver cannot be used: {cause}; see whether `nvidia-smi` lists a device and whether \
         `CUDA_VISIBLE_DEVICES` hides it"
    )]
    Unusable {
        /// Its error.
        cause: String,
    },
    /// The driver cannot report the memory of a device.
    #[error(
        "the NVIDIA driver cannot tell the memory of device {device}: {cause}; see whether `nvidia-smi` lists it and \
         whether `CUDA_VISIBLE_DEVICES` hides it"
    )]
    Driver {
        /// The number of the device, as CUDA counts visible devices.
        device: usize,
        /// The driver's error.
        cause: String,
    },
}

/// A CUDA version in the driver's notation: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl Version {
    pub(crate) const fn major(self) -> i32 {
        self.0 / 1000
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major(), self.0 % 1000 / 10)
    }
}

/// Where CUDA's headers were looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked(pub(crate) Option<PathBuf>);

impl std::fmt::Display for Looked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some(path) => write!(f, "{} has no `{HEADER}`", path.display()),
            None => write!(f, "CUDA is in none of the usual folders"),
        }
    }
}
