//! A folder of files that are found by a hash. Several processes may use it at once: a file appears
//! when it is whole, and one that is damaged, foreign or gone counts as missing.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// How the names of our files end. The user's folder may hold others.
const ENDING: &str = "firebox-plan";

/// The most bytes of an unpacked entry. The timeline of a footprint repeats itself, and unpacks to
/// a hundred times its length.
const MOST_UNPACKED: usize = 1 << 26;

/// How well files are compressed, from 1 to 22.
const LEVEL: i32 = 3;

/// The folder is looked through once for every this many bytes written, as a share of its limit.
const LOOKS: u64 = 16;

#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    /// The most bytes of all files, and of one.
    most: u64,
    most_of_one: u64,
    /// The bytes written since the folder was looked through.
    written: AtomicU64,
}

impl Store {
    pub(super) fn new(folder: PathBuf, most: u64, most_of_one: u64) -> Self {
        // The first entry looks: earlier processes may have filled the folder.
        Self { folder, most, most_of_one, written: AtomicU64::new(most) }
    }

    /// The entry of this hash.
    pub(super) fn get<T: DeserializeOwned>(&self, hash: &blake3::Hash) -> Option<T> {
        let path = self.path(hash);
        let entry = self.read(&path);
        if let Some(file) = entry.as_ref().and_then(|_| File::open(&path).ok()) {
            // The entries used last stay longest.
            let _ = file.set_modified(SystemTime::now());
        }
        entry
    }

    /// Writes the entry of this hash. Where that fails, it is missing next time.
    pub(super) fn put<T: Serialize>(&self, hash: &blake3::Hash, entry: &T) {
        let result = self.write(hash, entry).and_then(|length| {
            let written = self.written.fetch_add(length, Relaxed) + length;
            if written < self.most / LOOKS {
                return Ok(());
            }
            self.written.store(0, Relaxed);
            self.clear()
        });
        if let Err(error) = result {
            log::debug!("{}: what planning found is not kept: {error}", self.folder.display());
        }
    }

    fn path(&self, hash: &blake3::Hash) -> PathBuf {
        self.folder.join(format!("{hash}.{ENDING}"))
    }

    fn read<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(self.most_of_one).read_to_end(&mut bytes).ok()?;
        let (hash, packed) = bytes.split_at_checked(blake3::OUT_LEN)?;
        if blake3::hash(packed).as_bytes() != hash {
            return None;
        }
        let mut unpacked = Vec::new();
        let decoder = zstd::Decoder::new(packed).ok()?;
        decoder.take(MOST_UNPACKED as u64).read_to_end(&mut unpacked).ok()?;
        let entry = bincode::serde::decode_from_slice(&unpacked, bincode::config::standard());
        entry.ok().filter(|(_, read)| *read == unpacked.len()).map(|(entry, _)| entry)
    }

    /// Returns the length of the file.
    fn write<T: Serialize>(&self, hash: &blake3::Hash, entry: &T) -> io::Result<u64> {
        let unpacked = bincode::serde::encode_to_vec(entry, bincode::config::standard());
        let unpacked = unpacked.map_err(io::Error::other)?;
        let packed = zstd::encode_all(&*unpacked, LEVEL)?;
        let length = (blake3::OUT_LEN + packed.len()) as u64;
        if length > self.most_of_one || unpacked.len() > MOST_UNPACKED {
            return Err(io::Error::other("it is too large"));
        }
        fs::create_dir_all(&self.folder)?;
        let ending = format!(".{ENDING}");
        let mut file = tempfile::Builder::new().suffix(&ending).tempfile_in(&self.folder)?;
        file.write_all(blake3::hash(&packed).as_bytes())?;
        file.write_all(&packed)?;
        file.persist(self.path(hash))?;
        Ok(length)
    }

    /// Removes those of our files that were used longest ago, until half of the limit is free. What
    /// a process that was killed has left half written is among them.
    fn clear(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != ENDING) {
                continue;
            }
            // Another process may have removed it.
            let Ok(of_file) = path.symlink_metadata() else { continue };
            if of_file.is_file() {
                files.push((of_file.modified()?, of_file.len(), path));
            }
        }
        let mut bytes: u64 = files.iter().map(|(_, length, _)| length).sum();
        if bytes <= self.most {
            return Ok(());
        }
        files.sort();
        for (_, length, path) in files {
            if bytes <= self.most / 2 {
                break;
            }
            bytes -= length;
            let _ = fs::remove_file(path);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u32) -> blake3::Hash {
        blake3::hash(&number.to_le_bytes())
    }

    /// Noise, so that it stays as long when it is packed.
    fn noise(seed: u32, length: usize) -> Vec<u8> {
        let mut noise = vec![0; length];
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).finalize_xof().fill(&mut noise);
        noise
    }

    #[test]
    fn an_entry_is_found_by_its_hash_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().join("new"), 1 << 20, 1 << 20);
        assert_eq!(store.get::<String>(&hash(1)), None, "there is no folder yet");
        store.put(&hash(1), &"one");
        store.put(&hash(2), &"two");
        assert_eq!(store.get::<String>(&hash(1)).as_deref(), Some("one"));
        assert_eq!(store.get::<String>(&hash(2)).as_deref(), Some("two"));
        assert_eq!(store.get::<String>(&hash(3)), None);
        assert_eq!(store.get::<(String, String)>(&hash(1)), None, "another type");
    }

    #[test]
    fn a_damaged_entry_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().into(), 1 << 20, 1 << 20);
        let entry = noise(7, 300);
        store.put(&hash(1), &entry);
        let whole = fs::read(store.path(&hash(1))).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(store.path(&hash(1)), &bytes).unwrap();
            assert_eq!(store.get::<Vec<u8>>(&hash(1)), None, "byte {at} was changed");
            fs::write(store.path(&hash(1)), &whole[..at]).unwrap();
            assert_eq!(store.get::<Vec<u8>>(&hash(1)), None, "{at} bytes are left");
        }
        store.put(&hash(1), &entry);
        assert_eq!(store.get(&hash(1)), Some(entry), "it is written anew");
    }

    #[test]
    fn the_folder_stays_within_its_limit_and_keeps_what_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().into(), 100_000, 10_000);
        // A file of the user's, older and larger than all of ours.
        let of_user = folder.path().join("of the user");
        fs::write(&of_user, noise(1000, 200_000)).unwrap();
        store.put(&hash(0), &noise(0, 3000));
        for number in 1..200 {
            store.put(&hash(number), &noise(number, 3000));
            assert!(store.get::<Vec<u8>>(&hash(0)).is_some(), "it was used just now ({number})");
            let lengths =
                fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata());
            let bytes: u64 = lengths.map(|of_file| of_file.unwrap().len()).sum();
            let bytes = bytes - 200_000;
            assert!(bytes <= 100_000 + 100_000 / LOOKS + 10_000, "{bytes} after {number}");
        }
        assert!(of_user.exists(), "only our own files are removed");
        assert!(store.get::<Vec<u8>>(&hash(1)).is_none());
        assert!(store.get::<Vec<u8>>(&hash(199)).is_some());
        store.put(&hash(400), &vec![7_u8; 1 << 20]);
        assert_eq!(store.get::<Vec<u8>>(&hash(400)).map(|entry| entry.len()), Some(1 << 20));
        store.put(&hash(500), &noise(500, 20_000));
        assert!(store.get::<Vec<u8>>(&hash(500)).is_none(), "it is too large");
    }

    #[test]
    fn a_folder_that_cannot_be_had_keeps_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "no folder").unwrap();
        let store = Store::new(file.join("in it"), 1 << 20, 1 << 20);
        store.put(&hash(1), &"one");
        assert_eq!(store.get::<String>(&hash(1)), None);
    }
}
