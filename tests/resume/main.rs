//! Tests that training killed at any point resumes from its last checkpoint.
//!
//! It must end bit for bit where it would have ended: model, optimizer, learning rate, order of the
//! items, and random numbers.
//!
//! Each run has its own process. The test kills a few. More are killed by
//! `FIREBOX_KILLS=200 cargo test --workspace --release --test resume`.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::AdamConfig;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::Backend;
use burn::train::SupervisedTraining;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use firebox::{Bytes, DurableRecorder, Lazy, Learner, newest_checkpoint};
use firebox_testing::task::{Net, PointBatcher, points, weights};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

type B = Autodiff<Lazy<Flex>>;

const EPOCHS: usize = 8;
const FOLDER: &str = "FIREBOX_RESUME_FOLDER";
const WORKERS: &str = "FIREBOX_RESUME_WORKERS";
/// Environment variable with the number of epochs, if not the usual one.
const LONG: &str = "FIREBOX_RESUME_EPOCHS";
/// Time limit of a process.
const LIMIT: Duration = Duration::from_secs(120);

/// The work of a child process. Does nothing when the tests run.
#[test]
fn process() {
    let (Ok(folder), Ok(workers)) = (std::env::var(FOLDER), std::env::var(WORKERS)) else {
        return;
    };
    let folder = Path::new(&folder);
    let loader = || {
        let workers = workers.parse().expect("a number");
        let builder = DataLoaderBuilder::new(PointBatcher).batch_size(20).shuffle(3);
        builder.num_workers(workers).build(InMemDataset::new(points(90)))
    };
    let valid = DataLoaderBuilder::new(PointBatcher).batch_size(20);
    let device = Default::default();
    B::seed(&device, 11);
    let model = Net::<B>::coupled(&device, true);
    let training =
        SupervisedTraining::new(folder, loader(), valid.build(InMemDataset::new(points(30))));
    let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::new();
    let training = training
        .metrics((LossMetric::new(),))
        .with_file_checkpointer(DurableRecorder::new(recorder))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(std::env::var(LONG).map_or(EPOCHS, |epochs| epochs.parse().expect("a number")));
    if let Some(epoch) = newest_checkpoint(folder) {
        std::fs::write(folder.join(format!("resumed-{epoch}")), "").expect("writable");
    }
    let rate = CosineAnnealingLrSchedulerConfig::new(1e-2, 40).init().expect("a scheduler");
    let fitted = Learner::builder()
        .auto_batch()
        .memory(Bytes::mib(64))
        .micro_batch(8)
        .seed(5)
        .resume(folder)
        .stop_on_ctrl_c()
        .quiet()
        .build(model, AdamConfig::new().init(), rate)
        .fit(training)
        .expect("it fits");
    if let Some(why) = fitted.stopped {
        let text = format!("{why}, {:?}", newest_checkpoint(folder));
        std::fs::write(folder.join("stopped"), text).expect("writable");
        // Simulates a program that does something else with the model.
        std::thread::sleep(LIMIT);
    }
    let bits = weights::<Lazy<Flex>, _>(&fitted.model).concat();
    let bytes: Vec<u8> = bits.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
    std::fs::write(folder.join("unfinished"), bytes).expect("writable");
    std::fs::rename(folder.join("unfinished"), folder.join("result")).expect("renamed");
}

fn training(folder: &Path, workers: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command
        .args(["--exact", "process"])
        .env(FOLDER, folder)
        .env(WORKERS, workers.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn start(folder: &Path, workers: usize) -> Child {
    training(folder, workers).spawn().expect("it starts")
}

/// Waits until the process ends by itself.
fn finish(mut child: Child) {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is known") {
            assert!(status.success(), "training failed: {status}");
            return;
        }
        if since.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("training hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn result(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("result")).expect("training ended")
}

/// Number of times training was resumed.
fn resumed(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).expect("a folder").flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with("resumed-")).count()
}

fn killed_and_resumed(workers: usize) {
    let whole = tempfile::tempdir().expect("a folder");
    let since = Instant::now();
    finish(start(whole.path(), workers));
    let takes = since.elapsed();
    let expected = result(whole.path());
    assert_eq!(resumed(whole.path()), 0);

    let kills = std::env::var("FIREBOX_KILLS").map_or(6, |n| n.parse().expect("a number"));
    let (mut killed, mut went_on) = (0, 0);
    let mut rng = StdRng::seed_from_u64(workers as u64);
    while killed < kills {
        let folder = tempfile::tempdir().expect("a folder");
        while !folder.path().join("result").exists() {
            let newest = || newest_checkpoint(folder.path()).unwrap_or(0);
            // Within its first, second or third epoch.
            let epoch = newest() + rng.random_range(0..3);
            let mut child = start(folder.path(), workers);
            let is_there = || newest() >= epoch;
            while !is_there() && child.try_wait().expect("it is known").is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(takes.mul_f64(rng.random_range(0.0..1.5) / EPOCHS as f64));
            child.kill().expect("it is ours");
            killed += usize::from(!child.wait().expect("it ended").success());
            if killed >= kills {
                finish(start(folder.path(), workers));
            }
        }
        assert_eq!(result(folder.path()), expected, "after {killed} kills");
        went_on += resumed(folder.path());
    }
    println!("{killed} kills, went on from {went_on} checkpoints");
    assert!(
        went_on * 4 >= kills,
        "{killed} kills, and training went on from {went_on} checkpoints"
    );
}

#[test]
fn a_killed_run_ends_where_it_would_have_ended() {
    killed_and_resumed(0);
}

#[test]
fn so_does_one_with_a_loader_thread() {
    killed_and_resumed(1);
}

/// Ends training with a signal, in the epoch after the first checkpoint.
#[cfg(unix)]
fn ended_by(signal: &str, name: &str) {
    use std::os::unix::process::ExitStatusExt;

    let folder = tempfile::tempdir().expect("a folder");
    let mut child = training(folder.path(), 0).env(LONG, "100000").spawn().expect("it starts");
    let wait_for = |child: &mut Child, is_there: &dyn Fn() -> bool| {
        let since = Instant::now();
        while !is_there() {
            assert!(child.try_wait().expect("it is known").is_none(), "training goes on");
            assert!(since.elapsed() < LIMIT, "training hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let send = |child: &Child| {
        let pid = child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status().expect("it starts");
        assert!(sent.success(), "{sent}");
    };
    wait_for(&mut child, &|| newest_checkpoint(folder.path()).is_some());
    let before = newest_checkpoint(folder.path()).expect("it is there");
    send(&child);
    let stopped = folder.path().join("stopped");
    wait_for(&mut child, &|| {
        std::fs::read_to_string(&stopped).is_ok_and(|text| text.ends_with(')'))
    });
    let text = std::fs::read_to_string(&stopped).expect("it is there");
    let newest = newest_checkpoint(folder.path()).expect("it is there");
    assert_eq!(text, format!("{name}, Some({newest})"));
    assert!(newest > before, "a checkpoint of the epoch in which it ended");
    // Training is over, so the signal has its normal effect again.
    send(&child);
    let status = child.wait().expect("it ended");
    assert!(status.signal().is_some(), "{status}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_training_with_a_checkpoint() {
    ended_by("-INT", "ctrl-c (SIGINT)");
}

#[cfg(unix)]
#[test]
fn a_request_to_terminate_ends_training_with_a_checkpoint() {
    ended_by("-TERM", "SIGTERM");
}
