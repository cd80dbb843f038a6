//! What goes wrong on one rank: all end with the same error and the same state, or stop at the same
//! step; a run that was killed resumes as if it had not been.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use firebox::newest_checkpoint;
use libtest_mimic::Trial;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::job::{Fault, Job, Said, Train};
use crate::launch::{Ended, processes, run, start};

/// A job must have ended this long after one of its ranks was killed.
const END: Duration = Duration::from_secs(30);

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Runs a job that fails: what its ranks say.
fn fails(train: Train, world: usize) -> Vec<Said> {
    let ended: Ended = start(&Job::Train(train), world).wait();
    assert!(!ended.succeeded, "the job succeeded");
    assert!(ended.said.iter().all(|said| said.error.is_some()), "{:?}", ended.said);
    ended.said
}

/// All ranks end with the same error, of this kind and with these words, and the same state.
fn all_alike(said: &[Said], world: usize, kind: &str, words: &str) {
    assert_eq!(said.len(), world);
    let error = said[0].error.clone().expect("it has failed");
    assert_eq!(error.0, kind, "{}", error.1);
    assert!(error.1.contains(words), "{}", error.1);
    for other in said {
        assert_eq!(other.error.as_ref(), Some(&error));
        assert_eq!(other.weights, said[0].weights, "the state is another");
        assert_eq!(other.position, said[0].position);
    }
}

fn not_a_number() {
    let (folder, fault) = (folder(), Fault::NotANumber { rank: 1, batch: 4 });
    let said = fails(Train { fault, ..Train::new(folder.path()) }, 3);
    all_alike(&said, 3, "not finite", "`first.weight` on rank 1");
    assert_eq!(said[0].position, Some((2, 1)), "three batches make an epoch");
}

fn panic() {
    let (folder, fault) = (folder(), Fault::Panic { rank: 2, batch: 2 });
    let said = fails(Train { fault, ..Train::new(folder.path()) }, 3);
    all_alike(
        &said,
        3,
        "rank",
        "rank 2 failed: training stopped because something beside the model",
    );
    assert!(said[0].error.as_ref().is_some_and(|error| error.1.contains("the file is damaged")));
}

fn too_small_a_budget() {
    let (folder, fault) = (folder(), Fault::TooSmall { rank: 1 });
    let said = fails(Train { fault, ..Train::new(folder.path()) }, 2);
    all_alike(&said, 2, "rank", "rank 1 failed: training does not fit");
}

fn full_disk() {
    let folder = folder();
    let log = Some("/dev/full".into());
    let said = fails(Train { log, ..Train::new(folder.path()) }, 3);
    all_alike(&said, 3, "rank", "rank 0 failed: the log of steps cannot be written to /dev/full");
}

fn checkpoint_in_the_way() {
    let folder = folder();
    std::fs::create_dir_all(folder.path().join("checkpoint/model-2.mpk")).expect("a folder");
    let said = fails(Train { checkpoints: true, ..Train::new(folder.path()) }, 3);
    all_alike(&said, 3, "rank", "rank 0 failed: a checkpoint could not be written");
}

fn another_model() {
    let (folder, fault) = (folder(), Fault::OtherModel { rank: 1 });
    let said = fails(Train { fault, ..Train::new(folder.path()) }, 2);
    all_alike(
        &said[..1],
        1,
        "unexpected",
        "rank 1 sent something unexpected: it has another model",
    );
    assert_eq!(said[1].error, said[0].error);
}

fn stalls() {
    let fault = |rank| Fault::Stall { rank, batch: 3 };
    for stalled in [0, 1] {
        let folder = folder();
        let train = Train { fault: fault(stalled), patience: 2000, ..Train::new(folder.path()) };
        let began = Instant::now();
        let ended = start(&Job::Train(train), 3).wait();
        assert!(!ended.succeeded && began.elapsed() < END, "{:?}", began.elapsed());
        let awake: Vec<&Said> = ended.said.iter().filter(|said| said.rank != stalled).collect();
        assert!(!awake.is_empty(), "{}", ended.errors);
        for said in awake {
            let (kind, message) = said.error.clone().expect("it has failed");
            assert_eq!(kind, "missing", "{message}");
            assert!(message.contains(&format!("rank {stalled} did not answer")), "{message}");
        }
    }
}

fn leaves() {
    for leaver in [0, 1] {
        let (folder, fault) = (folder(), Fault::Leaves { rank: leaver });
        let ended = start(&Job::Train(Train { fault, ..Train::new(folder.path()) }), 3).wait();
        assert!(!ended.succeeded);
        assert_eq!(ended.said.len(), 2, "{}", ended.errors);
        for said in &ended.said {
            let (kind, message) = said.error.clone().expect("it has failed");
            assert_eq!(kind, "left", "{message}");
            assert!(message.contains(&format!("rank {leaver} ended")), "{message}");
        }
    }
}

fn interrupt() {
    let (folder, fault) = (folder(), Fault::Interrupt { rank: 1, batch: 4 });
    let said = run(&Job::Train(Train { fault, ..Train::new(folder.path()) }), 3);
    for of_rank in &said {
        assert_eq!(of_rank.weights, said[0].weights);
        assert_eq!(of_rank.batches, 5, "all stop after the same step");
        let stopped = of_rank.stopped.as_deref();
        assert_eq!(stopped, Some(if of_rank.rank == 1 { "enough" } else { "rank 1: enough" }));
    }
}

fn early_stopping() {
    let folder = folder();
    let train = Train { stops_early: true, epochs: 20, ..Train::new(folder.path()) };
    let said = run(&Job::Train(train), 2);
    assert!(said.iter().all(|of_rank| of_rank.weights == said[0].weights));
    let epochs = said.iter().map(|of_rank| of_rank.batches.div_ceil(5)).collect::<Vec<_>>();
    assert!(epochs[0] < 20 && epochs[0] == epochs[1], "{epochs:?}");
}

fn coupled() {
    let ended = start(&Job::Coupled, 2).wait();
    assert!(!ended.succeeded);
    all_alike(&ended.said, 2, "rank", "a batch cannot be split: its operations do not give");
}

fn one_memory() {
    let folder = folder();
    let said = run(&Job::Train(Train { is_free: true, ..Train::new(folder.path()) }), 3);
    let all: u64 = said.iter().map(|of_rank| of_rank.budget).sum();
    assert!(all > 0 && all < said[0].machine, "{all} of {}", said[0].machine);
    assert!(said.iter().all(|of_rank| of_rank.budget < said[0].machine / 3));
}

fn uneven() {
    let folder = folder();
    // Rank 0 has four points more than one batch, the others three.
    let train = Train { points: 41, ..Train::new(folder.path()) };
    let said = run(&Job::Train(train.clone()), 3);
    assert!(said.iter().all(|of_rank| of_rank.weights == said[0].weights));
    assert!(said.iter().all(|of_rank| of_rank.exchange > 0));
    let splits: Vec<&str> = said.iter().map(|of_rank| of_rank.split.as_str()).collect();
    assert_ne!(splits[0], splits[1], "ranks plan for themselves");
    // Three ranks: 21 points are seven for each, 20 are 7, 7 and 6, in batches of 7 and 6.
    let ends = Train { points: 20, batch: 6, ..train };
    let said = run(&Job::Train(Train { folder: folder.path().join("ends"), ..ends }), 3);
    assert!(said.iter().all(|of_rank| of_rank.weights == said[0].weights));
    assert_eq!(said.iter().map(|of_rank| of_rank.batches).collect::<Vec<_>>(), [8, 8, 4]);
}

/// Fewer ranks go on from what more have saved.
fn other_numbers_of_ranks() {
    let folder = folder();
    let train =
        |epochs| Job::Train(Train { checkpoints: true, epochs, ..Train::new(folder.path()) });
    run(&train(2), 3);
    let said = run(&train(4), 2);
    assert_eq!(said[0].weights, said[1].weights);
    // 45 points for each, in batches of ten, in two epochs; one batch more to skip each epoch.
    assert!(said.iter().all(|of_rank| of_rank.batches == 2 * 5 + 2), "{said:?}");
}

/// Kills ranks at random times, and lets the job resume each time, until it ends. Its end is that
/// of a job that was not killed.
pub fn kills(world: usize, kills: usize, seed: u64) {
    let job =
        |folder: &Path| Job::Train(Train { checkpoints: true, epochs: 8, ..Train::new(folder) });
    let whole = folder();
    let expected = run(&job(whole.path()), world)[0].weights.clone();
    let mut random = StdRng::seed_from_u64(seed);
    let (mut killed, mut resumed) = (0, 0);
    while killed < kills {
        let folder = folder();
        loop {
            let mut running = start(&job(folder.path()), world);
            let after = Duration::from_millis(random.random_range(200..2500));
            let began = Instant::now();
            while began.elapsed() < after && !running.has_ended() {
                std::thread::sleep(Duration::from_millis(5));
            }
            let victims = processes(folder.path());
            if running.has_ended() || killed == kills || victims.is_empty() {
                let ended = running.wait();
                assert!(ended.succeeded, "{}", ended.errors);
                for said in &ended.said {
                    assert!(said.weights == expected, "rank {} has other weights", said.rank);
                }
                break;
            }
            let victim = victims[random.random_range(0..victims.len())];
            let mut kill = Command::new("kill");
            // It may have ended by itself just now.
            let _ = kill.args(["-9", &victim.to_string()]).stderr(Stdio::null()).status();
            killed += 1;
            let began = Instant::now();
            running.wait();
            assert!(began.elapsed() < END, "the job went on for {:?}", began.elapsed());
            resumed += usize::from(newest_checkpoint(folder.path()).is_some());
        }
    }
    println!("{world} ranks: {killed} were killed, {resumed} times there was a checkpoint");
}

pub fn tests() -> Vec<Trial> {
    let tests: [(&str, fn()); 15] = [
        ("a_gradient_that_is_not_a_number", not_a_number),
        ("a_panic", panic),
        ("too_small_a_budget", too_small_a_budget),
        ("a_full_disk", full_disk),
        ("a_checkpoint_that_cannot_be_written", checkpoint_in_the_way),
        ("another_model", another_model),
        ("a_rank_that_does_not_go_on", stalls),
        ("a_rank_that_leaves", leaves),
        ("an_interrupt", interrupt),
        ("early_stopping", early_stopping),
        ("a_loss_that_is_no_sum", coupled),
        ("ranks_share_the_memory_of_a_machine", one_memory),
        ("uneven_ends", uneven),
        ("another_number_of_ranks", other_numbers_of_ranks),
        ("kills", || kills(3, 3, 1)),
    ];
    let trial = |(name, test): (&str, fn())| {
        Trial::test(format!("faults::{name}"), move || {
            test();
            Ok(())
        })
    };
    tests.into_iter().map(trial).collect()
}
