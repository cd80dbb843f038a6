//! Tests what a second run of a program finds of the first one's planning.

use std::path::Path;
use std::process::Command;

use burn::backend::{Autodiff, Flex};
use burn::optim::AdamConfig;
use firebox::{ByMicroBatch, Bytes, Lazy, Learner, LearnerBuilder};
use firebox_testing::task::{Net, batch, random_state};

type B = Autodiff<Lazy<Flex>>;

const ITEMS: usize = 3000;

/// The split, and the number of recordings.
fn planned(text: &str) -> (String, usize) {
    let (split, recordings) = text.split_once('/').expect("the split and the recordings");
    (split.to_owned(), recordings.parse().expect("a number"))
}

#[test]
#[ignore = "prints a plan for the test below, in a process of its own"]
fn a_process_that_plans() {
    let _lock = random_state();
    let model = Net::<B>::new(&Default::default());
    let builder = |memory: Bytes| Learner::builder().auto_batch().memory(memory).quiet();
    let build = |builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        builder.build(model.clone(), AdamConfig::new().init(), 1e-3)
    };
    let whole = build(builder(Bytes::gib(4)).no_cache()).plan(&batch(ITEMS)).expect("it fits");
    let learner = build(builder(whole.predicted().scale(0.6)));
    let report = learner.plan(&batch(ITEMS)).expect("a part fits");
    println!("\nplanned {}/{}", report.plan.split(), report.cost.rehearsals);
}

/// Plans in a process that keeps what it finds in `folder`.
fn in_a_process(folder: &Path) -> (String, usize) {
    let program = std::env::current_exe().expect("this test's");
    let child = Command::new(program)
        .args(["--exact", "earlier_runs::a_process_that_plans", "--ignored", "--nocapture"])
        .env("FIREBOX_CACHE", folder)
        .output()
        .expect("it is this test's program");
    let output = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{output}{}", String::from_utf8_lossy(&child.stderr));
    let line = output.lines().find_map(|line| line.strip_prefix("planned "));
    planned(line.unwrap_or_else(|| panic!("no plan in {output}")))
}

#[test]
fn a_second_run_takes_three_recordings() {
    let folder = tempfile::tempdir().expect("a folder");
    let (split, recordings) = in_a_process(folder.path());
    assert!(recordings > 3, "{split} took {recordings}");
    // The whole batch, its split, and its split with the batch's output.
    for _ in 0..2 {
        assert_eq!(in_a_process(folder.path()), (split.clone(), 3));
    }
    assert_eq!(in_a_process(Path::new("")), (split.clone(), recordings), "nothing was kept");
    for file in std::fs::read_dir(folder.path()).expect("it was made") {
        std::fs::write(file.expect("a file").path(), "noise").expect("it is ours");
    }
    assert_eq!(in_a_process(folder.path()), (split, recordings), "what is damaged is not used");
}
