//! Checks whether CUDA can be used at all. cubecl-cuda looks for these things only when it needs
//! them, and then panics on a thread of its own. Called through `DeviceMemory::prerequisites`
//! before training.

use std::path::Path;

use cubecl::cuda::install::cuda_path;
use cudarc::driver::sys::CUDA_VERSION;

use crate::device::nvidia::driver_is_there;
use crate::device::nvidia_error::{HEADER, Looked, NvidiaError, Version};
use crate::device::panics::panic_message;

/// Checks that CUDA can be used. It needs the driver and at least one device, NVRTC, which compiles
/// kernels at run time, and CUDA's headers.
///
/// A Learner calls this before it trains. A program that creates tensors earlier should call it
/// first, because burn panics about what is missing or silently continues:
///
/// ```no_run
/// firebox_train::check_cuda()?;
/// # Ok::<(), firebox_train::NvidiaError>(())
/// ```
///
/// # Errors
///
/// What is missing or too old, and what to install or set.
pub fn check_cuda() -> Result<(), NvidiaError> {
    if !driver_is_there() {
        return Err(NvidiaError::NoDriver);
    }
    if !compiler_is_there() {
        return Err(NvidiaError::NoCompiler { version: Version(CUDA_VERSION as i32) });
    }
    let found = cuda_path();
    if !found.as_ref().is_some_and(|path| has_headers(path)) {
        return Err(NvidiaError::NoHeaders { looked: Looked(found) });
    }
    // cudarc panics about functions that an old driver does not have.
    let asked = std::thread::spawn(ask_versions).join();
    let (driver, compiler) = match asked {
        Ok(versions) => versions?,
        Err(panic) => return Err(NvidiaError::Unusable { cause: panic_message(&*panic) }),
    };
    check_versions(driver, compiler, Version(CUDA_VERSION as i32))
}

/// A driver refuses the output of a newer compiler, and lacks functions of a newer generation.
fn check_versions(driver: Version, compiler: Version, built: Version) -> Result<(), NvidiaError> {
    if driver < compiler {
        return Err(NvidiaError::DriverTooOld { driver, needed: compiler, of: "NVRTC" });
    }
    if driver.major() < built.major() {
        return Err(NvidiaError::DriverTooOld { driver, needed: built, of: "this program" });
    }
    if driver < built {
        log::warn!(
            "the driver knows CUDA {driver}, and this program was built for {built}: set CUDARC_CUDA_VERSION={} when \
             building it",
            driver.0 / 10 * 10,
        );
    }
    Ok(())
}

fn has_headers(cuda: &Path) -> bool {
    cuda.join(HEADER).exists()
}

#[allow(unsafe_code, reason = "cudarc declares the question unsafe")]
fn compiler_is_there() -> bool {
    // SAFETY: loads NVRTC's library and releases it, as every program that compiles kernels does.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

/// The newest CUDA version that the driver supports, and the version of NVRTC. Fails without a
/// device.
#[allow(unsafe_code, reason = "cudarc has no safe way to ask")]
fn ask_versions() -> Result<(Version, Version), NvidiaError> {
    let unusable =
        |error: cudarc::driver::DriverError| NvidiaError::Unusable { cause: error.to_string() };
    cudarc::driver::result::init().map_err(unusable)?;
    let count = cudarc::driver::result::device::get_count().map_err(unusable)?;
    if count == 0 {
        return Err(NvidiaError::Unusable { cause: "it lists no device".to_owned() });
    }
    let (mut driver, mut major, mut minor) = (0, 0, 0);
    // SAFETY: both calls write numbers to local variables of this function.
    let asked = unsafe {
        let asked = cudarc::driver::sys::cuDriverGetVersion(&mut driver).result();
        let compiler = cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
        asked.map(|()| compiler)
    };
    match asked.map_err(unusable)? {
        cudarc::nvrtc::sys::nvrtcResult::NVRTC_SUCCESS => {
            Ok((Version(driver), Version(major * 1000 + minor * 10)))
        }
        error => Err(NvidiaError::Unusable { cause: format!("NVRTC says {error:?}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(driver: i32, compiler: i32, built: i32, expected: Option<&str>) {
        let found = check_versions(Version(driver), Version(compiler), Version(built));
        let message = found.err().map(|error| error.to_string());
        match expected {
            None => assert_eq!(message, None),
            Some(words) => {
                assert!(message.as_ref().is_some_and(|m| m.contains(words)), "{message:?}")
            }
        }
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_from_one_that_is_not() {
        check(13000, 13000, 13000, None);
        check(13020, 12080, 12080, None);
        check(13000, 13000, 13040, None);
        check(12080, 13000, 12080, Some("NVRTC needs 13.0"));
        check(12080, 12080, 13000, Some("CUDARC_CUDA_VERSION=12080"));
        check(11040, 12000, 13000, Some("knows CUDA 11.4"));
    }

    #[test]
    fn headers_are_looked_for_where_cuda_is() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(!has_headers(folder.path()));
        std::fs::create_dir(folder.path().join("include")).expect("the folder is empty");
        std::fs::write(folder.path().join(HEADER), "").expect("the folder is there");
        assert!(has_headers(folder.path()));
        let looked = Looked(Some("/opt/cuda".into())).to_string();
        assert_eq!(looked, "/opt/cuda has no `include/cuda_runtime.h`");
    }
}
