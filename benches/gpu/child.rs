//! Runs every trial in a child process, because pages stay with a process and a failure can kill
//! it.

use std::fs::File;
use std::io::Read;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use firebox::Bytes;

use crate::trial::Trial;

/// How a trial ended.
pub struct Ended {
    /// How the process ended; `None` if it was killed for taking too long.
    pub status: Option<ExitStatus>,
    /// Text that it wrote to its outputs.
    pub text: String,
    /// Time that it took.
    pub time: Duration,
}

impl Ended {
    /// Runs `trial` for at most `limit`.
    pub fn of(trial: Trial, limit: Duration) -> anyhow::Result<Self> {
        let started = Instant::now();
        let output = tempfile::NamedTempFile::new()?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(trial.arguments())
            .stdout(output.reopen()?)
            .stderr(append(&output)?)
            .spawn()?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if started.elapsed() > limit {
                child.kill()?;
                child.wait()?;
                break None;
            }
            thread::sleep(Duration::from_millis(20));
        };
        let mut bytes = Vec::new();
        File::open(output.path())?.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Self { status, text, time: started.elapsed() })
    }

    /// Whether the trial ran to its end.
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// The number after `key=` in the line that begins with `line`.
    pub fn number(&self, line: &str, key: &str) -> Option<u64> {
        let line = self.text.lines().find_map(|text| text.strip_prefix(line))?;
        let mut pairs = line.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key)?.1.parse().ok()
    }

    /// The bytes after `key=` in the line of measurements.
    pub fn bytes(&self, key: &str) -> Option<Bytes> {
        self.number("measured:", key).map(Bytes::new)
    }

    /// How the trial ended, with its error or else its last line of output.
    pub fn reason(&self) -> String {
        let mut lines = self.text.lines().map(str::trim).filter(|line| !line.is_empty());
        let error = lines.clone().find(|line| line.starts_with("Error: "));
        let last = error.or_else(|| lines.next_back()).unwrap_or("nothing was said");
        let last: String = last.chars().take(300).collect();
        match self.status {
            None => format!("killed after {:.0} s; {last}", self.time.as_secs_f64()),
            Some(status) => format!("{status}; {last}"),
        }
    }
}

/// Opens the file so that both outputs of a child append to it.
fn append(output: &tempfile::NamedTempFile) -> std::io::Result<File> {
    File::options().append(true).open(output.path())
}
