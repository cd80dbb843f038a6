//! Finds out whether there is a Vulkan driver: tests that need one are ignored where there is none.

use std::fs::read_dir;

/// Where drivers are installed.
const FOLDERS: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(no_vulkan)");
    println!("cargo::rerun-if-changed=build.rs");
    let mut found = false;
    for variable in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"] {
        println!("cargo::rerun-if-env-changed={variable}");
        found |= std::env::var_os(variable).is_some();
    }
    for folder in FOLDERS {
        let Ok(mut files) = read_dir(folder) else { continue };
        println!("cargo::rerun-if-changed={folder}");
        found |= files.next().is_some();
    }
    if !found {
        println!("cargo::rustc-cfg=no_vulkan");
    }
}
