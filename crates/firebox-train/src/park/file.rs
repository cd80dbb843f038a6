//! A file for tensors that wait outside of the device. Each has a place in it, which another takes
//! once it is gone.
//!
//! Reads and writes are ordinary ones. Mapped memory would save nothing, because an upload copies
//! its data, and a full disk would be a signal instead of an error.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Shape, TensorData};
use firebox_lazy::Parked;

use crate::error::TrainError;

/// The file.
#[derive(Debug)]
pub(crate) struct StateFile {
    folder: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    /// The end of the last place.
    end: u64,
    /// Places that nobody has, by their sizes. An optimizer asks for the same sizes in every step.
    free: BTreeMap<u64, Vec<u64>>,
    /// The first error of a write that nobody was told of.
    failed: Option<io::Error>,
}

impl Inner {
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(at))?;
        self.file.write_all(bytes)
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(bytes)
    }

    /// A place of this size.
    fn take(&mut self, size: u64) -> u64 {
        if let Some(place) = self.free.get_mut(&size).and_then(Vec::pop) {
            return place;
        }
        let place = self.end;
        self.end += size;
        place
    }
}

impl StateFile {
    /// A file without a name in `folder`.
    ///
    /// # Errors
    ///
    /// If it cannot be made.
    pub(crate) fn create(folder: &Path) -> Result<Self, TrainError> {
        let folder = folder.to_owned();
        let file = tempfile::tempfile_in(&folder);
        let file = file.map_err(|cause| TrainError::NotParked { folder: folder.clone(), cause })?;
        let inner = Inner { file, end: 0, free: BTreeMap::new(), failed: None };
        Ok(Self { folder, inner: Mutex::new(inner) })
    }

    /// Loses what was written, as a disk that fails.
    #[cfg(test)]
    pub(super) fn cut_off(&self) {
        self.inner().file.set_len(0).expect("it can be cut");
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the values of a tensor. If that fails they stay in host memory, and
    /// [`check`](Self::check) returns the error.
    pub(crate) fn keep(self: &Arc<Self>, data: TensorData) -> Arc<dyn Parked> {
        let mut inner = self.inner();
        let size = data.bytes.len() as u64;
        let at = inner.take(size);
        if let Err(error) = inner.write(at, &data.bytes) {
            inner.failed.get_or_insert(error);
            inner.free.entry(size).or_default().push(at);
            return Arc::new(data);
        }
        let TensorData { shape, dtype, .. } = data;
        Arc::new(InFile { file: self.clone(), at, size, shape, dtype })
    }

    /// # Errors
    ///
    /// If a write has failed since the last call.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let failed = self.inner().failed.take();
        failed.map_or(Ok(()), |cause| {
            Err(TrainError::NotParked { folder: self.folder.clone(), cause })
        })
    }
}

/// A tensor in the file.
struct InFile {
    file: Arc<StateFile>,
    at: u64,
    size: u64,
    shape: Shape,
    dtype: DType,
}

impl Parked for InFile {
    fn fetch(self: Arc<Self>) -> TensorData {
        let mut bytes = vec![0; self.size as usize];
        if let Err(error) = self.file.inner().read(self.at, &mut bytes) {
            panic!(
                "optimizer state cannot be read from the file in {}: {error}",
                self.file.folder.display()
            );
        }
        TensorData::from_bytes_vec(bytes, self.shape.clone(), self.dtype)
    }
}

impl Drop for InFile {
    fn drop(&mut self) {
        self.file.inner().free.entry(self.size).or_default().push(self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(values: &[f32]) -> TensorData {
        TensorData::new(values.to_vec(), [values.len()])
    }

    #[test]
    fn what_is_written_is_read_and_places_are_taken_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = Arc::new(StateFile::create(folder.path()).expect("it can be made"));
        let (odd, even) = (data(&[1.0, 2.0, 3.0]), data(&[4.0, 5.0]));
        let (first, second) = (file.keep(odd.clone()), file.keep(even.clone()));
        assert_eq!(file.inner().end, 20);
        assert_eq!((first.fetch(), second.clone().fetch()), (odd, even.clone()));
        let third = file.keep(data(&[6.0, 7.0, 8.0]));
        assert_eq!(file.inner().end, 20, "the first place is taken again");
        assert_eq!((third.fetch(), second.fetch()), (data(&[6.0, 7.0, 8.0]), even));
        assert!(file.check().is_ok());
        let names = std::fs::read_dir(folder.path()).expect("it is there").count();
        assert_eq!(names, 0, "nothing is left behind");
    }

    #[test]
    fn what_cannot_be_written_stays_in_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = StateFile::create(folder.path()).expect("it can be made");
        let path = folder.path().join("read-only");
        std::fs::write(&path, []).expect("it can be made");
        file.inner().file = File::open(path).expect("it is there");
        let file = Arc::new(file);
        let kept = file.keep(data(&[1.0, 2.0]));
        let error = file.check().expect_err("it cannot be written to").to_string();
        assert!(error.contains("optimizer state cannot be written"), "{error}");
        assert_eq!(kept.fetch(), data(&[1.0, 2.0]));
        assert!(file.check().is_ok(), "the error was told");
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error() {
        let error = StateFile::create(Path::new("/nowhere/at/all")).expect_err("it is not there");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
