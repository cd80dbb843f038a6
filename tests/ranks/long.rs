//! The long tests: fifty kills, and two thousand steps.

use libtest_mimic::Trial;

use crate::faults::kills;
use crate::job::{Job, Train};
use crate::launch::run;

/// Trains for many steps. The memory of each rank must not grow after the first quarter.
fn soak(world: usize, epochs: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    // Ten steps an epoch.
    let train =
        Train { epochs, points: 40 * world, batch: 4, measures: 10, ..Train::new(folder.path()) };
    for said in run(&Job::Train(train), world) {
        let memory = said.memory;
        let quarter = memory[memory.len() / 4];
        let most = memory[memory.len() / 4..].iter().copied().max().unwrap_or_default();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "rank {}: {} batches, {:.1} MiB after a quarter, {:.1} MiB at the most after it",
            said.rank,
            said.batches,
            mib(quarter),
            mib(most)
        );
        assert!(mib(most) < mib(quarter) + 8.0, "{memory:?}");
    }
}

pub fn tests() -> Vec<Trial> {
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    vec![
        trial("long::soak_300_steps_on_2_ranks", || soak(2, 30)),
        trial("long::soak_2000_steps_on_4_ranks", || soak(4, 200)).with_ignored_flag(true),
        trial("long::kills_50", || kills(3, 50, 2)).with_ignored_flag(true),
    ]
}
