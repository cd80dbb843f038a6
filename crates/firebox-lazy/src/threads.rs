//! The threads of this process, as Linux shows them in `/proc`. On other systems there are none to see.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::streams::worker_of_name;

/// How long a new thread is waited for until it has its name: on a busy machine it may have to wait for a processor.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(200);

/// The highest number of a loader thread of this process that is alive. Linux keeps 15 bytes of a thread's name, enough
/// for four digits.
pub(crate) fn highest_loader() -> Option<u16> {
    all().iter().filter_map(|thread| worker_of_name(&name_of(thread)?)).max()
}

/// Runs `start`, which starts threads, and waits until they have names of their own. A thread has the name of the one that starts
/// it until it runs for the first time, and sets its name itself.
pub(crate) fn starting<R>(start: impl FnOnce() -> R) -> R {
    let before = all();
    let result = start();
    let this = fs::read_link("/proc/thread-self").ok();
    let this = this.as_deref().and_then(Path::file_name).and_then(OsStr::to_str);
    if let Some(ours) = this.and_then(name_of) {
        let started = Instant::now();
        let is_young = |thread: &String| name_of(thread).is_some_and(|name| name == ours);
        while all().difference(&before).any(is_young) && started.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
    }
    result
}

/// The numbers of all threads.
fn all() -> BTreeSet<String> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.filter_map(|thread| thread.file_name().into_string().ok()).collect()
}

/// The name of a thread, unless it has ended.
fn name_of(thread: &str) -> Option<String> {
    let file = Path::new("/proc/self/task").join(thread).join("comm");
    Some(fs::read_to_string(file).ok()?.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_that_were_just_started_are_known_by_their_names() {
        use std::sync::mpsc;

        for workers in 1..=8_u16 {
            // More threads than processors, so that some have to wait for their first turn.
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
}
