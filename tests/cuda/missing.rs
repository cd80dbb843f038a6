//! Tests the errors reported before training when CUDA cannot be used.

use std::path::Path;
use std::process::Command;

use firebox_blank::{Fault, Settings};
use libtest_mimic::{Failed, Trial};

use crate::child::{BESIDE, Job, Pools};
use crate::trial::{CARD, LIMIT, ensure, only, run_with, test};

/// Trains on a machine that lacks something, and expects an error that contains `words`.
fn check(
    settings: Settings,
    break_it: fn(&mut Command, &Path),
    words: &[&str],
) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let job = Job::new("mlp", 64, kernels.path().to_owned());
    let left = run_with(&settings, &job, LIMIT, break_it)?;
    let (kind, said) = left.error()?;
    let is_said = kind == "Nvidia" && words.iter().all(|word| said.contains(word));
    ensure(is_said, || left.complaint(&format!("{kind}: {said}")))?;
    ensure(left.peak().get() == 0, || left.complaint("something was allocated"))
}

/// Expects an error when CubeCL's configuration rules out the exact pages that firebox's pool asks
/// for.
fn without_exact_pages() -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let job = Job::new("mlp", 64, kernels.path().to_owned());
    let job = Job { pools: Pools::Ours, exact_pages: false, ..job };
    let left = run_with(&only(CARD), &job, LIMIT, nothing)?;
    let (kind, said) = left.error()?;
    let is_said = kind == "NoExactPages" && said.contains("persistent_memory");
    ensure(is_said, || left.complaint(&format!("{kind}: {said}")))?;
    ensure(left.peak().get() == 0, || left.complaint("something was allocated"))
}

/// Trains where burn's own backend has just begun on the same device: both create what runs on the
/// thread of burn's fusion.
fn beside_burns_backend() -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let job = Job::new("mlp", 64, kernels.path().to_owned());
    let job = Job { pools: Pools::Ours, ..job };
    let begins = |command: &mut Command, _: &Path| {
        command.env(BESIDE, "1");
    };
    for _ in 0..3 {
        run_with(&only(CARD), &job, LIMIT, begins)?.fitted()?;
    }
    Ok(())
}

fn nothing(_: &mut Command, _: &Path) {}

/// Removes a library from the folder that the child searches.
fn without(library: &'static [&'static str]) -> impl Fn(&Path) {
    move |folder: &Path| {
        for name in library {
            std::fs::remove_file(folder.join(name)).expect("the library was installed");
        }
    }
}

/// The tests.
pub fn tests() -> Vec<Trial> {
    let machine = || only(CARD);
    vec![
        test("without_exact_pages_our_pool_is_an_error", without_exact_pages),
        test("beside_burns_backend_nothing_hangs", beside_burns_backend),
        test("without_a_driver_there_is_an_error", move || {
            let gone = |_: &mut Command, folder: &Path| {
                without(&["libcuda.so", "libcuda.so.1"])(folder);
            };
            check(machine(), gone, &["no NVIDIA driver", "libcuda", "install the driver"])
        }),
        test("without_the_compiler_there_is_an_error", move || {
            let gone = |_: &mut Command, folder: &Path| {
                without(&["libnvrtc.so", "libnvrtc.so.13"])(folder);
            };
            check(machine(), gone, &["libnvrtc", "nvidia-cuda-nvrtc", "LD_LIBRARY_PATH"])
        }),
        test("without_headers_there_is_an_error", move || {
            let gone = |command: &mut Command, _: &Path| {
                command.env("CUDA_PATH", "/nowhere");
            };
            check(machine(), gone, &["/nowhere", "cuda_runtime.h", "CUDA_PATH"])
        }),
        test("without_a_device_there_is_an_error", move || {
            let words = ["no CUDA-capable device", "nvidia-smi", "CUDA_VISIBLE_DEVICES"];
            check(Settings::new([]), nothing, &words)
        }),
        test("with_a_driver_that_is_too_old_there_is_an_error", move || {
            let old = Settings { driver_version: 12_040, ..machine() };
            let words = ["knows CUDA 12.4", "13.0", "CUDARC_CUDA_VERSION=12040"];
            check(old, nothing, &words)
        }),
        test("with_a_driver_that_does_not_fit_the_kernel_there_is_an_error", move || {
            let broken = Fault::call("cuInit", 1, Fault::DRIVER_MISMATCH).times(u64::MAX);
            check(machine().with_fault(broken), nothing, &["display driver", "nvidia-smi"])
        }),
    ]
}
