//! Runs a child process on the blank driver with a time limit, and collects its results.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use firebox::Bytes;
use firebox_blank::{Blank, Books, Entry, Settings};
use firebox_dry::Card;
use firebox_testing::machine::device;
use libtest_mimic::{Failed, Trial};

use crate::child::{Ended, Job};

/// Time limit of a child. A child takes a few seconds; one that reaches the limit hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Results of a child.
pub struct Left {
    pub status: ExitStatus,
    /// The child's own report of its end, or `None` if it did not get there.
    pub ended: Option<Ended>,
    /// All output of the child.
    pub said: String,
    pub books: Option<Books>,
    pub journal: Vec<Entry>,
    pub time: Duration,
}

impl Left {
    /// The most bytes that the driver gave out.
    pub fn peak(&self) -> Bytes {
        let books = self.books.as_ref().filter(|books| books.devices() > 0);
        Bytes::new(books.map_or(0, |books| books.device(0).peak()))
    }

    /// The report of a child that must have ended without an error.
    pub fn fitted(&self) -> Result<&Ended, Failed> {
        let ended = self.ended.as_ref().ok_or_else(|| self.complaint("the child did not end"))?;
        match &ended.error {
            None => Ok(ended),
            Some(_) => Err(self.complaint("training failed")),
        }
    }

    /// Kind and text of the error that training must have ended with.
    pub fn error(&self) -> Result<(&str, &str), Failed> {
        let error = self.ended.as_ref().and_then(|ended| ended.error.as_ref());
        let (kind, words) = error.ok_or_else(|| self.complaint("there is no error"))?;
        ensure(self.status.code() == Some(1), || self.complaint("the exit status is another"))?;
        Ok((kind, words))
    }

    /// A test failure that says what is wrong and includes the child's output.
    pub fn complaint(&self, what: &str) -> Failed {
        let end: String = self.said.lines().rev().take(40).collect::<Vec<_>>().join("\n");
        format!("{what} ({}, {:.1?}); it said, last line first:\n{end}", self.status, self.time)
            .into()
    }
}

/// Fails a test with `complaint` unless `holds`.
pub fn ensure(holds: bool, complaint: impl FnOnce() -> Failed) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(complaint()) }
}

/// Finds a card by name.
pub fn card(name: &str) -> Card {
    Card::named(name).expect("it is in the table")
}

/// A machine with only this card.
pub fn only(card_name: &str) -> Settings {
    Settings::new([device(&card(card_name))])
}

/// Runs a job in a child process on a machine.
pub fn run(settings: &Settings, job: &Job) -> Result<Left, Failed> {
    run_with(settings, job, LIMIT, |_, _| ())
}

/// Same as [`run`], with a different time limit, after `last_word` has changed the command.
pub fn run_with(
    settings: &Settings,
    job: &Job,
    limit: Duration,
    last_word: impl FnOnce(&mut Command, &Path),
) -> Result<Left, Failed> {
    let blank = Blank::install(settings)?;
    let program = std::env::current_exe()?;
    let mut command = blank.command(program);
    let (name, value) = job.variable();
    command.env(name, value).env("RUST_BACKTRACE", "0").env("RUST_MIN_STACK", "16777216");
    last_word(&mut command, blank.folder());
    let output = blank.folder().join("output");
    command.stdout(std::fs::File::create(&output)?);
    command.stderr(std::fs::File::options().append(true).open(&output)?);
    let started = Instant::now();
    let mut child = command.spawn()?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > limit {
            child.kill()?;
            let said = String::from_utf8_lossy(&std::fs::read(&output)?).into_owned();
            let end: Vec<&str> = said.lines().rev().take(40).collect();
            return Err(format!("the child hangs; last line first:\n{}", end.join("\n")).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let time = started.elapsed();
    let said = String::from_utf8_lossy(&std::fs::read(&output)?).into_owned();
    let books = blank.books_of(child.id()).ok();
    let journal = blank.journal_of(child.id()).unwrap_or_default();
    Ok(Left { status, ended: Ended::parse(&said), said, books, journal, time })
}

/// A folder with the kernels and choices that the small jobs of a card need. It is made once and
/// copied for each child, because processes that share a folder disturb each other.
pub struct Kernels(tempfile::TempDir);

impl Kernels {
    /// A copy of the folder for this model.
    pub fn of(model: &'static str, items: usize) -> Result<Self, Failed> {
        static WARM: OnceLock<std::sync::Mutex<Vec<(&str, tempfile::TempDir)>>> = OnceLock::new();
        let mut warm =
            WARM.get_or_init(Default::default).lock().map_err(|_| "an earlier test failed")?;
        if !warm.iter().any(|(of, _)| *of == model) {
            let folder = tempfile::tempdir()?;
            let job = Job {
                validates: true,
                uneven: true,
                ..Job::new(model, items, folder.path().to_owned())
            };
            run_with(&only(CARD), &job, LIMIT * 3, |_, _| ())?.fitted()?;
            warm.push((model, folder));
        }
        let (_, from) = warm.iter().find(|(of, _)| *of == model).ok_or("it was made above")?;
        let copy = tempfile::tempdir()?;
        copy_folder(from.path(), copy.path())?;
        Ok(Self(copy))
    }

    /// Path of the copy.
    pub fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

/// The card of most tests: small, and neither the oldest nor the newest.
pub const CARD: &str = "RTX 3070";

fn copy_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Makes a test with this name.
pub fn test(
    name: impl Into<String>,
    test: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, test)
}
