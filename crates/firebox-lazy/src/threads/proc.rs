//! The threads of this process, as Linux lists them in `/proc`. Other systems list none.
//!
//! The gate (`loaders.rs`) counts loader threads with it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::threads::streams::worker_of_name;

/// How long to wait until a new thread has its name. On a busy machine it may wait for a processor.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(200);

/// The highest worker number among the live loader threads of this process. Linux keeps 15 bytes of
/// a thread's name, enough for four digits.
pub(crate) fn highest_loader() -> Option<u16> {
    let worker = |thread: &String| worker_of_name(&String::from_utf8(name_of(thread)?).ok()?);
    all().iter().filter_map(worker).max()
}

/// Runs `start`, which starts threads, and waits until they have names of their own, for
/// [`PATIENCE`] at most.
///
/// A thread has the name of the thread that starts it until it first runs. It sets its own name
/// before it does anything else.
pub(crate) fn starting<R>(start: impl FnOnce() -> R) -> R {
    let before = all();
    let result = start();
    let this = fs::read_link("/proc/thread-self").ok();
    let this = this.as_deref().and_then(Path::file_name).and_then(OsStr::to_str);
    let Some(ours) = this.and_then(name_of) else { return result };
    let mut young: Vec<String> = all().difference(&before).cloned().collect();
    let started = Instant::now();
    loop {
        // A thread that sleeps under our name has run and will get no other.
        young.retain(|thread| name_of(thread).as_ref() == Some(&ours) && !sleeps(thread));
        if young.is_empty() {
            return result;
        }
        if started.elapsed() > PATIENCE {
            log::warn!("{} new threads have no names after {PATIENCE:?}", young.len());
            return result;
        }
        std::thread::sleep(PAUSE);
    }
}

/// The ids of all threads.
fn all() -> BTreeSet<String> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.filter_map(|thread| thread.file_name().into_string().ok()).collect()
}

/// The name of a thread. `None` if it has ended. Linux keeps the first bytes of a long name, which
/// may cut a character.
fn name_of(thread: &str) -> Option<Vec<u8>> {
    Some(read(thread, "comm")?.trim_ascii_end().to_vec())
}

/// Whether a thread is waiting for something. `stat` begins with the thread's id, its name in
/// parentheses and its state.
fn sleeps(thread: &str) -> bool {
    let stat = read(thread, "stat").unwrap_or_default();
    let name_ends = stat.iter().rposition(|byte| *byte == b')');
    name_ends.is_some_and(|end| stat[end + 1..].trim_ascii_start().starts_with(b"S"))
}

fn read(thread: &str, file: &str) -> Option<Vec<u8>> {
    fs::read(Path::new("/proc/self/task").join(thread).join(file)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_that_were_just_started_are_known_by_their_names() {
        use std::sync::mpsc;

        for workers in 1..=8_u16 {
            let (stop, stopped) = mpsc::channel::<()>();
            let stopped = std::sync::Arc::new(std::sync::Mutex::new(stopped));
            let threads: Vec<_> = starting(|| {
                let workers = (700..700 + workers).map(|worker| {
                    let stopped = stopped.clone();
                    let thread = std::thread::Builder::new().name(format!("dataloader-{worker}"));
                    let wait = move || drop(stopped.lock().map(|stopped| stopped.recv()));
                    thread.spawn(wait).expect("a thread can be started")
                });
                workers.collect()
            });
            assert_eq!(highest_loader(), Some(699 + workers));
            drop(stop);
            threads.into_iter().for_each(|thread| thread.join().expect("it only waits"));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_thread_that_has_no_name_is_not_waited_for() {
        let started = Instant::now();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let wait = move || stopped.recv().is_err();
        let thread = starting(|| std::thread::spawn(wait));
        assert!(started.elapsed() < PATIENCE, "it sleeps, and so it has run");
        drop(stop);
        assert!(thread.join().expect("it only waits"));
    }
}
