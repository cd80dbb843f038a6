//! A recorder whose checkpoints are on disk once it says so. Users put it around burn's recorder;
//! burn's checkpointer then calls it.
//!
//! burn 0.21's file recorders first remove an older file of the same name, write through a buffer,
//! and never check that its last part was written. On a full disk a save succeeds and leaves an
//! empty or truncated file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use burn::record::{BurnRecord, FileRecorder, Record, Recorder, RecorderError};
use burn::tensor::backend::Backend;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A file recorder that never leaves a partial file. Wrap any of burn's file recorders in it and
/// pass it to `with_file_checkpointer`.
///
/// It saves a record in four steps: writes it next to its final place, under a name that ends in
/// `-unfinished`; flushes it to disk (`fsync`); reads it back and decodes it; moves it to its final
/// place atomically. A save that fails, for example on a full disk, is an error and leaves the
/// previous file. The Learner then ends with
/// [`TrainError::Checkpoint`](crate::TrainError::Checkpoint). Checkpoints of earlier epochs stay,
/// so keep at least two, which is burn's default. If a file cannot be read, the error names it and
/// the newest older file that can.
///
/// The files have the format of the inner recorder, and each can read the other's files. Reading
/// back takes as much host memory as the record, after it is written.
///
/// ```
/// use burn::backend::Flex;
/// use burn::nn::LinearConfig;
/// use burn::module::Module;
/// use burn::record::{CompactRecorder, Recorder};
/// use firebox_train::DurableRecorder;
///
/// let folder = tempfile::tempdir()?;
/// let recorder = DurableRecorder::new(CompactRecorder::new());
/// let linear = LinearConfig::new(4, 2).init::<Flex>(&Default::default());
/// let path = folder.path().join("model-1");
/// Recorder::<Flex>::record(&recorder, linear.into_record(), path.clone())?;
/// assert!(path.with_extension("mpk").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct DurableRecorder<R> {
    recorder: R,
}

impl<R> DurableRecorder<R> {
    /// Wraps `recorder`.
    pub fn new(recorder: R) -> Self {
        Self { recorder }
    }

    /// Saves through `write`, which writes to the path it is given, checks the result with `read`,
    /// and moves it to its final place.
    fn save<B: Backend>(
        path: &Path,
        write: impl FnOnce(PathBuf) -> Result<(), RecorderError>,
        read: impl FnOnce(PathBuf) -> Result<(), RecorderError>,
    ) -> Result<(), RecorderError>
    where
        R: FileRecorder<B>,
    {
        let Names { place, unfinished } = Names::of(path, R::file_extension());
        let written = unfinished.with_extension(R::file_extension());
        let done = write(unfinished.clone())
            .and_then(|()| bring_to_disk(&written).map_err(|error| not_written(&place, &error)))
            .and_then(|()| read(unfinished).map_err(|error| not_written(&place, &error)))
            .and_then(|()| {
                fs::rename(&written, &place).map_err(|error| not_written(&place, &error))
            });
        match done {
            // The file's name is on disk once its folder is. Not every system can flush folders.
            Ok(()) => drop(File::open(folder_of(&place)).and_then(|folder| folder.sync_all())),
            Err(_) => drop(fs::remove_file(&written)),
        }
        done
    }
}

impl<B: Backend, R: FileRecorder<B>> Recorder<B> for DurableRecorder<R> {
    type Settings = R::Settings;
    type RecordArgs = PathBuf;
    type RecordOutput = ();
    type LoadArgs = PathBuf;

    fn record<T: Record<B>>(&self, record: T, path: PathBuf) -> Result<(), RecorderError> {
        let write = |unfinished| self.recorder.record(record, unfinished);
        let read = |mut unfinished| {
            let load = R::load_item::<BurnRecord<T::Item<R::Settings>, B>>;
            load(&self.recorder, &mut unfinished).map(drop)
        };
        Self::save::<B>(&path, write, read)
    }

    /// Like [`record`](Recorder::record), but does not read the file back, because the type to read
    /// is unknown here.
    fn save_item<I: Serialize>(&self, item: I, path: PathBuf) -> Result<(), RecorderError> {
        let write = |unfinished| self.recorder.save_item(item, unfinished);
        Self::save::<B>(&path, write, |_| Ok(()))
    }

    fn load_item<I: DeserializeOwned>(&self, path: &mut PathBuf) -> Result<I, RecorderError> {
        let asked = path.clone();
        self.recorder.load_item(path).map_err(|error| {
            let Names { place, .. } = Names::of(&asked, R::file_extension());
            let other = |place: &PathBuf| {
                let mut path = place.with_extension("");
                self.recorder.load_item::<I>(&mut path).is_ok()
            };
            let newest = older(&place).into_iter().find(other);
            let newest = newest.map_or_else(
                || "nor can another one beside it".to_owned(),
                |newest| format!("the newest before it that can is {}", newest.display()),
            );
            RecorderError::Unknown(format!(
                "{} cannot be read ({error}); {newest}",
                place.display()
            ))
        })
    }
}

impl<B: Backend, R: FileRecorder<B>> FileRecorder<B> for DurableRecorder<R> {
    fn file_extension() -> &'static str {
        R::file_extension()
    }
}

/// The paths of one save.
struct Names {
    /// The final path.
    place: PathBuf,
    /// The path that a recorder is told to write to, without its extension.
    unfinished: PathBuf,
}

impl Names {
    /// Recorders replace what looks like an extension.
    fn of(path: &Path, extension: &str) -> Self {
        let stem = path.with_extension("");
        let name = stem.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let unfinished = stem.with_file_name(format!("{name}-unfinished"));
        Self { place: path.with_extension(extension), unfinished }
    }
}

/// Replaces a small file as a whole.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    fs::create_dir_all(folder_of(path))?;
    fs::write(&unfinished, content)?;
    bring_to_disk(&unfinished)?;
    fs::rename(&unfinished, path)
}

fn bring_to_disk(path: &Path) -> io::Result<()> {
    // Some systems flush a file only through a writable handle.
    File::options().write(true).open(path)?.sync_all()
}

fn folder_of(place: &Path) -> &Path {
    place.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

fn not_written(place: &Path, error: &dyn std::fmt::Display) -> RecorderError {
    RecorderError::Unknown(format!(
        "{} was not written whole ({error}); is the disk full? What was there before is still there",
        place.display()
    ))
}

/// The files of the same name with smaller numbers, newest first: `model-3.mpk`, `model-2.mpk` for
/// `model-4.mpk`.
fn older(place: &Path) -> Vec<PathBuf> {
    let Some((name, rest)) = place.file_name().and_then(|name| name.to_str()?.split_once('.'))
    else {
        return Vec::new();
    };
    let Some((stem, Ok(number))) = name.rsplit_once('-').map(|(stem, n)| (stem, n.parse::<u64>()))
    else {
        return Vec::new();
    };
    let number_of = |name: &str| -> Option<u64> {
        name.strip_prefix(stem)?
            .strip_prefix('-')?
            .strip_suffix(rest)?
            .strip_suffix('.')?
            .parse()
            .ok()
    };
    let entries = fs::read_dir(folder_of(place)).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| number_of(entry.file_name().to_str()?));
    let mut numbers: Vec<u64> = numbers.filter(|other| *other < number).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    let of = |number| place.with_file_name(format!("{stem}-{number}.{rest}"));
    numbers.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::record::{CompactRecorder, FullPrecisionSettings, NamedMpkGzFileRecorder};

    use super::*;

    /// Silently loses the second half of each file, as burn's recorders do on a full disk.
    #[derive(Clone, Debug, Default)]
    struct Losing<R>(R);

    impl<R: FileRecorder<Flex>> Recorder<Flex> for Losing<R> {
        type Settings = R::Settings;
        type RecordArgs = PathBuf;
        type RecordOutput = ();
        type LoadArgs = PathBuf;

        fn save_item<I: Serialize>(&self, item: I, path: PathBuf) -> Result<(), RecorderError> {
            self.0.save_item(item, path.clone())?;
            let path = path.with_extension(R::file_extension());
            let length = fs::metadata(&path).expect("it is there").len();
            File::options()
                .write(true)
                .open(&path)
                .and_then(|file| file.set_len(length / 2))
                .expect("it is cut");
            Ok(())
        }

        fn load_item<I: DeserializeOwned>(&self, path: &mut PathBuf) -> Result<I, RecorderError> {
            self.0.load_item(path)
        }
    }

    impl<R: FileRecorder<Flex>> FileRecorder<Flex> for Losing<R> {
        fn file_extension() -> &'static str {
            R::file_extension()
        }
    }

    fn linear() -> Linear<Flex> {
        LinearConfig::new(3, 2).init(&Default::default())
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let name = |entry: io::Result<fs::DirEntry>| {
            entry.expect("an entry").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort();
        names
    }

    fn saved_and_lost<R: FileRecorder<Flex>>(inner: R) {
        let extension = R::file_extension();
        let folder = tempfile::tempdir().expect("a folder");
        let path = |epoch: usize| folder.path().join(format!("model-{epoch}"));
        let good = DurableRecorder::new(inner.clone());
        let bad = DurableRecorder::new(Losing(inner.clone()));
        Recorder::<Flex>::record(&good, linear().into_record(), path(1)).expect("there is room");
        let expected = vec![format!("model-1.{extension}")];
        assert_eq!(names(folder.path()), expected, "nothing else is left");

        // Neither a new file nor a replacement is left half written.
        let before = fs::read(path(1).with_extension(extension)).expect("it is there");
        for epoch in [2, 1] {
            let error = Recorder::<Flex>::record(&bad, linear().into_record(), path(epoch));
            let text = error.expect_err("half of it is lost").to_string();
            assert!(text.contains(&format!("model-{epoch}.{extension}")), "{text}");
            assert_eq!(names(folder.path()), expected);
        }
        assert_eq!(fs::read(path(1).with_extension(extension)).expect("it is there"), before);

        // burn's own recorder reads the file. A file truncated by something else is named in the
        // error, with the newest whole one.
        let plain = linear().load_file(path(1), &inner, &Default::default());
        assert!(plain.is_ok(), "the format is burn's");
        Recorder::<Flex>::record(&Losing(inner), linear().into_record(), path(3)).expect("silence");
        let error = linear().load_file(path(3), &good, &Default::default());
        let text = error.expect_err("it is cut").to_string();
        let named = text.contains(&format!("model-3.{extension}"))
            && text.contains(&format!("model-1.{extension}"));
        assert!(named, "{text}");
    }

    #[test]
    fn a_file_is_whole_or_not_there() {
        saved_and_lost(CompactRecorder::new());
    }

    #[test]
    fn so_is_a_packed_one() {
        saved_and_lost(NamedMpkGzFileRecorder::<FullPrecisionSettings>::new());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("file"), "no folder").expect("a file");
        let path = folder.path().join("file/model-1");
        let recorder = DurableRecorder::new(CompactRecorder::new());
        assert!(Recorder::<Flex>::record(&recorder, linear().into_record(), path).is_err());
    }
}
