//! Where burn's tuner keeps its choices on disk, and how a dry device gets those of a real one.
//!
//! A tuner stores the fastest candidates under the name of the device, and reads the file when it
//! first meets the device. A dry device has a new name for each run in which the tuner takes part.
//! Under it lies a copy of what is stored for the real device, and nothing else. So the run chooses
//! as the real device would, tunes what that device would have to tune, and leaves its files as
//! they were. The copy is removed after the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cubecl_common::device::DeviceId;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};

/// The version under which CubeCL stores choices: its own (`CacheOption` in `cache.rs` of
/// cubecl-common).
const VERSION: &str = "0.10.0";

/// The next number for a name of this process.
static NAMES: AtomicU64 = AtomicU64::new(0);

/// The name of a dry device in one run.
#[derive(Debug)]
pub(crate) struct Name {
    /// The beginning of the name.
    stem: String,
    now: &'static str,
    /// Whether a tuner knows the name.
    used: bool,
}

impl Name {
    pub(crate) fn new(stem: String) -> Self {
        Self { now: leaked(&stem), stem, used: false }
    }

    pub(crate) fn get(&self) -> &'static str {
        self.now
    }

    /// Makes the device choose as the one that the tuner stores as `real`, if there is one, and as
    /// if the tuner had just met it.
    pub(crate) fn begin(&mut self, device: DeviceId, real: Option<&str>) {
        let filed = real.map(folder).filter(|folder| folder.is_dir());
        if self.used || filed.is_some() {
            self.now = leaked(&self.stem);
            self.used = false;
        }
        if let Some(filed) = filed
            && let Err(error) = copy(&filed, &self.folder(device))
        {
            log::warn!("what is tuned on the real device cannot be looked at: {error}");
        }
    }

    /// Removes what the tuner has stored.
    pub(crate) fn end(&mut self, device: DeviceId) {
        let folder = self.folder(device);
        self.used = folder.is_dir();
        if self.used
            && let Err(error) = fs::remove_dir_all(&folder)
        {
            log::warn!("{} is left behind: {error}", folder.display());
        }
    }

    fn folder(&self, device: DeviceId) -> PathBuf {
        // As `CubeTuneId` of cubecl-core is written.
        folder(&format!("device-{}-{}-{}", device.type_id, device.index_id, self.now))
    }
}

/// Leaks a name. There is one for each device, and one for each run in which the tuner takes part.
fn leaked(stem: &str) -> &'static str {
    let number = NAMES.fetch_add(1, Ordering::Relaxed);
    format!("{stem}-{}-{number}", std::process::id()).leak()
}

/// The folder of a device's choices.
fn folder(id: &str) -> PathBuf {
    let root = CubeClRuntimeConfig::get().autotune.cache.root();
    root.join("autotune").join(VERSION).join(segment(id))
}

/// A name as a path segment, as CubeCL makes it.
fn segment(name: &str) -> String {
    let options = sanitize_filename::Options { replacement: "_", ..Default::default() };
    sanitize_filename::sanitize_with_options(name, options)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_sees_what_is_filed_for_the_real_device_and_removes_only_the_copy() {
        let real = format!("device-0-0-real<{}>", std::process::id());
        let filed = folder(&real);
        assert!(filed.ends_with(format!("device-0-0-real_{}_", std::process::id())));
        fs::create_dir_all(&filed).unwrap();
        fs::write(filed.join("matmul.json.log"), "choices").unwrap();

        let device = DeviceId::new(7, 3);
        let mut name = Name::new("dry-test".into());
        let first = name.get();
        name.begin(device, Some(&real));
        let copied = name.folder(device).join("matmul.json.log");
        assert_eq!(fs::read_to_string(&copied).unwrap(), "choices");
        fs::write(&copied, "choices of the run").unwrap();
        name.end(device);
        assert!(!copied.exists());
        assert_eq!(fs::read_to_string(filed.join("matmul.json.log")).unwrap(), "choices");
        let second = name.get();
        assert_ne!(first, second);

        name.begin(device, None);
        assert_ne!(name.get(), second, "a tuner knows the old name");
        let third = name.get();
        name.end(device);
        name.begin(device, None);
        assert_eq!(name.get(), third, "no tuner has seen the name");
        fs::remove_dir_all(filed).unwrap();
    }
}
