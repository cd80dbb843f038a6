//! Finds out whether there is a Vulkan driver: tests that need one are ignored where there is none.

use std::fs::read_dir;

/// Where drivers are installed.
const FOLDERS: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(no_vulkan)");
    println!("cargo::rerun-if-env-changed=VK_DRIVER_FILES");
    for folder in FOLDERS {
        println!("cargo::rerun-if-changed={folder}");
    }
    let is_there = |folder: &str| read_dir(folder).is_ok_and(|mut files| files.next().is_some());
    if std::env::var_os("VK_DRIVER_FILES").is_none() && !FOLDERS.into_iter().any(is_there) {
        println!("cargo::rustc-cfg=no_vulkan");
    }
}
