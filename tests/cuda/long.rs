//! Long runs: the memory that the driver gives out must stay flat.

use std::time::Duration;

use firebox::Bytes;
use libtest_mimic::{Failed, Trial};

use crate::child::{Job, Pools};
use crate::trial::{CARD, Kernels, Left, ensure, only, run_with, test};

/// Checks that the memory given out after the first tenth of a run never grows.
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

/// Runs `epochs` epochs of `batches` batches each.
fn run_flat(pools: Pools, epochs: usize, batches: usize, workers: usize) -> Result<(), Failed> {
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
        pools,
        ..Job::new("mlp", 600, kernels.path())
    };
    let left = run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?;
    is_flat(&left, memory)
}

/// Makes `passes` passes over `lengths` sequence lengths, mixed anew each time.
fn lengths(pools: Pools, passes: usize, lengths: usize) -> Result<(), Failed> {
    let kernels = tempfile::tempdir()?;
    let memory = Bytes::mib(400);
    let job = Job {
        memory: Some(memory),
        epochs: passes,
        batches: lengths,
        samples: Some((passes * lengths / 60).max(1)),
        pools,
        ..Job::new("lengths", 32, kernels.path().to_owned())
    };
    // The first run tunes every shape.
    run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?.fitted()?;
    let left = run_with(&only(CARD), &job, Duration::from_secs(1800), |_, _| ())?;
    is_flat(&left, memory)
}

/// The tests. The long ones run only with `-- --ignored`.
pub fn tests() -> Vec<Trial> {
    let of_each = |pools: Pools| {
        let name = |what: &str| format!("memory_is_flat_over_{what}{}", pools.suffix());
        [
            test(name("100_steps"), move || run_flat(pools, 10, 10, 2)),
            test(name("2000_steps"), move || run_flat(pools, 2, 1000, 2)).with_ignored_flag(true),
            test(name("20_epochs_with_four_workers"), move || run_flat(pools, 20, 12, 4))
                .with_ignored_flag(true),
            test(name("40_lengths"), move || lengths(pools, 12, 40)).with_ignored_flag(true),
        ]
    };
    [Pools::Burns, Pools::Ours].into_iter().flat_map(of_each).collect()
}
