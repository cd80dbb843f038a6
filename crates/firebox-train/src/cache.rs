//! What planning found in earlier runs of the same program: answers of memory models, and what the
//! splits of a search need. The planner asks here before it replays or rehearses.
//!
//! An entry is found by a hash of all that determines it: the program file, the memory model with
//! the device's properties and the tuner's choices, and the recorded trace. So an entry is never
//! wrong, only missing.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use firebox_plan::{Need, Split};
use firebox_trace::{Bytes, Estimate, Footprint, MemoryModel, Question, Trace};

mod store;

use self::store::Store;

/// The environment variable with the folder of the cache. Empty: nothing is kept.
const FOLDER: &str = "FIREBOX_CACHE";

/// The most bytes of a cache's files, and of one file.
const MOST: u64 = 64 << 20;
const MOST_OF_ONE: u64 = 8 << 20;

/// A hash of what determines an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(blake3::Hash);

impl Key {
    /// The key of what is known of a memory model's answer to a question. None if the model does
    /// not say what determines its answers, or the program file cannot be looked at.
    pub(crate) fn of(memory: &dyn MemoryModel, question: &Question<'_>) -> Option<Self> {
        let Question { trace, before, pages, enough } = question;
        let mut hasher = blake3::Hasher::new();
        hasher.update(program()?.as_bytes());
        hasher.update(memory.key()?.as_bytes());
        hasher.update(format!("{pages:?} {enough:?} {}", before.len()).as_bytes());
        before.iter().for_each(|before| {
            hasher.update(before.fingerprint().as_bytes());
        });
        hasher.update(trace.fingerprint().as_bytes());
        Some(Self(hasher.finalize()))
    }

    /// The key of something that also depends on `more`.
    pub(crate) fn with(&self, more: &impl Debug) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.0.as_bytes());
        hasher.update(format!("{more:?}").as_bytes());
        Self(hasher.finalize())
    }
}

/// What tells this program from others and from itself before it was compiled again, with other
/// versions of firebox, burn and CubeCL among others: the file's place, length and time.
fn program() -> Option<&'static str> {
    static PROGRAM: OnceLock<Option<String>> = OnceLock::new();
    let look = || {
        let path = std::env::current_exe().ok()?;
        let file = path.metadata().ok()?;
        let time = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!("{} {} {}", path.display(), file.len(), time.as_nanos()))
    };
    PROGRAM.get_or_init(look).as_deref()
}

/// The cache of one folder.
#[derive(Clone, Debug)]
pub(crate) struct Cache(Arc<Store>);

impl Cache {
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self(Arc::new(Store::new(folder.into(), MOST, MOST_OF_ONE)))
    }

    /// The cache of the user, if there is a place for it.
    pub(crate) fn of_user() -> Option<Self> {
        let folder = match std::env::var_os(FOLDER) {
            Some(folder) => {
                Some(PathBuf::from(folder)).filter(|folder| !folder.as_os_str().is_empty())
            }
            None => dirs::cache_dir().map(|folder| folder.join("firebox").join("plans")),
        };
        folder.map(Self::new)
    }

    /// What splits need, if a search has written it down.
    pub(crate) fn needs(&self, key: &Key) -> Option<Vec<(Split, Need)>> {
        self.0.get(&key.0)
    }

    pub(crate) fn keep_needs(&self, key: &Key, needs: &[(Split, Need)]) {
        self.0.put(&key.0, &needs);
    }
}

/// A memory model whose answers are kept for later processes.
pub(crate) struct Remembering {
    pub(crate) model: Arc<dyn MemoryModel>,
    pub(crate) cache: Cache,
}

impl MemoryModel for Remembering {
    fn name(&self) -> &str {
        self.model.name()
    }

    fn answer(&self, question: &Question<'_>) -> Footprint {
        let Some(key) = Key::of(&*self.model, question) else {
            return self.model.answer(question);
        };
        if let Some(footprint) = self.cache.0.get(&key.0) {
            return footprint;
        }
        let footprint = self.model.answer(question);
        // A guess may have had a cause that is gone next time. A lower bound is found as fast as it
        // is looked up.
        if !matches!(footprint.estimate, Estimate::Heuristic | Estimate::LowerBound) {
            self.cache.0.put(&key.0, &footprint);
        }
        footprint
    }

    fn at_least(&self, trace: &Trace) -> Bytes {
        self.model.at_least(trace)
    }

    fn key(&self) -> Option<String> {
        self.model.key()
    }

    fn is_on_host(&self) -> bool {
        self.model.is_on_host()
    }

    fn keeps_pages(&self) -> bool {
        self.model.keeps_pages()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use firebox_trace::{Bytes, Mark, Step, Trace};

    use super::*;

    /// Counts how often it is asked.
    struct Counting {
        asked: AtomicUsize,
        key: Option<&'static str>,
        estimate: Estimate,
    }

    impl MemoryModel for Counting {
        fn name(&self) -> &str {
            "counting"
        }

        fn answer(&self, question: &Question<'_>) -> Footprint {
            let asked = self.asked.fetch_add(1, Relaxed);
            let peak = Bytes::new((asked + question.trace.steps.len()) as u64);
            Footprint { peak, estimate: self.estimate, ..Footprint::default() }
        }

        fn key(&self) -> Option<String> {
            self.key.map(str::to_owned)
        }
    }

    fn trace(marks: usize) -> Trace {
        Trace { steps: vec![Step::Mark(Mark::Drain); marks], ..Trace::default() }
    }

    /// How often a model is asked by two processes, for five different questions.
    fn asked(key: Option<&'static str>, estimate: Estimate) -> usize {
        let folder = tempfile::tempdir().unwrap();
        let model = Arc::new(Counting { asked: AtomicUsize::new(0), key, estimate });
        let process = || {
            let cache = Cache::new(folder.path());
            let remembering = Remembering { model: model.clone(), cache };
            let (one, two) = (trace(1), trace(2));
            let question = Question::new(&one);
            let questions = [
                question,
                Question::new(&two),
                Question { before: &[&two], ..question },
                Question { enough: Bytes::mib(1), ..question },
                Question { pages: firebox_trace::EarlierPages::GiveBack, ..question },
            ];
            questions.map(|question| remembering.answer(&question).peak)
        };
        let (first, second) = (process(), process());
        assert_eq!(first == second, model.asked.load(Relaxed) == first.len());
        model.asked.load(Relaxed)
    }

    #[test]
    fn what_was_answered_is_not_asked_again() {
        assert_eq!(asked(Some("a model"), Estimate::Exact), 5);
        assert_eq!(asked(Some("a model"), Estimate::UpperBound), 5);
        assert_eq!(asked(Some("a model"), Estimate::Heuristic), 10, "guesses are not kept");
        assert_eq!(asked(None, Estimate::Exact), 10, "nobody knows what determines them");
    }

    #[test]
    fn another_model_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let peak = |key| {
            let (asked, estimate) = (AtomicUsize::new(key as usize), Estimate::Exact);
            let model = Arc::new(Counting { asked, key: Some(["a", "b"][key as usize]), estimate });
            Remembering { model, cache: Cache::new(folder.path()) }.footprint(&trace(1)).peak
        };
        assert_eq!([peak(false), peak(true), peak(false)].map(Bytes::get), [1, 2, 1]);
    }
}
