//! Starts this program under `mpirun`, and collects what its ranks say.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::job::{Job, Said, VARIABLE, WORDS};

/// No job takes as long.
const LIMIT: Duration = Duration::from_secs(600);

pub fn has_mpirun() -> bool {
    let version = Command::new("mpirun").arg("--version").stdout(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
}

/// A job that runs.
pub struct Running {
    child: Child,
    /// Where ranks write what they say. Their output is mixed.
    words: tempfile::TempDir,
    errors: std::thread::JoinHandle<String>,
}

/// A job that has ended.
pub struct Ended {
    pub succeeded: bool,
    /// What its ranks said, in their order. A rank that was killed says nothing.
    pub said: Vec<Said>,
    pub errors: String,
}

/// Starts a job on `world` ranks.
pub fn start(job: &Job, world: usize) -> Running {
    let job = serde_json::to_string(job).expect("a job is plain data");
    let words = tempfile::tempdir().expect("a folder");
    let mut child = Command::new("mpirun")
        // Ranks share the cores, and in a container they may be root.
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
        .args(["-n", &world.to_string()])
        .arg(std::env::current_exe().expect("this program has a path"))
        .env(VARIABLE, job)
        .env(WORDS, words.path())
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts");
    let errors = reader(child.stderr.take());
    Running { child, words, errors }
}

fn reader(from: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            from.read_to_end(&mut bytes).expect("the output can be read");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Running {
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the job is a child").is_some()
    }

    /// Waits for the end.
    pub fn wait(mut self) -> Ended {
        let began = Instant::now();
        while !self.has_ended() {
            if began.elapsed() > LIMIT {
                self.child.kill().expect("it runs");
                panic!("the job runs for {LIMIT:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = self.child.wait().expect("the job is a child");
        let errors = self.errors.join().expect("the reader ends");
        let words = std::fs::read_dir(self.words.path()).expect("the folder is there");
        let mut said: Vec<Said> = words
            .map(|entry| std::fs::read(entry.expect("it is readable").path()).expect("a file"))
            .map(|said| serde_json::from_slice(&said).expect("ranks say what they mean"))
            .collect();
        said.sort_by_key(|said| said.rank);
        Ended { succeeded: status.success(), said, errors }
    }
}

/// Runs a job on `world` ranks to its end, which must be a good one.
pub fn run(job: &Job, world: usize) -> Vec<Said> {
    let ended = start(job, world).wait();
    assert!(ended.succeeded, "{job:?} on {world} ranks failed:\n{}", ended.errors);
    assert_eq!(ended.said.len(), world, "{}", ended.errors);
    ended.said
}

/// The processes of this program that run a job in `folder`.
pub fn processes(folder: &Path) -> Vec<u32> {
    let folder = folder.display().to_string();
    let entries = std::fs::read_dir("/proc").expect("there is a /proc");
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter(|process: &u32| {
            let environment = std::fs::read(format!("/proc/{process}/environ"));
            let name = std::fs::read_to_string(format!("/proc/{process}/comm"));
            name.is_ok_and(|name| name.starts_with("ranks"))
                && environment
                    .is_ok_and(|read| String::from_utf8_lossy(&read).contains(folder.as_str()))
        })
        .collect()
}
