//! Long runs: what the driver holds is flat.

use std::time::Duration;

use firebox::Bytes;
use libtest_mimic::{Failed, Trial};

use crate::child::Job;
use crate::trial::{CARD, Kernels, Left, ensure, only, run_with, test};

/// Checks that what the driver holds after the first tenth of a run never grows.
fn is_flat(left: &Left, memory: Bytes) -> Result<(), Failed> {
    let ended = left.fitted()?;
    let samples = &ended.samples;
    ensure(samples.len() >= 20, || left.complaint(&format!("{} samples", samples.len())))?;
    let (first, rest) = samples.split_at(samples.len() / 10);
    let most = |of: fn(&(u64, u64)) -> u64, samples: &[(u64, u64)]| samples.iter().map(of).max();
    let held = |samples: &[(u64, u64)]| most(|(held, _)| *held, samples);
    let pinned = |samples: &[(u64, u64)]| most(|(_, pinned)| *pinned, samples);
    ensure(held(rest) <= held(first), || left.complaint(&format!("memory grows: {samples:?}")))?;
    ensure(pinned(rest) <= pinned(first), || {
        left.complaint(&format!("pinned memory grows: {samples:?}"))
    })?;
    ensure(left.peak() <= memory, || left.complaint(&format!("{} of {memory}", left.peak())))?;
    println!(
        "held {:?}, pinned {:?}, {} samples, {:.0?}",
        held(samples),
        pinned(samples),
        samples.len(),
        left.time
    );
    Ok(())
}

/// So many epochs with so many batches each.
fn run_flat(epochs: usize, batches: usize, workers: usize) -> Result<(), Failed> {
    let kernels = Kernels::of("mlp", 600)?;
    let memory = Bytes::mib(400);
    let samples = Some((epochs * batches / 60).max(1));
    let job = Job {
        memory: Some(memory),
        epochs,
        batches,
        workers,
        validates: true,
        uneven: true,
        samples,
        ..Job::new("mlp", 600, kernels.path())
    };
    let left = run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?;
    is_flat(&left, memory)
}

/// Passes over as many lengths of sequences, mixed anew each time.
fn lengths(passes: usize, lengths: usize) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let memory = Bytes::mib(400);
    let job = Job {
        memory: Some(memory),
        epochs: passes,
        batches: lengths,
        samples: Some((passes * lengths / 60).max(1)),
        ..Job::new("lengths", 32, kernels.path().to_owned())
    };
    // Every shape is tuned first.
    run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?.fitted()?;
    let left = run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?;
    is_flat(&left, memory)
}

/// The tests. The long ones are asked for with `-- --ignored`.
pub fn tests() -> Vec<Trial> {
    vec![
        test("memory_is_flat_over_100_steps", || run_flat(10, 10, 2)),
        test("memory_is_flat_over_2000_steps", || run_flat(2, 1000, 2)).with_ignored_flag(true),
        test("memory_is_flat_over_20_epochs_with_four_workers", || run_flat(20, 12, 4))
            .with_ignored_flag(true),
        test("memory_is_flat_over_40_lengths", || lengths(12, 40)).with_ignored_flag(true),
    ]
}
